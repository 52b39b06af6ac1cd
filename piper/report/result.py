"""`Result`: the figures of a step together with its timeline and plan, and the folder that keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.documents import UnreadableError, is_file, is_folder, parse_json, read_text
from cost_models.units import format_bytes, format_duration
from piper.errors import JobError
from piper.report.shape import MAY_LACK, SIMULATED, TRAINED, shape_fault
from simulator.plan import Plan
from simulator.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

RESULT_FILE = "result.json"
TIMELINE_FILE = "timeline.npz"
PLAN_FILE = "plan.json.gz"

_FIX = "give a folder that --out wrote, its result.json, or a trace that --trace wrote"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What a simulation or a run found.

    Args:
        name: shown in reports: the strategy, or the file it was read from.
        summary: the object of `piper simulate --json` or `piper run --json`; empty for a bare trace.
        timeline: every task on every rank.
        plan: what ran, where it is at hand; a folder keeps it (`load_plan_of_result`).
    """

    name: str
    summary: Mapping[str, Any]
    timeline: Timeline
    plan: Plan | None = None

    @property
    def step_time_s(self) -> float:
        """Return the seconds of one optimizer step (of a training run: its last one)."""
        if "steps" in self.summary:
            return float(self.summary["steps"][-1]["step_time_s"])
        return float(self.summary.get("step_time_s", self.timeline.step_time_ns / 1e9))

    def to_frame(self) -> pd.DataFrame:
        """Return one row per executed task."""
        return self.timeline.to_frame()

    def plot(self, path: str | Path) -> Path:
        """Draw the last step into a PNG or SVG file and return its path."""
        from simulator.timeline.plots import plot_timeline

        return plot_timeline(self.timeline, path, **self._captions("step_time_s"))

    def plot_memory(self, path: str | Path) -> Path:
        """Draw memory over the last step into a PNG or SVG file and return its path."""
        from simulator.timeline.plots import plot_memory

        return plot_memory(self.timeline, path, **self._captions("peak_memory_bytes"))

    def _captions(self, main: str) -> dict[str, Any]:
        """Return title (with one main figure), subtitle and limit of a picture; nothing of a bare trace."""
        found = self.summary
        if "breakdown_s" not in found:
            return {}
        mfu = "" if found["mfu"] is None else f", MFU {100 * found['mfu']:.1f} %"
        words = {
            "step_time_s": f"{format_duration(found['step_time_s'])} per step{mfu}",
            "peak_memory_bytes": f"at most {format_bytes(found['peak_memory_bytes'])} allocated",
        }
        return {
            "title": f"{found['model']} on {found['n_gpus']} GPUs: {words[main]}",
            "subtitle": f"{self.timeline.source}; {found['strategy']['shorthand']}",
            "limit_bytes": left_for_tensors_bytes(found),
        }

    def save(self, folder: str | Path) -> Path:
        """Write figures, timeline and plan into a folder, which is made; raises JobError."""
        from simulator.plan.codec import save_plan
        from simulator.timeline.storage import save_timeline

        target = Path(folder)
        try:
            target.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.summary, allow_nan=False, indent=1, ensure_ascii=False)
            (target / RESULT_FILE).write_text(text + "\n", encoding="utf-8")
            save_timeline(self.timeline, target / TIMELINE_FILE)
            (target / PLAN_FILE).unlink(missing_ok=True)  # of a result that was here before
            if self.plan is not None:
                save_plan(self.plan, target / PLAN_FILE)
        except OSError as problem:
            raise JobError(
                where=str(folder),
                field="--out",
                value=str(folder),
                rule=f"cannot be written: {problem.strerror}",
                fix="name a folder that you may write",
            ) from None
        return target

    def __str__(self) -> str:
        from piper.report.jitter import jitter_lines
        from piper.report.summary import describe

        if "breakdown_s" not in self.summary:
            return self.name
        jitter = jitter_lines(self.summary["jitter"]) if "jitter" in self.summary else []
        return "\n".join([describe(self.summary), *([""] if jitter else []), *jitter])

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


def left_for_tensors_bytes(summary: Mapping[str, Any]) -> int:
    """Return what a device has beside its context and communicators, of a simulated result."""
    taken = summary["context_bytes"] + summary["communicator_bytes"]
    return max(0, int(summary["device_memory_bytes"] - taken))


def load_result(path: str | Path) -> Result:
    """Read a result: an `--out` folder, its `result.json`, or a Chrome trace (`.json`, `.json.gz`).

    Raises: JobError for a missing, broken or foreign file.
    """
    source = Path(path)
    if is_folder(source):
        source /= RESULT_FILE
    content = _read_json(source)
    if "traceEvents" in content:
        return _of_trace(source, content)
    return _of_folder(source, content)


def load_plan_of_result(path: str | Path) -> Plan:
    """Read the plan of a result folder (or its `result.json`); raises JobError where none is kept."""
    from simulator.plan.codec import load_plan

    kept = plan_file_of_result(path)
    if kept is None:
        raise JobError(
            where=str(path),
            field="RESULT",
            value=str(path),
            rule=f"has no {PLAN_FILE}, which says what took memory",
            fix="simulate once more with --out, or give the model (with its options) or a plan file",
        )
    return load_plan(kept)


def plan_file_of_result(path: str | Path) -> Path | None:
    """Return where a result folder (or its `result.json`) keeps its plan; None: it keeps none."""
    source = Path(path)
    folder = source if is_folder(source) else source.parent
    is_result = is_folder(source) or source.name == RESULT_FILE
    return folder / PLAN_FILE if is_result and is_file(folder / PLAN_FILE) else None


def _of_folder(source: Path, summary: dict[str, Any]) -> Result:
    from simulator.timeline.storage import load_timeline

    if "step_time_s" not in summary and "steps" not in summary:
        raise _bad(source, "is JSON, but neither a result nor a trace")
    shape = TRAINED if "steps" in summary else SIMULATED
    lacking = [key for key in shape if key not in summary and key not in MAY_LACK]
    if lacking:
        raise _bad(source, f"lacks {', '.join(lacking)}: another version of piper wrote it")
    fault = shape_fault(summary, shape)
    if fault is None and shape is SIMULATED and not _adds_up(summary):
        fault = "breakdown_s does not add up to step_time_s"
    if fault is not None:
        raise _bad(source, f"is no result: {fault}")
    timeline = load_timeline(source.parent / TIMELINE_FILE)
    return Result(name=source.parent.name or str(source), summary=summary, timeline=timeline)


def _adds_up(summary: Mapping[str, Any]) -> bool:
    """Tell whether the parts of a step are its whole, as a simulation leaves them."""
    return math.isclose(math.fsum(summary["breakdown_s"].values()), summary["step_time_s"], rel_tol=1e-6)


def _of_trace(source: Path, content: dict[str, Any]) -> Result:
    from piper.report.trace_reader import timeline_of_trace

    return Result(name=source.name, summary={}, timeline=timeline_of_trace(content, where=str(source)))


def _read_json(source: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_text(source))
    except UnreadableError as problem:
        raise _bad(source, problem.rule, where=problem.place(str(source))) from problem
    if not isinstance(content, dict):
        raise _bad(source, "is JSON, but neither a result nor a trace")
    return content


def _bad(source: Path, rule: str, *, where: str = "") -> JobError:
    return JobError(where=where or str(source), field="RESULT", value=str(source), rule=rule, fix=_FIX)
