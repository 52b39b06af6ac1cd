"""Attribution once more, instant by instant in plain Python: what the one by columns is held against."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simulator.plan import COLLECTIVE_KINDS, NONE, DevicePlan, Plan, TaskKind
from simulator.timeline.attribution import BUSY, Label, Phase, communication_labels
from simulator.timeline.timeline import RankTrack, Timeline


def labels_one_by_one(plan: Plan, timeline: Timeline) -> list[list[int]]:
    """Return ns by track and label."""
    return [found for found, _ in _windows(plan, timeline)]


def phases_one_by_one(plan: Plan, timeline: Timeline) -> list[list[int]]:
    """Return ns of bubble by track and phase."""
    return [phases for _, phases in _windows(plan, timeline)]


def _windows(plan: Plan, timeline: Timeline) -> list[tuple[list[int], list[int]]]:
    begin, end = timeline.window_ns
    devices = {device.pipeline_rank: device for device in plan.device_plans}
    views = [RankView(plan, devices[track.pipeline_rank], track) for track in timeline.tracks]
    return [(view.label_window(begin, end), view.phases) for view in views]


@dataclass(frozen=True, slots=True)
class Wire:
    """One communication that the next compute task waits for."""

    end_ns: int
    start_ns: int
    instance: int
    label: Label


class RankView:
    """One rank's spans by instance (step * num_tasks + task), and what waits for what."""

    def __init__(self, plan: Plan, device: DevicePlan, track: RankTrack) -> None:
        table = device.tasks
        self.num_tasks = len(table)
        self.kinds = table.kind.tolist()
        self.phases = [0] * len(Phase)
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
            label = _label_at(at, wires, skews, dispatched=dispatched)
            found[label] += until - at
            if label == Label.BUBBLE:
                self.phases[self._phase(upcoming)] += until - at

    def _phase(self, upcoming: int) -> Phase:
        """Return the phase of bubble before an instance."""
        if upcoming == NONE or upcoming >= len(self.start):
            return Phase.COOL_DOWN
        task = upcoming % self.num_tasks
        ran = [kind for kind, mine in zip(self.kinds[:task], self.on_compute, strict=False) if mine]
        comes = [kind for kind, mine in zip(self.kinds[task:], self.on_compute[task:], strict=True) if mine]
        if TaskKind.B not in ran and TaskKind.BI not in ran:
            return Phase.WARM_UP
        return Phase.STEADY if TaskKind.F in comes else Phase.COOL_DOWN

    def _waited_for(self, upcoming: int, now: int) -> list[Wire]:
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
                    wires.append(Wire(end, start, instance, self.labels[task]))
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


def _label_at(at: int, wires: list[Wire], skews: list[tuple[int, int]], *, dispatched: int) -> Label:
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
