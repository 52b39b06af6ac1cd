"""Gradients: at its update a parameter holds the gradient of every (replica, microbatch) exactly once.

[Note: contribution sets]
What is followed is not numbers but sets. A B or BW of segment s and microbatch m contributes (s, m) to
every trained parameter of s, on the pipeline rank where it runs. Reductions move and join such sets:

* A level is the reductions of one bucket over one group. First come "tied" buckets (the pipeline ranks
  that hold a parameter), then the bucket itself, group by group in dispatch order (two groups: shards, then
  their copies). Each level must take everything that the level before gives, each part once.
* A reduction with microbatch NONE takes all that was added and not taken yet. One with a microbatch takes
  the gradients in the temporary buffers that it reads, where a backward pass uses these; if it reads none
  of these, those of its own microbatch.
* A reduction takes only what surely happened before it.
* A bucket without a group (NONE) has one replica and needs no reduction.
* Over the ranks of its group a reduction joins the sets of all members, which must have nothing in common.

At the update of a dense bucket the set must be {all users} x {all microbatches} x {all ranks that differ
in the axes dp and cp of the device's mesh only}, of a "sequence" bucket those of tp too. Experts are spread
over the ranks between which tokens travel to them: of so many ranks each holds other ones, and each further
set of ranks the same again. Where no exchange says so, every rank must take part in the bucket's group.

So a plan must say: `bucket`, `group` and (per microbatch) `microbatch` of every reduction, the buckets'
parameters, and the members of groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.plan.buffers import Bucket
from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.checks.violation import Violation
from simulator.plan.task import NONE, TaskKind

Pairs = tuple[Indices, Indices]
"""Places of parts, and of the reductions that take them."""

TIED = "tied"
EXPERT_AXIS = "ep"
REDUCTION_KINDS = (TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Contributions, or sums of them: the task that gives each, and its microbatch (NONE: of several)."""

    tasks: Indices
    microbatches: Indices


def check_contributions(facts: Facts) -> list[Violation]:
    """Find gradients that are reduced twice, too early or never, or over the wrong ranks."""
    users = _users(facts)
    found: list[Violation] = []
    for device in facts.devices:
        flow = _Flow(facts, device, users)
        found += flow.untied()
        for number, bucket in enumerate(device.plan.buckets):
            found += flow.of_tied(number, bucket) if bucket.kind == TIED else flow.of_bucket(number, bucket)
    return found


def levels_of(device: DeviceFacts, bucket: int) -> list[Indices]:
    """Return the reductions of a bucket, group by group ([Note: contribution sets])."""
    table = device.plan.tasks
    tasks = np.flatnonzero(np.isin(table.kind, REDUCTION_KINDS) & (table.bucket == bucket))
    groups = list(dict.fromkeys(table.group[tasks].tolist()))
    return [tasks[table.group[tasks] == group] for group in groups]


def contributions(facts: Facts, device: DeviceFacts, parameters: Sequence[str]) -> Parts:
    """Return the backward passes on a device that give gradients of any of these parameters."""
    wanted, passes = set(parameters), facts.passes[device.rank]
    rows = [
        row
        for row, segment in enumerate(passes.segments.tolist())
        if not wanted.isdisjoint(facts.plan.segments[segment].parameters)
    ]
    tasks = passes.weights[rows]
    microbatches = np.broadcast_to(np.arange(tasks.shape[1]), tasks.shape)[tasks != NONE]
    tasks, firsts = np.unique(tasks[tasks != NONE], return_index=True)
    return Parts(tasks=tasks, microbatches=microbatches[firsts])


def some(names: Sequence[str]) -> str:
    """Return the first two names and the number of all."""
    shown = ", ".join(names[:2])
    return shown if len(names) <= len(names[:2]) else f"{shown}, ... {len(names)} parameters"


def _users(facts: Facts) -> dict[str, list[int]]:
    """Return the segments that use each trained parameter and have a backward pass."""
    trained = {parameter.name for parameter in facts.plan.parameters if parameter.trainable}
    found: dict[str, list[int]] = {}
    for number, segment in enumerate(facts.plan.segments):
        if facts.needs_backward[number]:
            for name in trained.intersection(segment.parameters):
                found.setdefault(name, []).append(number)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Flow:
    """The gradients of one device on their way to the update."""

    facts: Facts
    device: DeviceFacts
    users: dict[str, list[int]]
    joined: dict[tuple[int, ...], frozenset[int]] = field(default_factory=dict)

    def untied(self) -> Iterator[Violation]:
        """Yield parameters of which other pipeline ranks compute a part that is never added."""
        tied = {
            name: bucket
            for bucket in self.device.plan.buckets
            if bucket.kind == TIED
            for name in bucket.parameters
        }
        mine = set(self.facts.passes[self.device.rank].segments.tolist())
        for name, segments in self.users.items():
            if mine.isdisjoint(segments):
                continue
            places = self.facts.place[self.facts.stage_of_segment[segments]]
            needed = set(np.unique(places[places != NONE]).tolist())
            where = f"parameter {name} of rank {self.device.rank}"
            if needed <= {self.device.rank}:
                continue
            if name not in tied:
                message = (
                    f"{where} is shared with other pipeline ranks, but its gradients are never summed over "
                    "them"
                )
                yield self._violation("never-reduced", message, segments)
                continue
            group = tied[name].group
            summed = set(self.facts.plan.groups[group].pipeline_ranks) if group != NONE else set()
            if needed - summed:
                missing = ", ".join(f"rank {rank}" for rank in sorted(needed - summed))
                message = f"{where} is summed without the gradients of {missing}"
                yield self._violation("never-reduced", message, segments)

    def of_tied(self, number: int, bucket: Bucket) -> Iterator[Violation]:
        """Yield what is wrong with the sum over the pipeline ranks that hold parameters."""
        parts = contributions(self.facts, self.device, bucket.parameters)
        levels = levels_of(self.device, number)
        yield from self._through(bucket, parts, levels)
        for other, owner in enumerate(self.device.plan.buckets):
            if owner.kind != TIED and not set(owner.parameters).isdisjoint(bucket.parameters):
                for level in levels:
                    for later in levels_of(self.device, other):
                        yield from self._same_part(level, later)

    def of_bucket(self, number: int, bucket: Bucket) -> Iterator[Violation]:
        """Yield what is wrong with the reductions of a bucket."""
        parts = contributions(self.facts, self.device, bucket.parameters)
        levels = levels_of(self.device, number)
        groups = tuple(int(self.device.plan.tasks.group[level[0]]) for level in levels)
        if bucket.group == NONE:
            yield from self._over_ranks(bucket, ())
            return
        yield from self._through(bucket, parts, levels)
        if bucket.group in groups:
            yield from self._over_ranks(bucket, groups)
        elif groups:
            name = self.facts.plan.groups[bucket.group].name
            message = f"bucket {bucket.name} of rank {self.device.rank} is not reduced over its group {name}"
            names = self.device.names([task for level in levels for task in level.tolist()])
            yield Violation(rule="never-reduced", message=message, tasks=names)

    def _through(self, bucket: Bucket, parts: Parts, levels: list[Indices]) -> Iterator[Violation]:
        """Yield what a chain of levels does not take exactly once, in order."""
        where = f"bucket {bucket.name} of rank {self.device.rank}"
        if not levels:
            message = f"{where} ({some(bucket.parameters)}) is never reduced"
            yield Violation(rule="never-reduced", message=message, stages=(bucket.stage,))
        for level in levels:
            taken = self._taken(parts, level)
            yield from self._lost(bucket, parts, taken)
            yield from self._empty(where, level, taken)
            yield from self._early(parts, level, taken)
            parts = Parts(tasks=level, microbatches=self.device.plan.tasks.microbatch[level])

    def _taken(self, parts: Parts, level: Indices) -> Pairs:
        """Return which reduction of a level takes which part."""
        tags = self.device.plan.tasks.microbatch[level]
        part, place = _same_microbatch(parts.microbatches, tags)
        buffered = self._by_buffers(parts, (level, tags))
        kept = ~np.isin(place, buffered[1])
        part, place = np.append(part[kept], buffered[0]), np.append(place[kept], buffered[1])
        untagged = np.flatnonzero(tags == NONE)
        for one in untagged.tolist():
            left = np.setdiff1d(np.arange(len(parts.tasks)), part)
            if len(untagged) > 1:
                left = left[self.device.before(parts.tasks[left], np.full(len(left), level[one]))]
            part, place = np.append(part, left), np.append(place, np.full(len(left), one))
        return part, place

    def _by_buffers(self, parts: Parts, level: tuple[Indices, Indices]) -> Pairs:
        """Return what reductions of a microbatch find in the temporary buffers that they read."""
        table, persistent = self.device.plan.tasks, self.device.plan.buffers.persistent
        place_of = {
            buffer: place
            for place, (task, tag) in enumerate(zip(*(column.tolist() for column in level), strict=True))
            if tag != NONE
            for buffer in table.reads.row(task)
            if not persistent[buffer]
        }
        held = [
            (part, place_of[buffer])
            for part, task in enumerate(parts.tasks.tolist() if place_of else ())
            for buffer in dict.fromkeys((*table.allocates.row(task), *table.reads.row(task)))
            if buffer in place_of
        ]
        found = np.array(held, dtype=np.int64).reshape(len(held), 2)
        return found[:, 0], found[:, 1]

    def _lost(self, bucket: Bucket, parts: Parts, taken: Pairs) -> Iterator[Violation]:
        where = f"bucket {bucket.name} of rank {self.device.rank}"
        times = np.bincount(taken[0], minlength=len(parts.tasks))
        lost, twice = parts.tasks[times == 0], parts.tasks[times > 1]
        if len(lost):
            names = self.device.names(lost.tolist())
            message = (
                f"{where} ({some(bucket.parameters)}) is never reduced with the gradients of {_listed(names)}"
            )
            yield Violation(rule="never-reduced", message=message, tasks=names, stages=(bucket.stage,))
        if len(twice):
            names = self.device.names(twice.tolist())
            message = f"{where} is reduced with the gradients of {_listed(names)} more than once"
            yield Violation(rule="reduced-twice", message=message, tasks=names, stages=(bucket.stage,))

    def _empty(self, where: str, level: Indices, taken: Pairs) -> Iterator[Violation]:
        """Yield reductions for which others left nothing."""
        full = np.bincount(taken[1], minlength=len(level)) > 0
        for place in np.flatnonzero(~full).tolist():
            tags = self.device.plan.tasks.microbatch[level]
            same = np.flatnonzero(full & (tags == tags[place]))
            others = level[same if len(same) else np.flatnonzero(full)]
            names = self.device.names([*others[:1].tolist(), int(level[place])])
            message = f"{where} is reduced by {' and '.join(names)}: nothing is left for the last"
            yield Violation(rule="reduced-twice", message=message, tasks=names)

    def _early(self, parts: Parts, level: Indices, taken: Pairs) -> Iterator[Violation]:
        """Yield reductions that do not wait for what they take; of each stream the last such part."""
        givers, takers = parts.tasks[taken[0]], level[taken[1]]
        bad = ~self.device.before(givers, takers)
        streams = self.device.plan.tasks.stream[givers[bad]]
        loose = zip(takers[bad].tolist(), streams.tolist(), givers[bad].tolist(), strict=True)
        last = {(taker, stream): giver for taker, stream, giver in sorted(loose)}
        for (taker, _), giver in last.items():
            names = self.device.names((giver, taker))
            message = f"{names[1]} reduces gradients without waiting for {names[0]}"
            yield Violation(rule="missing-order", message=message, tasks=names)

    def _same_part(self, first: Indices, second: Indices) -> Iterator[Violation]:
        """Yield reductions of a bucket that do not wait for the sums over pipeline ranks in it."""
        tags = self.device.plan.tasks.microbatch
        for giver in first.tolist():
            for taker in second.tolist():
                related = tags[giver] == tags[taker] or NONE in {int(tags[giver]), int(tags[taker])}
                if related and not self.device.comes_before(giver, taker):
                    names = self.device.names((giver, taker))
                    message = f"{names[1]} uses gradients without waiting for {names[0]}"
                    yield Violation(rule="missing-order", message=message, tasks=names)

    def _over_ranks(self, bucket: Bucket, groups: tuple[int, ...]) -> Iterator[Violation]:
        """Yield replicas that the groups of a bucket sum twice or leave out."""
        mesh = self.device.plan.mesh or self.facts.plan.mesh
        where = f"bucket {bucket.name} of rank {self.device.rank}"
        sizes = self._set_sizes(groups)
        replicas = mesh.size("dp") * mesh.size("cp")
        wanted = {"dense": replicas, "sequence": replicas * mesh.size("tp")}
        held = {replicas * mesh.size("tp") // spread for spread in self._spreads(bucket)}
        complete = {wanted.get(bucket.kind, max(sizes & held or held or sizes, default=0))}
        if not sizes:
            rule, what = "reduced-twice", "sums the gradients of some replica more than once"
        elif sizes == complete:
            return
        elif groups:
            rule, what = "never-reduced", f"sums the gradients of {min(sizes)} of {max(complete)} replicas"
        else:
            rule, what = "never-reduced", "has replicas but no group to reduce it"
        yield Violation(rule=rule, message=f"{where} {what}", stages=(bucket.stage,))

    def _spreads(self, bucket: Bucket) -> set[int]:
        """Return over how many ranks tokens travel to the experts of a stage, by exchange."""
        table = self.device.plan.tasks
        tasks = (table.kind == TaskKind.ALL_TO_ALL) & (table.stage == bucket.stage)
        groups = [self.facts.plan.groups[group] for group in np.unique(table.group[tasks]).tolist()]
        return {group.size for group in groups if group.axis == EXPERT_AXIS}

    def _set_sizes(self, groups: tuple[int, ...]) -> frozenset[int]:
        """Return how many ranks' gradients the ranks of this device hold after all levels.

        Nothing where members of a group have something in common before it joins them.
        """
        if groups not in self.joined:
            mesh = self.facts.plan.mesh
            ranks = mesh.ranks(pp=self.device.rank) if mesh.size("pp") > 1 else mesh.ranks()
            levels = [self.facts.plan.groups[group].members for group in groups]
            self.joined[groups] = _joined_sizes(ranks, levels)
        return self.joined[groups]

    def _violation(self, rule: str, message: str, segments: Sequence[int]) -> Violation:
        stages = tuple(sorted({int(self.facts.stage_of_segment[segment]) for segment in segments}))
        return Violation(rule=rule, message=message, stages=stages)


def _same_microbatch(microbatches: Indices, tags: Indices) -> Pairs:
    """Return the pairs of a part and a reduction that name the same microbatch."""
    order = np.argsort(tags, kind="stable")
    starts = np.searchsorted(tags[order], microbatches, side="left")
    counts = np.searchsorted(tags[order], microbatches, side="right") - starts
    counts[microbatches == NONE] = 0
    part = np.repeat(np.arange(len(microbatches)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return part, order[np.repeat(starts, counts) + within]


def _joined_sizes(ranks: Sequence[int], levels: Sequence[Sequence[Sequence[int]]]) -> frozenset[int]:
    """Return the sizes of the ranks' sets after all levels; nothing where a level adds one set twice."""
    label = {rank: number for number, rank in enumerate(ranks)}
    sizes = dict.fromkeys(label.values(), 1)
    for members in levels:
        joined: dict[int, tuple[int, ...]] = {rank: (number,) for rank, number in label.items()}
        for member in members:
            numbers = tuple(sorted(label[rank] for rank in member if rank in label))
            if len(set(numbers)) < len(numbers):
                return frozenset()
            joined |= {rank: numbers for rank in member if rank in label}
        names = {numbers: name for name, numbers in enumerate(dict.fromkeys(joined.values()))}
        sizes = {name: sum(sizes[number] for number in numbers) for numbers, name in names.items()}
        label = {rank: names[numbers] for rank, numbers in joined.items()}
    return frozenset(sizes[number] for number in label.values())


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) <= len(names[:2]) else f"{shown}, ... {len(names)} tasks"
