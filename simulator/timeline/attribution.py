"""Attribution: every instant of the last step, on every rank, gets exactly one label; the parts add up.

The window is the same on all ranks: the last step time up to the end of the last step. Labels by falling
priority: compute, recompute or optimizer while the compute stream runs; straggler while joined in a
collective before its last arrival; the communication that the next compute task waits for while it is on
the wire; host while the next compute task is not yet dispatched; else bubble. Whole nanoseconds inside.

[Note: what the next task waits for]  Directly or through other communication of this rank (its waits and
    the tasks before it on its stream). Of several on the wire at once the one that ends last counts.
    After the last compute task of the window, the next one is the first of the following step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cost_models.errors import check_invariant
from simulator.distinct import distinct_rows
from simulator.plan import COLLECTIVE_KINDS, COMPUTE_KINDS, HOST_COPY_KINDS, NONE, DevicePlan, Plan, TaskKind
from simulator.timeline.timeline import RankTrack, Timeline


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
        n_devices: int64 [tracks], how many ranks each track stands for.
    """

    begin_ns: int
    end_ns: int
    label_ns: npt.NDArray[np.int64]
    n_devices: npt.NDArray[np.int64]

    def mean_s(self, *labels: Label) -> float:
        """Return the seconds under `labels`, averaged over ranks."""
        total_ns = sum(int(ns) * int(n) for ns, n in zip(self._sum(labels), self.n_devices, strict=True))
        return total_ns / int(self.n_devices.sum()) / 1e9

    def breakdown_s(self) -> dict[str, float]:
        """Return `breakdown_s` of the result: mean seconds by label name."""
        return {label.name.lower(): self.mean_s(label) for label in Label}

    def busy_ns(self) -> npt.NDArray[np.int64]:
        """Return, by track, how long its compute stream ran."""
        return self._sum(BUSY)

    def _sum(self, labels: Sequence[Label]) -> npt.NDArray[np.int64]:
        return np.asarray(self.label_ns[:, list(labels)].sum(axis=1), dtype=np.int64)


def attribute(plan: Plan, timeline: Timeline) -> Attribution:
    """Label the last step of a simulated or measured timeline of `plan`."""
    begin, end = timeline.window_ns
    devices = {device.pipeline_rank: device for device in plan.device_plans}
    rows = [
        _RankView(plan, devices[track.pipeline_rank], track).label_window(begin, end)
        for track in timeline.tracks
    ]
    label_ns = np.array(rows, dtype=np.int64)
    check_invariant(bool((label_ns.sum(axis=1) == end - begin).all()), "labels do not add up to the window")
    counts = np.array([track.n_devices for track in timeline.tracks], dtype=np.int64)
    return Attribution(begin_ns=begin, end_ns=end, label_ns=label_ns, n_devices=counts)


def communication_labels(plan: Plan, device: DevicePlan) -> list[Label]:
    """Return the label of every task of `device` while it is on the wire (compute tasks: of its kind)."""
    table = device.tasks
    columns = (table.kind, table.group, table.bucket, table.stage, table.phase)
    first, number = distinct_rows(columns)
    rows = zip(*(column[first].tolist() for column in columns), strict=True)
    labels = [
        _label(plan, TaskKind(kind), group, is_norm=bucket == stage == phase == NONE)
        for kind, group, bucket, stage, phase in rows
    ]
    return [labels[row] for row in number.tolist()]


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


@dataclass(frozen=True, slots=True)
class _Wire:
    """One communication that the next compute task waits for."""

    end_ns: int
    start_ns: int
    instance: int
    label: Label


class _RankView:
    """One rank's spans by instance (step * num_tasks + task), and what waits for what."""

    def __init__(self, plan: Plan, device: DevicePlan, track: RankTrack) -> None:
        table = device.tasks
        self.num_tasks = len(table)
        self.labels = communication_labels(plan, device)
        self.on_compute = [
            label in BUSY and stream == 0
            for label, stream in zip(self.labels, table.stream.tolist(), strict=True)
        ]
        self.start = track.start_ns.tolist()
        self.end = track.end_ns.tolist()
        self.dispatch = track.dispatch_ns.tolist()
        self.waits = table.waits.to_rows()
        self.previous_step_waits = table.previous_step_waits.to_rows()
        self.before_on_stream = _before_on_stream(table.stream.tolist())
        self.skew = _straggler_intervals(track)
        self.skew_starts = [begin for begin, _ in self.skew]

    def label_window(self, begin: int, end: int) -> list[int]:
        """Return ns by label; they sum to `end - begin`."""
        found = [0] * len(Label)
        cursor = begin
        for instance in self._compute_instances():
            spans = instance < len(self.start)
            start = min(self.start[instance], end) if spans else end
            if start > cursor:
                self._label_gap(found, (cursor, start), instance)
                cursor = start
            stop = min(self.end[instance], end) if spans else end
            if stop > cursor:
                found[self.labels[instance % self.num_tasks]] += stop - cursor
                cursor = stop
        if cursor < end:
            self._label_gap(found, (cursor, end), NONE)
        return found

    def _compute_instances(self) -> Iterator[int]:
        """Yield all instances of the compute stream in order, and the first of the step that would follow."""
        tasks = [task for task in range(self.num_tasks) if self.on_compute[task]]
        for offset in range(0, len(self.start), self.num_tasks):
            yield from (offset + task for task in tasks)
        if tasks:
            yield len(self.start) + tasks[0]

    def _label_gap(self, found: list[int], gap: tuple[int, int], upcoming: int) -> None:
        """Label idle time before the compute instance `upcoming` (NONE: there is none)."""
        begin, end = gap
        wires = [] if upcoming == NONE else self._waited_for(upcoming, begin)
        skews = self._skews(begin, end)
        known = upcoming != NONE and upcoming < len(self.start)
        dispatched = self.dispatch[upcoming] if known else begin
        cuts = {begin, end, dispatched}
        cuts.update(time for skew in skews for time in skew)
        cuts.update(time for wire in wires for time in (wire.start_ns, wire.end_ns))
        times = sorted(time for time in cuts if begin <= time <= end)
        for at, until in pairwise(times):
            found[_label_at(at, wires, skews, dispatched=dispatched)] += until - at

    def _waited_for(self, upcoming: int, now: int) -> list[_Wire]:
        """Return the communication still to end after `now` that `upcoming` waits for; see the note above."""
        wires, seen, stack = [], {upcoming}, [upcoming]
        while stack:
            for instance in self._before(stack.pop()):
                task = instance % self.num_tasks
                happened = instance < len(self.start)
                if instance in seen or self.labels[task] in BUSY or (happened and self.end[instance] <= now):
                    continue
                seen.add(instance)
                stack.append(instance)
                if happened:
                    start, end = self.start[instance], self.end[instance]
                    wires.append(_Wire(end, start, instance, self.labels[task]))
        return sorted(wires, key=lambda wire: (-wire.end_ns, -wire.start_ns, wire.instance))

    def _before(self, instance: int) -> list[int]:
        task = instance % self.num_tasks
        offset = instance - task
        before = [offset + wait for wait in self.waits[task]]
        if offset:
            before += [offset - self.num_tasks + wait for wait in self.previous_step_waits[task]]
        on_stream = offset + self.before_on_stream[task]
        return [*before, on_stream] if on_stream >= 0 else before

    def _skews(self, begin: int, end: int) -> list[tuple[int, int]]:
        found = []
        at = max(bisect_right(self.skew_starts, begin) - 1, 0)
        while at < len(self.skew) and self.skew[at][0] < end:
            if self.skew[at][1] > begin:
                found.append(self.skew[at])
            at += 1
        return found


def _label_at(at: int, wires: list[_Wire], skews: list[tuple[int, int]], *, dispatched: int) -> Label:
    if any(begin <= at < end for begin, end in skews):
        return Label.STRAGGLER
    for wire in wires:
        if wire.start_ns <= at < wire.end_ns:
            return wire.label
    return Label.HOST if at < dispatched else Label.BUBBLE


def _before_on_stream(streams: list[int]) -> list[int]:
    """Return by task the one before it on its stream; the first follows the last, a step ago."""
    last: dict[int, int] = {}
    found = []
    for position, stream in enumerate(streams):
        found.append(last.get(stream, NONE))
        last[stream] = position
    num_tasks = len(streams)
    return [
        before if before != NONE else last[stream] - num_tasks
        for before, stream in zip(found, streams, strict=True)
    ]


def _straggler_intervals(track: RankTrack) -> list[tuple[int, int]]:
    """Return, rising and disjoint, when the rank was joined in a collective before its last arrival."""
    kinds = np.array([int(kind) for kind in sorted(COLLECTIVE_KINDS)])
    late = np.isin(track.kinds[track.task], kinds) & (track.start_ns > track.ready_ns)
    pairs = sorted(zip(track.ready_ns[late].tolist(), track.start_ns[late].tolist(), strict=True))
    merged: list[tuple[int, int]] = []
    for begin, end in pairs:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
