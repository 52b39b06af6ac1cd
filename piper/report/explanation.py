"""An explanation: prediction -> where the step goes, what limits it, what would help; as object and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cost_models.units import format_duration
from piper.report.likeness import comparable_s, unlike
from piper.report.quantities import format_share
from piper.report.saved import largest_saved, saved_heading, saved_lines
from piper.report.summary import Result, aligned, breakdown_lines, bubble_lines, heading_lines

if TYPE_CHECKING:
    from piper.predict import Prediction
    from simulator.plan import Plan
    from simulator.timeline.timeline import Timeline
    from simulator.workload import Workload

SHOWN_CHANGES = 8
SHOWN_PARTS = 6
SHOWN_NAMES = 3
_COPIED = ("step_time_s", "bubble_fraction", "idle_fraction", "breakdown_s", "bubble_s", "fits")


def explain_prediction(prediction: Prediction) -> dict[str, Any]:
    """Return what `piper explain --json` says of one simulated job.

    Raises: ValueError for a plan file: what a job was is not known there.
    """
    from simulator import build_workload
    from simulator.insight import critical_path, slowed_on_path, try_changes

    compiled = prediction.compiled
    if compiled is None:
        raise ValueError("a plan file has no job to explain")
    plan, timeline, cost_model = compiled.plan, prediction.timeline, compiled.cost_model
    workload = build_workload(plan, cost_model)
    path = critical_path(workload, timeline)
    tried = try_changes(
        plan, cost_model, workload=workload, timeline=timeline, node_of=compiled.cluster.domain
    )
    by_kind, by_rank = path.by_kind_ns(plan), path.by_rank_ns(workload)
    step_ns = timeline.step_time_ns
    return {
        "strategy": prediction.result["strategy"],
        **{name: prediction.result[name] for name in _COPIED},
        "critical_path": {
            "by_kind_s": {name: time / 1e9 for name, time in by_kind.items()},
            "by_pipeline_rank_s": {name: time / 1e9 for name, time in by_rank.items()},
        },
        "sharing": [
            {
                "kind": slow.kind,
                "alone_s": slow.alone_ns / 1e9,
                "lasted_s": slow.lasted_ns / 1e9,
                "beside": list(slow.beside),
                "over": list(slow.over),
            }
            for slow in slowed_on_path(plan, workload, timeline, path=path)
        ],
        "slack": _slack(plan, workload, timeline),
        "what_if": [
            {
                "change": what_if.change,
                "step_time_s": what_if.step_time_ns / 1e9,
                "gain_s": what_if.gain_ns / 1e9,
                "gain_fraction": what_if.gain_ns / step_ns if step_ns else 0.0,
                "promised_s": what_if.promised_ns / 1e9,
            }
            for what_if in tried
        ],
        "saved_tensors": largest_saved(compiled.model),
    }


def _slack(plan: Plan, workload: Workload, timeline: Timeline) -> dict[str, Any]:
    """Return, by kind of task, how many of the last step have no slack, and the median and largest slack."""
    from simulator.insight import slack_ns
    from simulator.plan import TaskKind

    slack = slack_ns(workload, timeline)[-1]
    kinds = np.concatenate([device.tasks.kind for device in plan.device_plans])
    found = {}
    for kind in np.unique(kinds).tolist():
        here = slack[kinds == kind]
        found[TaskKind(kind).name] = {
            "n": len(here),
            "n_critical": int((here == 0).sum()),
            "median_s": float(np.median(here)) / 1e9,
            "largest_s": int(here.max()) / 1e9,
        }
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `other` takes longer than `one`, in all and by part of the breakdown; the largest first."""
    parts = {name: other["breakdown_s"][name] - seconds for name, seconds in one["breakdown_s"].items()}
    ordered = sorted(parts.items(), key=lambda part: (-abs(part[1]), part[0]))
    return {
        "step_time_s": other["step_time_s"] - one["step_time_s"],
        "breakdown_s": {name: seconds for name, seconds in ordered if seconds},
    }


def explanation_text(result: Result, explained: Mapping[str, Any]) -> str:
    """Write one explanation; `result` is the prediction that it explains."""
    step = explained["step_time_s"]
    parts = [
        [*heading_lines(result), f"step time   {format_duration(step)}"],
        ["where the step goes (mean over ranks)", *breakdown_lines(result), *_bubble(explained)],
        [
            "what limits it: the critical path of the step",
            *_share_lines(explained["critical_path"]["by_kind_s"], step),
            *_share_lines(_ranks(explained["critical_path"]["by_pipeline_rank_s"]), step),
            *sharing_lines(explained["sharing"]),
        ],
        ["how late tasks may be without moving the end", *_slack_lines(explained["slack"])],
        ["what would help most (simulated again)", *_change_lines(explained["what_if"])],
        [saved_heading(explained["saved_tensors"]), *saved_lines(explained["saved_tensors"])],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def difference_lines(
    names: tuple[str, str], found: Mapping[str, Any], *, results: Sequence[Result]
) -> list[str]:
    """Say which of two strategies is faster, and by what; `results` are their predictions."""
    first, second = comparable_s(results)
    more = second - first
    verdict = "as fast as" if not more else f"{abs(more) / first:.1%} {_slower(more)} than"
    rows = [
        [f"  {name}", f"{'+' if seconds > 0 else '-'}{format_duration(abs(seconds))}"]
        for name, seconds in found["breakdown_s"].items()
        if abs(seconds) > 0
    ]
    whole = ["the parts are those of whole steps"] if second != results[1]["step_time_s"] else []
    notes = [f"note: {text}" for text in (*whole, *unlike(results))]
    return [f"{names[1]} is {verdict} {names[0]}", *(aligned(rows, left_columns=1) if rows else []), *notes]


def _slower(more_s: float) -> str:
    return "slower" if more_s > 0 else "faster"


def _bubble(explained: Mapping[str, Any]) -> list[str]:
    return [f"  bubble by phase: {line.strip()}" for line in bubble_lines(explained)]


def _ranks(by_rank_s: Mapping[str, float]) -> dict[str, float]:
    return {f"pipeline rank {rank}": seconds for rank, seconds in by_rank_s.items()}


def _share_lines(parts: Mapping[str, float], step_s: float) -> list[str]:
    rows = [
        [f"  {name}", format_duration(seconds), format_share(seconds / step_s if step_s else 0.0)]
        for name, seconds in list(parts.items())[:SHOWN_PARTS]
    ]
    return aligned(rows, left_columns=1) if rows else []


def sharing_lines(sharing: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of each kind how much slower its parts of the path were for sharing, beside whom, over what."""
    return [
        f"  {slow['kind']}{_times(slow)} +{format_duration(slow['lasted_s'] - slow['alone_s'])} by sharing "
        f"{_few(slow['over'])} with {_few(slow['beside'])}"
        for slow in [slow for slow in sharing if slow["over"]][:SHOWN_PARTS]
    ]


def _times(slow: Mapping[str, Any]) -> str:
    return f" {slow['lasted_s'] / slow['alone_s']:.2f}x" if slow["alone_s"] else ""


def _few(names: Sequence[str]) -> str:
    shown = list(names[:SHOWN_NAMES])
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _slack_lines(slack: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [["  kind", "tasks", "critical", "median", "largest"]]
    rows += [
        [
            f"  {kind}",
            str(found["n"]),
            str(found["n_critical"]),
            format_duration(found["median_s"]),
            format_duration(found["largest_s"]),
        ]
        for kind, found in slack.items()
    ]
    return aligned(rows, left_columns=1)


def _change_lines(changes: list[Mapping[str, Any]]) -> list[str]:
    helpful = [change for change in changes if change["gain_s"] > 0][:SHOWN_CHANGES]
    rows = [["  change", "step time", "gain", "share", "on the path"]]
    rows += [
        [
            f"  {change['change']}",
            format_duration(change["step_time_s"]),
            format_duration(change["gain_s"]),
            format_share(change["gain_fraction"]),
            format_duration(change["promised_s"]),
        ]
        for change in helpful
    ]
    return aligned(rows, left_columns=1) if helpful else ["  nothing that was tried"]
