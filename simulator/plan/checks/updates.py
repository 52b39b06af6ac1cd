"""Every trainable parameter is updated once per step, from complete gradients, and used only after that.

[Note: end of step]
Per bucket: its last reductions (or, with one replica, its backward passes), then (clipping) the norm, then
the update. Where state is cut over ranks, parameters are gathered between the update and their next use:
after the update (ZeRO 1 and 2) or before each use (ZeRO 3, where no whole parameters are kept). The
forward passes of the next step come after all that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simulator.plan.buffers import Bucket
from simulator.plan.checks.contributions import REDUCTION_KINDS, TIED, contributions, levels_of, some
from simulator.plan.checks.facts import DeviceFacts, Facts, Flags, Indices
from simulator.plan.checks.violation import Violation
from simulator.plan.plan import IndexLists
from simulator.plan.task import NONE, TaskKind

_WHOLE_ZERO = 2
"""Up to ZeRO 2 parameters are whole between steps."""

_USES = (TaskKind.F, TaskKind.R, TaskKind.B, TaskKind.BI)
"""Passes that need the parameters (BW needs activations and gradients only)."""


def check_updates(facts: Facts) -> list[Violation]:
    """Find parameters that are not updated exactly once, too early, or used before that in the next step."""
    trained = {parameter.name for parameter in facts.plan.parameters if parameter.trainable}
    return [violation for device in facts.devices for violation in _Ending(facts, device).violations(trained)]


@dataclass(frozen=True, eq=False)
class _Ending:
    """The end of the step on one device."""

    facts: Facts
    device: DeviceFacts

    def violations(self, trained: set[str]) -> Iterator[Violation]:
        yield from self._unowned(trained)
        for number, bucket in enumerate(self.device.plan.buckets):
            if bucket.kind != TIED:
                yield from self._bucket(number, bucket)
        yield from self._norm()

    def _tasks(self, kind: TaskKind, bucket: int) -> Indices:
        table = self.device.plan.tasks
        return np.flatnonzero((table.kind == kind) & (table.bucket == bucket))

    def _unowned(self, trained: set[str]) -> Iterator[Violation]:
        """Yield trainable parameters of this device that are not in exactly one bucket."""
        segments = [self.facts.plan.segments[s] for s in self.facts.passes[self.device.rank].segments]
        mine = dict.fromkeys(name for one in segments for name in one.parameters if name in trained)
        owners: dict[str, list[str]] = {name: [] for name in mine}
        for bucket in self.device.plan.buckets:
            for name in bucket.parameters if bucket.kind != TIED else ():
                if name in owners:
                    owners[name].append(bucket.name)
        stage_of = {name: one.stage for one in segments for name in one.parameters}
        for name, buckets in owners.items():
            where, stages = f"parameter {name} of rank {self.device.rank}", (stage_of[name],)
            if not buckets:
                message = f"{where} is in no bucket: it is never updated"
                yield Violation(rule="never-updated", message=message, stages=stages)
            elif len(buckets) > 1:
                message = (
                    f"{where} is in several buckets ({', '.join(buckets)}): it is updated more than once"
                )
                yield Violation(rule="updated-twice", message=message, stages=stages)

    def _bucket(self, number: int, bucket: Bucket) -> Iterator[Violation]:
        updates = self._tasks(TaskKind.UPDATE, number)
        yield from self._once(bucket, updates, ("never-updated", "updated-twice", "updated"))
        levels = levels_of(self.device, number)
        if bucket.group != NONE and levels:
            yield from self._ordered(levels[-1], updates, "updates parameters")
        yield from self._ordered(self._sources(bucket), updates, "updates parameters")
        yield from self._ungathered(bucket, self._tasks(TaskKind.ALL_GATHER, number))
        writers = updates
        if bucket.zero >= 1 and bucket.shard_count > 1:
            gathers = self._tasks(TaskKind.ALL_GATHER, number)
            yield from self._gathered(bucket, (updates, gathers))
            late = gathers[self._after(updates, gathers)]
            writers = late if len(late) else updates
        yield from self._stale(bucket, writers)

    def _sources(self, bucket: Bucket) -> Indices:
        """Return the last backward pass on each stream that adds to the bucket, and its sums over ranks."""
        tasks = contributions(self.facts, self.device, bucket.parameters).tasks
        streams = self.device.plan.tasks.stream[tasks]
        last = [int(tasks[streams == stream].max()) for stream in np.unique(streams).tolist()]
        for other, tied in enumerate(self.device.plan.buckets):
            if tied.kind == TIED and not set(tied.parameters).isdisjoint(bucket.parameters):
                last += [task for level in levels_of(self.device, other) for task in level.tolist()]
        return np.array(sorted(last), dtype=np.int64)

    def _once(self, bucket: Bucket, tasks: Indices, rules: tuple[str, str, str]) -> Iterator[Violation]:
        never, twice, verb = rules
        where = f"bucket {bucket.name} of rank {self.device.rank}"
        if len(tasks) == 0:
            message = f"{where} ({some(bucket.parameters)}) is never {verb}"
            yield Violation(rule=never, message=message, stages=(bucket.stage,))
        elif len(tasks) > 1:
            names = self.device.names(tasks.tolist())
            yield Violation(rule=twice, message=f"{where} is {verb} by {' and '.join(names)}", tasks=names)

    def _gathered(self, bucket: Bucket, tasks: tuple[Indices, Indices]) -> Iterator[Violation]:
        """Yield parameters that are used without being gathered since they were updated."""
        updates, gathers = tasks
        late = gathers[self._after(updates, gathers)]
        early = np.setdiff1d(gathers, late)
        users = self._users(bucket)
        gathered_first = self._any_before(early, users)
        if bucket.zero <= _WHOLE_ZERO and (len(late) or not gathered_first.all() or not len(users)):
            yield from self._once(bucket, late, ("never-gathered", "gathered-twice", "gathered"))
            yield from self._ordered(updates, early, "gathers parameters")
        elif not len(late) and not gathered_first.all():
            names = self.device.names(users[~gathered_first][:1].tolist())
            message = (
                f"{names[0]} uses bucket {bucket.name} of rank {self.device.rank}, which is cut over "
                f"{bucket.shard_count} ranks, without waiting for a task that gathers it"
            )
            yield Violation(rule="never-gathered", message=message, tasks=names)

    def _ungathered(self, bucket: Bucket, gathers: Indices) -> Iterator[Violation]:
        """Yield passes that read no buffer with gathered parameters of theirs, where gathers make some."""
        table, users = self.device.plan.tasks, self._users(bucket)
        makes = np.diff(table.allocates.starts)[gathers] > 0
        if bucket.zero <= _WHOLE_ZERO or not len(gathers) or not makes.all():
            return
        made = _listed(table.allocates, gathers)[1]
        row, read = _listed(table.reads, users)
        lacking = np.bincount(row, weights=np.isin(read, made), minlength=len(users)) == 0
        for name in self.device.names(users[lacking].tolist()):
            message = (
                f"{name} uses bucket {bucket.name} of rank {self.device.rank}, but reads no gather of it"
            )
            yield Violation(rule="never-gathered", message=message, tasks=(name,))

    def _after(self, first: Indices, second: Indices) -> Flags:
        """Return which of `second` come after all of `first`."""
        before = self._grid(first, second)
        return np.asarray(before.all(axis=0) if len(first) else np.zeros(len(second), dtype=np.bool_))

    def _any_before(self, first: Indices, second: Indices) -> Flags:
        """Return which of `second` come after one of `first` (the first on some stream)."""
        streams = self.device.plan.tasks.stream[first]
        heads = [int(first[streams == stream].min()) for stream in np.unique(streams).tolist()]
        return np.asarray(self._grid(np.array(heads, dtype=np.int64), second).any(axis=0))

    def _grid(self, first: Indices, second: Indices) -> Flags:
        before, after = (grid.ravel() for grid in np.meshgrid(first, second, indexing="ij"))
        return self.device.before(before, after).reshape(len(first), len(second))

    def _norm(self) -> Iterator[Violation]:
        """Yield updates that do not wait for the gradient norm, and norms that miss a bucket."""
        table = self.device.plan.tasks
        norms = self._tasks(TaskKind.NORM, NONE)
        sums = self._tasks(TaskKind.ALL_REDUCE, NONE)
        sums = sums[table.microbatch[sums] == NONE]
        updates = np.flatnonzero(table.kind == TaskKind.UPDATE)
        if self.facts.plan.training.clip_grad_norm is None or not len(updates):
            return
        if not len(norms) or (not len(sums) and self.facts.plan.num_ranks > 1):
            message = f"rank {self.device.rank} clips gradients but never computes their global norm"
            yield Violation(rule="never-normed", message=message, tasks=self.device.names(updates.tolist()))
        for tasks, verb in ((norms, "normed"), (sums, "summed")):
            if len(tasks) > 1:
                names = self.device.names(tasks.tolist())
                message = f"the gradient norm of rank {self.device.rank} is {verb} by {' and '.join(names)}"
                yield Violation(rule="normed-twice", message=message, tasks=names)
        reductions = np.flatnonzero(np.isin(table.kind, REDUCTION_KINDS) & (table.bucket != NONE))
        yield from self._ordered(self._last_on_streams(reductions), norms, "takes the norm")
        for bucket in self.device.plan.buckets:
            yield from self._ordered(self._sources(bucket), norms, "takes the norm")
        yield from self._ordered(norms, sums, "sums the norm")
        yield from self._ordered(sums if len(sums) else norms, updates, "clips and updates")

    def _last_on_streams(self, tasks: Indices) -> Indices:
        streams = self.device.plan.tasks.stream[tasks]
        last = [int(tasks[streams == stream].max()) for stream in np.unique(streams).tolist()]
        return np.array(last, dtype=np.int64)

    def _ordered(self, first: Indices, second: Indices, verb: str) -> Iterator[Violation]:
        """Yield pairs in which a task of `second` does not wait for one of `first`."""
        givers, takers = np.nonzero(~self._grid(first, second))
        for giver, taker in zip(first[givers].tolist(), second[takers].tolist(), strict=True):
            if giver != taker:
                names = self.device.names((giver, taker))
                message = f"{names[1]} {verb} without waiting for {names[0]}"
                yield Violation(rule="missing-order", message=message, tasks=names)

    def _stale(self, bucket: Bucket, writers: Indices) -> Iterator[Violation]:
        """Yield tasks that may use the parameters of the step before the last."""
        if not len(writers):
            return
        writer = int(writers[-1])
        for task in self._first_users(bucket):
            if not self._in_step_after(writer, task):
                names = self.device.names((task, writer))
                message = (
                    f"{names[0]} of the next step does not wait for {names[1]}: it may use old parameters"
                )
                yield Violation(rule="stale-parameters", message=message, tasks=names)

    def _in_step_after(self, writer: int, task: int) -> bool:
        """Return whether `task` surely waits for `writer` of the step before.

        Either way: a stream with a task after `writer` and one before `task`, or a wait across steps.
        """
        table = self.device.plan.tasks
        everything = np.arange(len(table))
        after = self.device.before(np.full(len(table), writer), everything)
        until = self.device.before(everything, np.full(len(table), task))
        after[writer] = until[task] = True
        if not set(table.stream[after].tolist()).isdisjoint(table.stream[until].tolist()):
            return True
        waiting, waited = self._cross_step_waits
        return bool((until[waiting] & after[waited]).any())

    @cached_property
    def _cross_step_waits(self) -> tuple[Indices, Indices]:
        lists = self.device.plan.tasks.previous_step_waits
        return np.repeat(np.arange(len(lists.starts) - 1), np.diff(lists.starts)), lists.values

    def _first_users(self, bucket: Bucket) -> list[int]:
        """Return, by stream, the first task that uses a parameter of the bucket, or gathers it before."""
        table, users = self.device.plan.tasks, self._users(bucket)
        number = self.device.plan.buckets.index(bucket)
        tasks = np.union1d(users, self._tasks(TaskKind.ALL_GATHER, number))
        streams = table.stream[tasks]
        return sorted(int(tasks[streams == stream].min()) for stream in np.unique(streams).tolist())

    def _users(self, bucket: Bucket) -> Indices:
        """Return the passes that use a parameter of the bucket."""
        parameters, passes = set(bucket.parameters), self.facts.passes[self.device.rank]
        rows = [
            row
            for row, segment in enumerate(passes.segments.tolist())
            if not parameters.isdisjoint(self.facts.plan.segments[segment].parameters)
        ]
        tasks = np.unique(np.concatenate([passes.task[kind][rows].ravel() for kind in _USES]))
        return np.asarray(tasks[tasks != NONE])


def _listed(lists: IndexLists, rows: Indices) -> tuple[Indices, Indices]:
    """Return every entry of some rows of lists: the place of its row in `rows`, and the entry."""
    starts, counts = lists.starts[rows], np.diff(lists.starts)[rows]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(rows)), counts), lists.values[np.repeat(starts, counts) + within]
