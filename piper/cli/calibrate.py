"""`piper calibrate`: tables of measurements -> a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cost_models.documents import yaml_text
from piper.cli.options import job_options, json_option, strategy_option
from piper.cli.output import emit, prepared, progress
from piper.errors import JobError

if TYPE_CHECKING:
    from cost_models.calibration import Calibration
    from piper.report.anchor import Anchored
    from simulator.plan import Plan


@click.command()
@click.argument("tables", metavar="[TABLE...]", nargs=-1)
@click.option("--out", metavar="F.yaml", required=True, help="The cluster file that is written.")
@click.option("--from-trace", metavar="RESULT", help="Anchor to a recorded run: an --out folder or a trace.")
@click.option("--from-log", metavar="F", help="Anchor to the step times of a training log.")
@click.option("--model", metavar="MODEL", help="What that job trained, where its folder keeps no plan.")
@strategy_option
@job_options
@json_option
def calibrate(
    *,
    tables: tuple[str, ...],
    out: str,
    from_trace: str | None,
    from_log: str | None,
    model: str | None,
    strategy: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Fit the device, the links and the host of a cluster to tables of `piper profile`.

    A part of the rows takes no part in the fit; the errors on it are printed. With --from-trace or --from-log
    the cluster (fitted, or --cluster) is anchored to one measured job: all computation, all communication and
    the costs of the host take so many times as long, within bounds. The file is used with --cluster F.yaml.

    \b
    Examples:
      piper calibrate cpu.csv --out here.yaml
      piper simulate tiny-llama --cluster here.yaml --dtype fp32 --strategy pp=2
      piper calibrate gpu.csv node.csv --cluster dgx-h100 --out my-h100.yaml
      piper calibrate --cluster here.yaml --from-trace run --out anchored.yaml
      piper calibrate --cluster dgx-h100 --from-log train.log --model llama3-8b --strategy dp=8 --out a.yaml
    """
    from cost_models.catalogue import cluster_content

    path = prepared(out, option="--out")
    _require_one_way(tables, from_trace, from_log)
    shown: dict[str, Any] = {}
    texts: list[str] = []
    with progress("calibrating") as show:
        cluster = given.pop("cluster")
        if tables:
            found = _fit(tables, cluster, name=_name_of(path), report=show)
            content = found.content
            shown, texts = shown | _as_json(found), [_text(found)]
        else:
            content = cluster_content(cluster or "local-cpu")
        if from_trace or from_log:
            job = {"model": model, "strategy": strategy, "given": given}
            anchored = _anchor(content, from_trace, from_log, job=job, path=path)
            content = anchored.content
            shown, texts = shown | _anchor_json(anchored), [*texts, _anchor_text(anchored)]
    content["name"] = _name_of(path)
    path.write_text(yaml_text(content), encoding="utf-8")
    _require_loads(path)
    texts.append(f"wrote {path}; use it with --cluster {path}")
    emit(shown | {"wrote": str(path)}, as_json=as_json, text=lambda: "\n\n".join(texts))


def _require_one_way(tables: tuple[str, ...], from_trace: str | None, from_log: str | None) -> None:
    if from_trace and from_log:
        raise JobError(
            where="command line", field="--from-log", value=from_log, rule="contradicts --from-trace",
            fix="anchor to one of them",
        )  # fmt: skip
    if not (tables or from_trace or from_log):
        raise JobError(
            where="command line", field="TABLE", value="(nothing)", rule="must be given",
            fix="give a table of `piper profile`, or --from-trace or --from-log",
        )  # fmt: skip


def _fit(tables: tuple[str, ...], cluster: str | None, *, name: str, report: Any) -> Calibration:
    from cost_models.calibration import calibrate as fit
    from cost_models.calibration import read_table

    rows = [row for table in tables for row in read_table(table)]
    return fit(rows, base=cluster or _base_of(rows), name=name, report=report)


def _anchor(
    content: dict[str, Any], from_trace: str | None, from_log: str | None, *, job: dict[str, Any], path: Path
) -> Anchored:
    from piper.report.anchor import anchor_to_result, anchor_to_step_time, step_time_of_log
    from piper.report.result import load_plan_of_result, load_result

    stack = job["given"].get("stack") or "piper"
    if from_trace and job["model"] is None:
        plan = load_plan_of_result(from_trace)
    else:
        plan = _plan(job, content, path)
    if from_trace:
        return anchor_to_result(content, plan, load_result(from_trace), stack=stack)
    return anchor_to_step_time(content, plan, step_time_of_log(str(from_log)), stack=stack)


def _plan(job: dict[str, Any], content: dict[str, Any], path: Path) -> Plan:
    """Compile the measured job on the cluster as it is."""
    from piper.cli.jobs import plan_of

    if job["model"] is None:
        raise JobError(
            where="command line", field="--model", value="(nothing)", rule="must be given",
            fix="say what the job trained, with --strategy and the options of its batch",
        )  # fmt: skip
    path.write_text(yaml_text(content), encoding="utf-8")
    return plan_of(job["model"], job["strategy"], job=job["given"] | {"cluster": str(path)})


def _base_of(rows: list[Any]) -> str:
    """Return the cluster of the catalogue that a table without `--cluster` is about: a CPU's."""
    if any("gloo" in row.versions for row in rows):
        return "local-cpu"
    raise JobError(
        where="command line",
        field="--cluster",
        value="(nothing)",
        rule="must be given for a GPU",
        fix="name the nearest cluster, such as dgx-h100; `piper clusters` lists them",
    )


def _name_of(path: Path) -> str:
    return path.name.removesuffix(".yaml").removesuffix(".yml").lower() or "calibrated"


def _require_loads(path: Path) -> None:
    """Read what was written, so that a broken file is never left unnoticed."""
    from cost_models import load_cluster

    load_cluster(str(path))


def _as_json(found: Calibration) -> dict[str, Any]:
    return {
        "device": found.device,
        "base": found.base,
        "unused": found.unused,
        "errors": {
            error.op: {
                "fitted": error.fitted, "held_out": error.held_out, "median": error.median, "p90": error.p90,
            }
            for error in found.errors
        },
        "host": {name: value for name, value in found.content.get("host", {}).items() if name != "source"},
    }  # fmt: skip


def _text(found: Calibration) -> str:
    from piper.report.summary import aligned

    rows = [["  kind of row", "fitted", "held out", "median error", "90 % below"]]
    rows += [
        [
            f"  {error.op}", str(error.fitted), str(error.held_out), f"{100 * error.median:.1f} %",
            f"{100 * error.p90:.1f} %",
        ]
        for error in found.errors
    ]  # fmt: skip
    lines = [
        f"{found.device}; what no row tells is taken from {found.base}",
        "",
        *aligned(rows, left_columns=1),
    ]
    host = _as_json(found)["host"]
    if host:
        lines += ["", f"host        {', '.join(f'{name} {value}' for name, value in host.items())}"]
    if found.unused:
        lines.append(f"unused      {found.unused} rows of communication between nodes")
    return "\n".join(lines)


def _anchor_json(found: Anchored) -> dict[str, Any]:
    return {
        "anchor": {
            "factors": dict(found.factors), "at_bounds": list(found.at_bounds),
            "measured_s": found.measured_s, "before_s": found.before_s, "after_s": found.after_s,
            "difference": None if found.before is None else found.before.to_json(),
        }
    }  # fmt: skip


def _anchor_text(found: Anchored) -> str:
    from cost_models.calibration.anchor import BOUNDS
    from piper.report.difference import difference_text

    lines = [] if found.before is None else [difference_text(found.before), ""]
    lines.append(
        f"anchored    step time {found.measured_s * 1e3:.4g} ms measured, {found.before_s * 1e3:.4g} ms "
        f"predicted before, {found.after_s * 1e3:.4g} ms after"
    )
    for name, factor in found.factors.items():
        low, high = BOUNDS[name]
        held = ", held at its bound" if name in found.at_bounds else ""
        lines.append(f"  {name:13} takes {factor:.3g} times as long (bounds {low:g} to {high:g}{held})")
    return "\n".join(lines)
