"""Profile this machine, calibrate, then predict, run and compare small strategies with 1 to 4 processes.

Other programs of the machine disturb runs, and only ever slow them down: rounds over all strategies follow
each other, and the lower quartile of all steps but the first of each round counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cost_models.calibration import calibrate, read_table, write_table
from cost_models.documents import yaml_text
from piper.predict import CompiledJob, Job, compile_job, predict_plan
from piper.profiling.machine import Profiling, profile
from piper.runtime import run_local
from piper.strategy import Strategy

MODEL, GLOBAL_BATCH = "tiny-llama", 8
STRATEGIES = (
    "dp=1",
    "dp=1,recompute=full",
    "pp=2",
    "pp=2,recompute=full",
    "pp=2,schedule=gpipe",
    "dp=2",
    "dp=2,zero=1",
    "pp=3",
    "pp=4",
    "pp=2,dp=2",
    "pp=2,dp=2,zero=1,recompute=full",
    "dp=4,zero=1",
)
QUICK = ("dp=1,recompute=full", "dp=2", "pp=2", "pp=2,dp=2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four strategies, one round, a quick profile")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--table", metavar="F.csv", help="do not measure: take this table of piper profile")
    parser.add_argument("--keep", metavar="DIR", help="keep table, cluster file and runs there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = loop(folder, quick=options.quick, table=options.table)
    if not options.json:
        show(found)
    print(json.dumps({"benchmark": "cpu_loop"} | found))


def loop(
    folder: Path, *, quick: bool, table: str | None = None, strategies: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return errors and ranks of predicted step times; files are written into `folder`."""
    started = time.monotonic()
    usual, rounds, steps = (QUICK, 1, 6) if quick else (STRATEGIES, 3, 8)
    strategies = strategies or usual
    if table is None:
        rows = list(profile(Profiling(device="cpu", quick=quick, report=_say)))
        write_table(folder / "cpu.csv", rows)
    else:
        rows = read_table(table)
    found = calibrate(rows, base="local-cpu", name="here", report=_say)
    cluster = folder / "here.yaml"
    cluster.write_text(yaml_text(found.content), encoding="utf-8")
    profiled = time.monotonic()
    jobs = {text: _compile(text, cluster) for text in strategies}
    times: dict[str, list[float]] = {text: [] for text in strategies}
    for number in range(rounds):
        for text, compiled in jobs.items():
            _say(f"round {number + 1} of {rounds}: {text}")
            times[text] += _run(compiled, steps, folder / f"run {text}" if number == 0 else None)
    compared = [_compare(text, jobs[text], times_s=times[text], cluster=cluster) for text in strategies]
    return _judged(compared) | {
        "host": {k: v for k, v in found.content.get("host", {}).items() if k != "source"},
        "timings_s": {"profile": profiled - started, "run": time.monotonic() - profiled},
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _compile(text: str, cluster: Path) -> CompiledJob:
    strategy = Strategy.parse(text)
    job = Job(model=MODEL, strategy=strategy, cluster=str(cluster), dtype="fp32", global_batch=GLOBAL_BATCH,
              gpus=_processes(text))  # fmt: skip
    return compile_job(job)


def _processes(text: str) -> int:
    degrees = dict(part.split("=") for part in text.split(","))
    return int(degrees.get("pp", 1)) * int(degrees.get("dp", 1))


def _run(compiled: CompiledJob, steps: int, keep: Path | None) -> list[float]:
    """Train and return the step times without the first."""
    outcome = run_local(compiled.plan, compiled.source, num_ranks=compiled.plan.num_ranks, steps=steps)
    if keep is not None:
        from piper.report.result import Result

        result = Result(name=keep.name, summary=outcome.result, timeline=outcome.timeline, plan=compiled.plan)
        result.save(keep)
    return [step["step_time_s"] for step in outcome.result["steps"][1:]]


def _compare(text: str, compiled: CompiledJob, *, times_s: list[float], cluster: Path) -> dict[str, Any]:
    predicted = predict_plan(compiled.plan, cluster=str(cluster)).result
    measured_s = statistics.quantiles(times_s, n=4)[0]
    return {
        "strategy": text,
        "processes": compiled.plan.num_ranks,
        "predicted_s": predicted["step_time_s"],
        "measured_s": measured_s,
        "slowest_s": max(times_s),
        "error": predicted["step_time_s"] / measured_s - 1,
    }


def _judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def ends(key: str) -> tuple[str, str]:
        order = sorted(rows, key=lambda row: row[key])
        return order[0]["strategy"], order[-1]["strategy"]

    errors = sorted(abs(row["error"]) for row in rows)
    (fastest, slowest), (fast, slow) = ends("measured_s"), ends("predicted_s")
    return {
        "rows": rows,
        "median_error": statistics.median(errors),
        "largest_error": errors[-1],
        "fastest": {"predicted": fast, "measured": fastest},
        "slowest": {"predicted": slow, "measured": slowest},
    }


def show(found: dict[str, Any]) -> None:
    print(f"{'strategy':34} {'processes':>9} {'predicted':>10} {'measured':>10} {'error':>7}")
    for row in found["rows"]:
        print(
            f"{row['strategy']:34} {row['processes']:9} {row['predicted_s'] * 1e3:7.1f} ms "
            f"{row['measured_s'] * 1e3:7.1f} ms {row['error']:+7.1%}"
        )
    print(f"median error {found['median_error']:.1%}, largest {found['largest_error']:.1%}")
    for end in ("fastest", "slowest"):
        print(f"{end}: predicted {found[end]['predicted']}, measured {found[end]['measured']}")


if __name__ == "__main__":
    main()
