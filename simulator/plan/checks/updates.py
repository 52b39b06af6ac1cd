"""Every trainable parameter is reduced and updated once per step, in the right order, and then used.

[Note: end of step]
Per bucket: all backward passes, then (tied parameters) the sum over stages, then the reduction over
replicas, then (clipping) the norm, then the update, then (ZeRO 1 and 2) the all-gather, and the forward
passes of the next step after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.plan.buffers import Bucket
from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.checks.violation import Violation
from simulator.plan.task import NONE, TaskKind

_TIED = "tied"
_REDUCTIONS = (TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER)
_LAST_GATHERED_ZERO = 2
"""Up to ZeRO 2 parameters are whole between steps: shards are gathered after the update."""


def check_updates(facts: Facts) -> list[Violation]:
    """Find parameters that are not updated exactly once, too early, or used before that in the next step."""
    used_on = _pipeline_ranks_by_parameter(facts)
    return [violation for device in facts.devices for violation in _Ending(facts, device).violations(used_on)]


def _pipeline_ranks_by_parameter(facts: Facts) -> dict[str, set[int]]:
    """Return on which pipeline ranks each trainable parameter is used."""
    trainable = {parameter.name for parameter in facts.plan.parameters if parameter.trainable}
    found: dict[str, set[int]] = {}
    for segment in facts.plan.segments:
        for name in segment.parameters:
            if name in trainable:
                found.setdefault(name, set()).add(facts.owner[segment.stage])
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Ending:
    """The end of the step on one device."""

    facts: Facts
    device: DeviceFacts

    def violations(self, used_on: dict[str, set[int]]) -> Iterator[Violation]:
        mine = [name for name, ranks in used_on.items() if self.device.rank in ranks]
        yield from self._unowned(mine)
        yield from self._untied([name for name in mine if len(used_on[name]) > 1])
        for number, bucket in enumerate(self.device.plan.buckets):
            yield from self._tied(number, bucket) if bucket.kind == _TIED else self._bucket(number, bucket)
        yield from self._norm()

    def _tasks(self, kinds: Sequence[TaskKind], bucket: int) -> Indices:
        """Return the once-per-step tasks of these kinds and this bucket."""
        table = self.device.plan.tasks
        same = np.isin(table.kind, list(kinds)) & (table.bucket == bucket) & (table.microbatch == NONE)
        return np.flatnonzero(same)

    def _unowned(self, mine: Sequence[str]) -> Iterator[Violation]:
        """Yield trainable parameters of this device that are not in exactly one bucket."""
        owners: dict[str, list[str]] = {name: [] for name in mine}
        for bucket in self.device.plan.buckets:
            for name in bucket.parameters if bucket.kind != _TIED else ():
                if name in owners:
                    owners[name].append(bucket.name)
        for name, buckets in owners.items():
            where = f"parameter {name} of rank {self.device.rank}"
            if not buckets:
                yield Violation(rule="never-updated", message=f"{where} is in no bucket: it is never updated")
            elif len(buckets) > 1:
                message = (
                    f"{where} is in several buckets ({', '.join(buckets)}): it is updated more than once"
                )
                yield Violation(rule="updated-twice", message=message)

    def _untied(self, shared: Sequence[str]) -> Iterator[Violation]:
        """Yield parameters that other pipeline ranks use too, but whose gradients are not summed."""
        buckets = self.device.plan.buckets
        summed = {name for bucket in buckets if bucket.kind == _TIED for name in bucket.parameters}
        for name in shared:
            if name not in summed:
                message = (
                    f"parameter {name} of rank {self.device.rank} is shared with other pipeline ranks, "
                    "but its gradients are never summed over them"
                )
                yield Violation(rule="never-reduced", message=message)

    def _bucket(self, number: int, bucket: Bucket) -> Iterator[Violation]:
        updates, reductions = self._tasks([TaskKind.UPDATE], number), self._tasks(_REDUCTIONS, number)
        gathers = self._tasks([TaskKind.ALL_GATHER], number)
        yield from self._once(bucket, updates, ("never-updated", "updated-twice", "updated"))
        yield from self._reduced_once(bucket, reductions)
        backwards = self._backwards(bucket)
        yield from self._ordered(backwards, reductions, "reduces gradients")
        yield from self._ordered(backwards, updates, "updates parameters")
        yield from self._ordered(reductions, updates, "updates parameters")
        if 1 <= bucket.zero <= _LAST_GATHERED_ZERO and bucket.shard_count > 1:
            yield from self._once(bucket, gathers, ("never-gathered", "gathered-twice", "gathered"))
            yield from self._ordered(updates, gathers, "gathers parameters")
        yield from self._stale(bucket, gathers if len(gathers) else updates)

    def _once(self, bucket: Bucket, tasks: Indices, rules: tuple[str, str, str]) -> Iterator[Violation]:
        never, twice, verb = rules
        if len(tasks) == 0:
            parameters = _some(bucket.parameters)
            message = f"bucket {bucket.name} of rank {self.device.rank} ({parameters}) is never {verb}"
            yield Violation(rule=never, message=message)
        elif len(tasks) > 1:
            names = self.device.names(tasks.tolist())
            message = f"bucket {bucket.name} of rank {self.device.rank} is {verb} by {' and '.join(names)}"
            yield Violation(rule=twice, message=message, tasks=names)

    def _reduced_once(self, bucket: Bucket, reductions: Indices) -> Iterator[Violation]:
        mesh = self.facts.plan.mesh
        if bucket.group != NONE:
            yield from self._once(bucket, reductions, ("never-reduced", "reduced-twice", "reduced"))
        elif bucket.kind == "dense" and mesh.size("dp") * mesh.size("cp") > 1:
            message = (
                f"bucket {bucket.name} of rank {self.device.rank} has replicas but no group to reduce it"
            )
            yield Violation(rule="never-reduced", message=message)

    def _tied(self, number: int, bucket: Bucket) -> Iterator[Violation]:
        sums = self._tasks(_REDUCTIONS, number)
        yield from self._once(bucket, sums, ("never-reduced", "reduced-twice", "reduced"))
        yield from self._ordered(self._backwards(bucket), sums, "reduces gradients")
        for other, owner in enumerate(self.device.plan.buckets):
            if owner.kind != _TIED and not set(owner.parameters).isdisjoint(bucket.parameters):
                later = self._tasks((*_REDUCTIONS, TaskKind.UPDATE), other)
                yield from self._ordered(sums, later, "uses gradients")

    def _norm(self) -> Iterator[Violation]:
        """Yield updates that do not wait for the gradient norm, and norms that miss a bucket."""
        norms, sums = self._tasks([TaskKind.NORM], NONE), self._tasks([TaskKind.ALL_REDUCE], NONE)
        table = self.device.plan.tasks
        updates = np.flatnonzero(table.kind == TaskKind.UPDATE)
        if self.facts.plan.training.clip_grad_norm is None or not len(updates):
            return
        if not len(norms) or (not len(sums) and self.facts.plan.num_ranks > 1):
            message = f"rank {self.device.rank} clips gradients but never computes their global norm"
            yield Violation(rule="never-normed", message=message, tasks=self.device.names(updates.tolist()))
        reductions = np.flatnonzero(np.isin(table.kind, _REDUCTIONS) & (table.bucket != NONE))
        yield from self._ordered(reductions, norms, "takes the norm")
        for bucket in self.device.plan.buckets:
            yield from self._ordered(self._backwards(bucket), norms, "takes the norm")
        yield from self._ordered(norms, sums, "sums the norm")
        yield from self._ordered(sums if len(sums) else norms, updates, "clips and updates")

    def _backwards(self, bucket: Bucket) -> Indices:
        """Return the tasks that add to the bucket's gradients; of each stream, stage and kind the last."""
        table, parameters = self.device.plan.tasks, set(bucket.parameters)
        segments = self.facts.plan.segments
        users = [
            number
            for number, segment in enumerate(segments)
            if segment.stage in self.device.plan.stages and not parameters.isdisjoint(segment.parameters)
        ]
        last: set[int] = set()
        for kind in (TaskKind.B, TaskKind.BW):
            of_kind = np.flatnonzero(table.kind == kind)
            for segment in users:
                covers = (table.first_segment[of_kind] <= segment) & (segment <= table.last_segment[of_kind])
                tasks = of_kind[covers]
                last |= {
                    int(tasks[table.stream[tasks] == stream].max())
                    for stream in np.unique(table.stream[tasks])
                }
        return np.array(sorted(last), dtype=np.int64)

    def _ordered(self, first: Indices, second: Indices, verb: str) -> Iterator[Violation]:
        """Yield pairs in which a task of `second` does not wait for one of `first`."""
        before, after = (grid.ravel() for grid in np.meshgrid(first, second, indexing="ij"))
        bad = ~self.device.before(before, after)
        for giver, taker in zip(before[bad].tolist(), after[bad].tolist(), strict=True):
            names = self.device.names((giver, taker))
            message = f"{names[1]} {verb} without waiting for {names[0]}"
            yield Violation(rule="missing-order", message=message, tasks=names)

    def _stale(self, bucket: Bucket, writers: Indices) -> Iterator[Violation]:
        """Yield forward passes that may use the parameters of the step before the last."""
        if not len(writers):
            return
        table, writer = self.device.plan.tasks, int(writers[-1])
        everything = np.arange(len(table))
        after = self.device.before(np.full(len(table), writer), everything)
        after[writer] = True
        streams = set(table.stream[after].tolist())
        for task in self._first_forwards(bucket):
            until = self.device.before(everything, np.full(len(table), task))
            until[task] = True
            earlier = np.flatnonzero(until)
            waited = [wait for one in earlier.tolist() for wait in table.previous_step_waits.row(one)]
            if not (after[waited].any() or not streams.isdisjoint(table.stream[earlier].tolist())):
                names = self.device.names((task, writer))
                message = (
                    f"{names[0]} of the next step does not wait for {names[1]}: it may use old parameters"
                )
                yield Violation(rule="stale-parameters", message=message, tasks=names)

    def _first_forwards(self, bucket: Bucket) -> list[int]:
        """Return, by stream, the first forward pass that uses a parameter of the bucket."""
        table, parameters = self.device.plan.tasks, set(bucket.parameters)
        users = [
            number
            for number, segment in enumerate(self.facts.plan.segments)
            if not parameters.isdisjoint(segment.parameters)
        ]
        forwards = np.flatnonzero(table.kind == TaskKind.F)
        first: dict[int, int] = {}
        for task in forwards.tolist():
            span = range(int(table.first_segment[task]), int(table.last_segment[task]) + 1)
            if int(table.stream[task]) not in first and any(user in span for user in users):
                first[int(table.stream[task])] = task
        return sorted(first.values())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) <= len(names[:2]) else f"{shown}, ... {len(names)} parameters"
