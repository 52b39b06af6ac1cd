"""Two results of the same plan -> where they differ: kinds of tasks, waiting, step time, memory.

[Note: what is compared]
Of a run the steps after the first, each figure the median over steps; of a simulation the last step. A kind's
seconds are those of one rank and step, the mean over ranks. A communication lasts as long as on the rank that
joined it last: what the others waited is no part of it. What the compute stream does, and that it waits, make
up the step, so that their shares of the difference add up to 1; communication runs beside them, and shows in
the waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.units import format_bytes, format_duration
from piper.errors import JobError
from piper.report.result import Result
from piper.report.summary import aligned
from simulator.plan import COMPUTE_KINDS, MemoryClass, TaskKind
from simulator.timeline.timeline import RankTrack, Timeline

WAITING = "waiting"
_COMPUTE = sorted(COMPUTE_KINDS)
_SUGGESTED = 0.1
"""Differences below are within what two runs differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindDifference:
    """One kind of task, or the waiting of the compute stream.

    Args:
        kind: of tasks (`TaskKind`), or "waiting".
        count: tasks in a step, over all ranks.
        predicted_s, measured_s: of one rank and step, the mean over ranks.
        share: of the difference of the step times, None for communication.
    """

    kind: str
    count: float
    predicted_s: float
    measured_s: float
    share: float | None

    @property
    def ratio(self) -> float | None:
        """Return measured over predicted, None where nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Prediction against measurement; see [Note: what is compared].

    Args:
        predicted_s, measured_s: step time.
        predicted_bytes, measured_bytes: peak memory of the worst rank.
        kinds: what the compute stream does, its waiting, then communication; the largest first.
        factors: measured over predicted seconds of compute and of communication, None where there is none.
    """

    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int
    kinds: tuple[KindDifference, ...]
    factors: Mapping[str, float | None]

    def to_json(self) -> dict[str, Any]:
        """Return the object of `piper diff --json`."""
        return {
            "step_time_s": {
                "predicted": self.predicted_s, "measured": self.measured_s,
                "ratio": self.measured_s / self.predicted_s if self.predicted_s else None,
            },
            "peak_memory_bytes": {"predicted": self.predicted_bytes, "measured": self.measured_bytes},
            "kinds": [
                {
                    "kind": kind.kind, "count": kind.count, "predicted_s": kind.predicted_s,
                    "measured_s": kind.measured_s, "ratio": kind.ratio, "share": kind.share,
                }
                for kind in self.kinds
            ],
            "factors": dict(self.factors),
            "suggestion": suggestion(self),
        }  # fmt: skip


def difference(predicted: Result, measured: Result) -> Difference:
    """Compare two results; raises JobError where they are not of one plan (kinds and numbers of tasks)."""
    before, after = _by_kind(predicted.timeline), _by_kind(measured.timeline)
    _require_one_plan(before, after, names=(predicted.name, measured.name))
    steps = _step_s(predicted), _step_s(measured)
    gap = steps[1] - steps[0]
    compute: list[KindDifference] = []
    communication: list[KindDifference] = []
    for kind in sorted(before):
        (count, first), (_, second) = before[kind], after[kind]
        here = kind in COMPUTE_KINDS
        (compute if here else communication).append(
            KindDifference(
                kind=TaskKind(kind).name, count=count, predicted_s=first, measured_s=second,
                share=_share(second - first, gap) if here else None,
            )
        )  # fmt: skip
    busy = tuple(sum(getattr(kind, side) for kind in compute) for side in ("predicted_s", "measured_s"))
    waited = steps[0] - busy[0], steps[1] - busy[1]
    compute.append(
        KindDifference(
            kind=WAITING, count=0, predicted_s=waited[0], measured_s=waited[1],
            share=_share(waited[1] - waited[0], gap),
        )
    )  # fmt: skip
    return Difference(
        predicted_s=steps[0],
        measured_s=steps[1],
        predicted_bytes=_peak_bytes(predicted),
        measured_bytes=_peak_bytes(measured),
        kinds=(*_largest_first(compute), *_largest_first(communication)),
        factors={"compute": _factor(compute[:-1]), "communication": _factor(communication)},
    )


def difference_text(found: Difference) -> str:
    """Write a difference for people."""
    rows = [["  kind of task", "count", "predicted", "measured", "ratio", "of the difference"]]
    rows += [
        [
            f"  {kind.kind}",
            f"{kind.count:g}" if kind.count else "",
            format_duration(max(kind.predicted_s, 0.0)),
            format_duration(max(kind.measured_s, 0.0)),
            "-" if kind.ratio is None or kind.ratio < 0 else f"{kind.ratio:.2f}",
            "beside" if kind.share is None else f"{kind.share:.0%}",
        ]
        for kind in found.kinds
    ]
    head = [
        f"step time   {format_duration(found.predicted_s)} predicted, "
        f"{format_duration(found.measured_s)} measured ({found.predicted_s / found.measured_s - 1:+.1%})",
        f"memory      {format_bytes(found.predicted_bytes)} predicted, {format_bytes(found.measured_bytes)} "
        "measured, at the worst rank",
    ]
    return "\n".join([*head, "", *aligned(rows, left_columns=1), "", f"next        {suggestion(found)}"])


def suggestion(found: Difference) -> str:
    """Say what a refit would change."""
    off = [
        f"{name} by {factor:.2f}"
        for name, factor in found.factors.items()
        if factor is not None and abs(factor - 1) > _SUGGESTED
    ]
    if not off:
        return "compute and communication agree within 10 %: nothing to refit"
    return (
        f"a refit would multiply {' and '.join(off)}: piper calibrate --from-trace MEASURED --cluster F "
        "--out G.yaml, or measure the machine again with piper profile"
    )


def _share(part: float, gap: float) -> float:
    return part / gap if gap else 0.0


def _factor(kinds: list[KindDifference]) -> float | None:
    predicted = sum(kind.predicted_s for kind in kinds)
    return sum(kind.measured_s for kind in kinds) / predicted if predicted else None


def _largest_first(kinds: list[KindDifference]) -> list[KindDifference]:
    return sorted(kinds, key=lambda kind: -abs(kind.measured_s - kind.predicted_s))


def _chosen_steps(timeline: Timeline) -> list[int]:
    """Return the steps that count; see [Note: what is compared]."""
    last = timeline.num_steps - 1
    return [last] if timeline.source == "simulated" else list(range(min(1, last), last + 1))


def _step_s(result: Result) -> float:
    timeline = result.timeline
    if timeline.source == "simulated":
        return result.step_time_s
    periods = np.diff(timeline.step_end_ns, prepend=0)[_chosen_steps(timeline)]
    return float(np.median(periods)) / 1e9


def _by_kind(timeline: Timeline) -> dict[int, tuple[float, float]]:
    """Return by kind the tasks of a step over all ranks, and the seconds of one rank."""
    steps, ranks = _chosen_steps(timeline), sum(track.n_devices for track in timeline.tracks)
    shortest = _shortest(timeline)
    found: dict[int, tuple[float, npt.NDArray[np.float64]]] = {}
    for track in timeline.tracks:
        kinds = track.kinds[track.task]
        lasted = (track.end_ns - track.start_ns).astype(np.float64)
        for span, key in enumerate(_keys(track)):
            if kinds[span] not in COMPUTE_KINDS:
                lasted[span] = shortest[key]
        for kind in sorted(set(kinds.tolist())):
            seconds = np.array([lasted[(kinds == kind) & (track.step == step)].sum() / 1e9 for step in steps])
            count = int(((kinds == kind) & (track.step == steps[-1])).sum())
            before = found.get(kind, (0.0, np.zeros(len(steps))))
            found[kind] = (
                before[0] + count * track.n_devices,
                before[1] + seconds * track.n_devices / ranks,
            )
    return {kind: (count, float(np.median(seconds))) for kind, (count, seconds) in found.items()}


def _keys(track: RankTrack) -> list[tuple[int, str]]:
    """Return (step, code) of every span: equal for the members of a collective."""
    return list(zip(track.step.tolist(), [track.codes[task] for task in track.task.tolist()], strict=True))


def _shortest(timeline: Timeline) -> dict[tuple[int, str], int]:
    """Return how long each communication lasted on the rank that joined it last."""
    found: dict[tuple[int, str], int] = {}
    for track in timeline.tracks:
        lasted = (track.end_ns - track.start_ns).tolist()
        for key, time_ns in zip(_keys(track), lasted, strict=True):
            found[key] = min(time_ns, found.get(key, time_ns))
    return found


def _peak_bytes(result: Result) -> int:
    if "peak_memory_bytes" in result.summary:
        return int(result.summary["peak_memory_bytes"])
    tracks = [track.memory_bytes for track in result.timeline.tracks if len(track.memory_bytes)]
    return max((int(bytes_.reshape(-1, len(MemoryClass)).sum(axis=1).max()) for bytes_ in tracks), default=0)


def _require_one_plan(
    before: Mapping[int, tuple[float, float]],
    after: Mapping[int, tuple[float, float]],
    *,
    names: tuple[str, str],
) -> None:
    def counts(kinds: Mapping[int, tuple[float, float]]) -> dict[str, float]:
        return {TaskKind(kind).name: count for kind, (count, _) in sorted(kinds.items())}

    if counts(before) != counts(after):
        raise JobError(
            where=names[1],
            field="tasks of a step",
            value=", ".join(f"{count:g} {kind}" for kind, count in counts(after).items()),
            rule=f"must be those of {names[0]}: "
            + ", ".join(f"{count:g} {kind}" for kind, count in counts(before).items()),
            fix="compare a simulation and a run of one plan: the same model, strategy and batch",
        )
