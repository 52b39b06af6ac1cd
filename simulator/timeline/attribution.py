"""Attribution: every instant of the last step, on every rank, gets exactly one label; the parts add up.

The window is the same on all ranks: the last step time up to the end of the last step. Labels by falling
priority: compute, recompute or optimizer while the compute stream runs; straggler while joined in a
collective before its last arrival; the communication that the next compute task waits for while it is on
the wire; host while the next compute task is not yet dispatched; else bubble. Whole nanoseconds inside.

[Note: what the next task waits for]  Directly or through other communication of this rank (its waits and
    the tasks before it on its stream). Of several on the wire at once the one that ends last counts.
    After the last compute task of the window, the next one is the first of the following step.
[Note: phases of the bubble]  By the next compute task of the rank, in the order of its step: warm-up up to
    the first backward (B or BI) inclusive, cool-down where neither the task nor any after it is a forward,
    steady between. What a rank idles after its last task of the window is cool-down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from cost_models.errors import check_invariant
from simulator.distinct import distinct_rows
from simulator.plan import COLLECTIVE_KINDS, COMPUTE_KINDS, HOST_COPY_KINDS, NONE, DevicePlan, Plan, TaskKind
from simulator.timeline.timeline import RankTrack, Timeline

Ints = npt.NDArray[np.int64]


class Label(IntEnum):
    """Labels in the order of `breakdown_s`."""

    COMPUTE = 0
    RECOMPUTE = 1
    EXPOSED_TP = 2
    EXPOSED_DP = 3
    EXPOSED_PP = 4
    EXPOSED_EP = 5
    EXPOSED_CP = 6
    EXPOSED_OFFLOAD = 7
    BUBBLE = 8
    HOST = 9
    OPTIMIZER = 10
    STRAGGLER = 11


class Phase(IntEnum):
    """Parts of a step on one rank, in the order of `bubble_s`; see [Note: phases of the bubble]."""

    WARM_UP = 0
    STEADY = 1
    COOL_DOWN = 2


BUSY = (Label.COMPUTE, Label.RECOMPUTE, Label.OPTIMIZER)
AXIS_LABELS = {
    "tp": Label.EXPOSED_TP,
    "dp": Label.EXPOSED_DP,
    "pp": Label.EXPOSED_PP,
    "ep": Label.EXPOSED_EP,
    "cp": Label.EXPOSED_CP,
    "world": Label.EXPOSED_DP,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attribution:
    """Nanoseconds by rank and label.

    Args:
        begin_ns, end_ns: the window.
        label_ns: int64 [tracks, labels]; every row sums to end_ns - begin_ns.
        bubble_ns: int64 [tracks, phases]; every row sums to the bubble of the track.
        n_devices: int64 [tracks], how many ranks each track stands for.
    """

    begin_ns: int
    end_ns: int
    label_ns: npt.NDArray[np.int64]
    bubble_ns: npt.NDArray[np.int64]
    n_devices: npt.NDArray[np.int64]

    def mean_s(self, *labels: Label) -> float:
        """Return the seconds under `labels`, averaged over ranks."""
        return self._mean_s(self._sum(labels))

    def breakdown_s(self) -> dict[str, float]:
        """Return `breakdown_s` of the result: mean seconds by label name."""
        return {label.name.lower(): self.mean_s(label) for label in Label}

    def bubble_s(self) -> dict[str, float]:
        """Return mean seconds of bubble by name of its phase."""
        return {phase.name.lower(): self._mean_s(self.bubble_ns[:, phase]) for phase in Phase}

    def busy_ns(self) -> npt.NDArray[np.int64]:
        """Return, by track, how long its compute stream ran."""
        return self._sum(BUSY)

    def with_copies(self, part: Attribution, *, times: int) -> Attribution:
        """Return this with what another window of the same tracks says, added several times."""
        return replace(
            self,
            end_ns=self.end_ns + times * (part.end_ns - part.begin_ns),
            label_ns=self.label_ns + times * part.label_ns,
            bubble_ns=self.bubble_ns + times * part.bubble_ns,
        )

    def _mean_s(self, by_track: npt.NDArray[np.int64]) -> float:
        total_ns = sum(ns * n for ns, n in zip(by_track.tolist(), self.n_devices.tolist(), strict=True))
        return float(total_ns / int(self.n_devices.sum()) / 1e9)

    def _sum(self, labels: Sequence[Label]) -> npt.NDArray[np.int64]:
        return np.asarray(self.label_ns[:, list(labels)].sum(axis=1), dtype=np.int64)


def attribute(plan: Plan, timeline: Timeline) -> Attribution:
    """Label the last step of a simulated or measured timeline of `plan`."""
    begin, end = timeline.window_ns
    return attribute_window(plan, timeline, begin=begin, end=end)


def attribute_window(plan: Plan, timeline: Timeline, *, begin: int, end: int) -> Attribution:
    """Label a window of a timeline of `plan`, on all ranks from `begin` to `end`."""
    devices = {device.pipeline_rank: device for device in plan.device_plans}
    rows = [
        _RankView(plan, devices[track.pipeline_rank], track).label_window(begin, end)
        for track in timeline.tracks
    ]
    label_ns = np.array([labels for labels, _ in rows], dtype=np.int64)
    bubble_ns = np.array([phases for _, phases in rows], dtype=np.int64)
    check_invariant(bool((label_ns.sum(axis=1) == end - begin).all()), "labels do not add up to the window")
    bubble = label_ns[:, Label.BUBBLE]
    check_invariant(bool((bubble_ns.sum(axis=1) == bubble).all()), "phases do not add up to the bubble")
    counts = np.array([track.n_devices for track in timeline.tracks], dtype=np.int64)
    return Attribution(begin_ns=begin, end_ns=end, label_ns=label_ns, bubble_ns=bubble_ns, n_devices=counts)


def communication_labels(plan: Plan, device: DevicePlan) -> list[Label]:
    """Return the label of every task of `device` while it is on the wire (compute tasks: of its kind)."""
    return [Label(label) for label in _labels(plan, device).tolist()]


def _labels(plan: Plan, device: DevicePlan) -> Ints:
    """Return `communication_labels` as a column, int64 [tasks]."""
    table = device.tasks
    columns = (table.kind, table.group, table.bucket, table.stage, table.phase)
    first, number = distinct_rows(columns)
    rows = zip(*(column[first].tolist() for column in columns), strict=True)
    labels = [
        _label(plan, TaskKind(kind), group, is_norm=bucket == stage == phase == NONE)
        for kind, group, bucket, stage, phase in rows
    ]
    return np.array(labels, dtype=np.int64)[number]


def _label(plan: Plan, kind: TaskKind, group: int, *, is_norm: bool) -> Label:
    if kind in COLLECTIVE_KINDS:
        axis = "dp" if is_norm else plan.groups[group].axis
        check_invariant(axis in AXIS_LABELS, f"group {plan.groups[group].name} has the unknown axis {axis!r}")
        return AXIS_LABELS[axis]
    if kind == TaskKind.R:
        return Label.RECOMPUTE
    if kind in {TaskKind.NORM, TaskKind.UPDATE}:
        return Label.OPTIMIZER
    if kind in HOST_COPY_KINDS:
        return Label.EXPOSED_OFFLOAD
    return Label.COMPUTE if kind in COMPUTE_KINDS else Label.EXPOSED_PP


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gaps:
    """Idle time of a compute stream, piece by piece: int64 [gaps] each.

    Args:
        begin, end: when.
        upcoming: the compute instance that comes next; behind the last step: the first of a following one.
        dispatched: when that one is dispatched; `begin` where it is not known.
    """

    begin: Ints
    end: Ints
    upcoming: Ints
    dispatched: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wires:
    """Communication that compute tasks wait for, by gap and in the order in which it counts: int64 [wires].

    Args:
        gap: whose upcoming task waits, rising.
        instance, start, end: the communication.
    """

    gap: Ints
    instance: Ints
    start: Ints
    end: Ints


class _RankView:
    """One rank's spans by instance (step * num_tasks + task), and what waits for what."""

    def __init__(self, plan: Plan, device: DevicePlan, track: RankTrack) -> None:
        table = device.tasks
        self.num_tasks = len(table)
        self.labels = _labels(plan, device)
        self.is_busy = np.isin(self.labels, np.array(BUSY))
        self.compute = np.flatnonzero(self.is_busy & (table.stream == 0))
        self.phase = np.full(self.num_tasks, Phase.COOL_DOWN, dtype=np.int64)
        self.phase[self.compute] = _phases(table.kind[self.compute])
        self.start, self.end, self.dispatch = track.start_ns, track.end_ns, track.dispatch_ns
        self.waits, self.previous_step_waits = table.waits, table.previous_step_waits
        self.before_on_stream = _before_on_stream(table.stream)
        self.skew_begin, self.skew_end = _straggler_intervals(track)

    def label_window(self, begin: int, end: int) -> tuple[Ints, Ints]:
        """Return ns by label, int64 [labels], which sum to `end - begin`, and those of bubble by phase."""
        found = np.zeros(len(Label), dtype=np.int64)
        num_spans = len(self.start)
        steps = np.arange(0, num_spans, self.num_tasks)
        instance = (steps[:, None] + self.compute).ravel()
        start, stop = np.minimum(self.start[instance], end), np.minimum(self.end[instance], end)
        cursor = np.maximum.accumulate(np.concatenate([np.array([begin]), np.maximum(start, stop)]))
        running = np.maximum(stop - np.maximum(start, cursor[:-1]), 0)
        np.add.at(found, self.labels[instance % self.num_tasks], running)
        upcoming = np.append(instance, num_spans + self.compute[0] if len(self.compute) else NONE)
        until = np.append(start, end)
        idle = until > cursor
        dispatch = np.append(self.dispatch[instance], begin)
        known = np.append(np.ones(len(instance), dtype=np.bool_), False)
        phases = self._label_gaps(
            found,
            _Gaps(
                begin=cursor[idle],
                end=until[idle],
                upcoming=upcoming[idle],
                dispatched=np.where(known, dispatch, cursor)[idle],
            ),
        )
        return found, phases

    def _label_gaps(self, found: Ints, gaps: _Gaps) -> Ints:
        """Cut idle time where something begins or ends, and label every part; return bubble by phase."""
        wires = self._waited_for(gaps)
        gap, at, until = self._parts(gaps, wires)
        label = np.where(at < gaps.dispatched[gap], Label.HOST, Label.BUBBLE)
        wire = _on_the_wire(wires, gap, at)
        wired = np.append(wires.instance, 0)[wire] % self.num_tasks
        label = np.where(wire == NONE, label, self.labels[wired])
        skew = np.searchsorted(self.skew_begin, at, side="right") - 1
        late = (skew >= 0) & (at < np.append(self.skew_end, 0)[skew])
        label = np.where(late, Label.STRAGGLER, label)
        np.add.at(found, label, until - at)
        upcoming, bubble = gaps.upcoming[gap], label == Label.BUBBLE
        here = (upcoming != NONE) & (upcoming < len(self.start))
        phase = np.where(here, self.phase[upcoming % self.num_tasks], Phase.COOL_DOWN)
        phases = np.zeros(len(Phase), dtype=np.int64)
        np.add.at(phases, phase[bubble], (until - at)[bubble])
        return phases

    def _parts(self, gaps: _Gaps, wires: _Wires) -> tuple[Ints, Ints, Ints]:
        """Return (gap, begin, end) of parts in which nothing begins or ends."""
        number = np.arange(len(gaps.begin))
        first = np.searchsorted(self.skew_end, gaps.begin, side="right")
        last = np.searchsorted(self.skew_begin, gaps.end, side="left")
        skewed, skew = _ranges(first, np.maximum(last, first))
        gap = np.concatenate([number, number, number, skewed, skewed, wires.gap, wires.gap])
        time = np.concatenate(
            [gaps.begin, gaps.end, gaps.dispatched, self.skew_begin[skew], self.skew_end[skew],
             wires.start, wires.end]
        )  # fmt: skip
        inside = (gaps.begin[gap] <= time) & (time <= gaps.end[gap])
        gap, time = gap[inside], time[inside]
        order = np.lexsort((time, gap))
        gap, time = gap[order], time[order]
        joined = (gap[1:] == gap[:-1]) & (time[1:] > time[:-1])
        return gap[:-1][joined], time[:-1][joined], time[1:][joined]

    def _waited_for(self, gaps: _Gaps) -> _Wires:
        """Return the communication still to end that each upcoming task waits for; see the note above."""
        num_spans = len(self.start)
        span = num_spans + self.num_tasks
        gap = np.flatnonzero(gaps.upcoming != NONE)
        instance = gaps.upcoming[gap]
        seen = gap * span + instance
        while len(gap):
            gap, instance = self._before(gap, instance)
            ended = np.append(self.end, np.iinfo(np.int64).max)[np.minimum(instance, num_spans)]
            asked = ~self.is_busy[instance % self.num_tasks] & (ended > gaps.begin[gap])
            codes = _new(gap[asked] * span + instance[asked], seen)
            seen = np.sort(np.concatenate([seen, codes]))
            gap, instance = np.divmod(codes, span)
        gap, instance = np.divmod(seen, span)
        wired = ~self.is_busy[instance % self.num_tasks] & (instance < num_spans)
        gap, instance = gap[wired], instance[wired]
        start, end = self.start[instance], self.end[instance]
        order = np.lexsort((instance, -start, -end, gap))
        return _Wires(gap=gap[order], instance=instance[order], start=start[order], end=end[order])

    def _before(self, gap: Ints, instance: Ints) -> tuple[Ints, Ints]:
        """Return (gap, instance) of what each instance waits for, and of what its stream runs before it."""
        task = instance % self.num_tasks
        offset = instance - task
        found = [(gap, offset + self.before_on_stream[task])]
        for lists, back in ((self.waits, 0), (self.previous_step_waits, self.num_tasks)):
            row, place = _ranges(lists.starts[task], lists.starts[task + 1])
            found.append((gap[row], offset[row] - back + lists.values[place]))
        gaps, instances = (np.concatenate(columns) for columns in zip(*found, strict=True))
        return gaps[instances >= 0], instances[instances >= 0]


def _new(codes: Ints, seen: Ints) -> Ints:
    """Return the distinct codes, rising, that are not among those seen, which rise (np.setdiff1d hashes)."""
    codes = np.sort(codes)
    codes = codes[np.append(True, codes[1:] != codes[:-1])[: len(codes)]]
    fresh: Ints = codes[np.append(seen, NONE)[np.searchsorted(seen, codes)] != codes]
    return fresh


def _phases(kind: Ints) -> Ints:
    """Return the phase of idle time before each compute task of a rank, given their kinds in order."""
    forward = kind == TaskKind.F
    backward = (kind == TaskKind.B) | (kind == TaskKind.BI)
    begun = np.cumsum(backward) - backward > 0
    more = np.cumsum(forward[::-1])[::-1] > 0
    return np.where(~begun, Phase.WARM_UP, np.where(more, Phase.STEADY, Phase.COOL_DOWN))


def _on_the_wire(wires: _Wires, gap: Ints, at: Ints) -> Ints:
    """Return the wire that counts at each time of a gap, or NONE.

    Wires of a gap come by falling end, so the first that has started is the one, or none is.
    """
    times, rank = np.unique(np.concatenate([wires.start, at]), return_inverse=True)
    width = len(times)
    begun, now = rank[: len(wires.gap)], rank[len(wires.gap) :]
    earliest = np.minimum.accumulate(begun - wires.gap * width)
    place = np.searchsorted(-earliest, gap * width - now, side="left")
    first = np.minimum(place, len(wires.gap) - 1)
    if not len(wires.gap):
        return np.full(len(gap), NONE)
    on_wire = (place < len(wires.gap)) & (wires.gap[first] == gap) & (wires.end[first] > at)
    return np.where(on_wire, first, NONE)


def _ranges(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return (row, value) for every value of first[row] .. last[row] - 1."""
    counts = last - first
    row = np.repeat(np.arange(len(first)), counts)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    return row, first[row] + place


def _before_on_stream(stream: Ints) -> Ints:
    """Return by task the one before it on its stream; the first follows the last, a step ago."""
    order = np.argsort(stream, kind="stable")
    ordered = stream[order]
    is_first = np.append(True, ordered[1:] != ordered[:-1])
    starts = np.flatnonzero(is_first)
    lasts = np.append(starts[1:], len(order)) - 1
    before = np.empty(len(stream), dtype=np.int64)
    before[order] = np.concatenate([order[:1], order[:-1]])
    before[order[starts]] = order[lasts] - len(stream)
    return before


def _straggler_intervals(track: RankTrack) -> tuple[Ints, Ints]:
    """Return, rising and disjoint, when the rank was joined in a collective before its last arrival."""
    kinds = np.array([int(kind) for kind in sorted(COLLECTIVE_KINDS)])
    late = np.isin(track.kinds[track.task], kinds) & (track.start_ns > track.ready_ns)
    begin, end = track.ready_ns[late], track.start_ns[late]
    if not len(begin):
        return begin, end
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    apart = np.flatnonzero(begin[1:] > end[:-1])
    return begin[np.append(0, apart + 1)], end[np.append(apart, len(end) - 1)]
