"""What every task of a pipeline rank reads and writes, derived once from the plan. Free of torch.

[Note: islands]
Autograd is cut where the plan has separate tasks: an island is a run of segments that share their F, their B
(or BI) and their R. Segments without a B (nothing in them needs a gradient) are islands of their own that
nothing runs backward. A B or BI runs its islands from the last to the first.

[Note: copies]
Stages of one rank that take the same tensor from another rank receive it each on its own: the copies live and
die apart.

[Note: made again]
R tasks of one unit follow each other along the forward. What they make for each other is known by names of
its own; what the F of another unit kept for them, by its usual one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from cost_models.errors import check_invariant
from piper.runtime.borders import Borders, Exchange, Role, Value, is_exchange, made_again, pass_of
from piper.runtime.pieces import local_numel, piece_of
from simulator.plan import NONE, DevicePlan, Plan, Task, TaskKind

Copy = tuple[int, Value, int]
"""(microbatch, name, stage that received it for itself, or NONE)."""

_RUNS = (TaskKind.F, TaskKind.R, TaskKind.B, TaskKind.BI, TaskKind.BW)


_THROUGH = frozenset({TaskKind.B, TaskKind.BI})
"""Tasks that go back through an island."""
_GIVE_GRADIENTS = frozenset({TaskKind.B, TaskKind.BW})
"""Tasks that add to the gradients of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """Segments first..last of a stage, between which autograd is not cut.

    Args:
        stage, first, last: where.
        recomputed: F keeps nothing of it; an R task runs it again.
        remade: segments inside of which F keeps nothing; R tasks run them again, the graph stays.
        backward: whether a B task exists.
        inputs: names of tensors from outside, in order of first use ([Note: sides of a border]).
        inputs_again: their names for an R task.
        gradients: names of their gradients.
        outputs: tensors that others take, and the loss.
        parameters: names, in order of first use.
    """

    stage: int
    first: int
    last: int
    recomputed: bool
    remade: frozenset[int]
    backward: bool
    inputs: tuple[Value, ...]
    inputs_again: tuple[Value, ...]
    gradients: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One reduction on the way of a gradient.

    Args:
        members: sets of ranks, each summed in its order.
        per_run: each run of backward tasks on its own, or once per step.
    """

    members: tuple[tuple[int, ...], ...]
    per_run: bool


REDUCTIONS = frozenset({TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER})
_BRINGING = frozenset({TaskKind.ALL_GATHER, TaskKind.RELOAD})
_CUT_GRADIENTS, _CUT_PARAMETERS = 2, 3
"""ZeRO levels."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Look-ups for one pipeline rank.

    Args:
        plan: the whole plan.
        pipeline_rank: whose tasks.
    """

    plan: Plan
    pipeline_rank: int

    @property
    def device(self) -> DevicePlan:
        """Return the device plan."""
        return self.plan.device_plans[self.pipeline_rank]

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """Return all tasks in dispatch order."""
        return tuple(self.device.tasks)

    @cached_property
    def borders(self) -> Borders:
        """Return the borders of the plan's regions."""
        return Borders(plan=self.plan)

    @cached_property
    def exchanges(self) -> dict[tuple[int, int, int, int], Exchange]:
        """Return (kind, phase, part, group) -> what the exchange does."""
        return {_exchange_key(t): self.borders.exchange(t) for t in self.tasks if is_exchange(t)}

    def exchange(self, task: Task) -> Exchange:
        """Return what a collective within a microbatch does."""
        return self.exchanges[_exchange_key(task)]

    @cached_property
    def islands(self) -> dict[tuple[int, int], tuple[Island, ...]]:
        """Return (stage, microbatch) -> its islands along the forward."""
        spans: dict[tuple[int, int], dict[TaskKind, list[tuple[int, int]]]] = {}
        for task in self.tasks:
            if task.kind in _RUNS:
                here = spans.setdefault((task.stage, task.microbatch), {kind: [] for kind in _RUNS})
                here[task.kind].append((task.first_segment, task.last_segment))
        alike: dict[object, tuple[Island, ...]] = {}
        found = {}
        for place, here in spans.items():
            key = (place[0], *(tuple(here[kind]) for kind in _RUNS))
            if key not in alike:
                alike[key] = tuple(self._islands(place[0], here))
            found[place] = alike[key]
        return found

    def islands_of(self, task: Task) -> tuple[Island, ...]:
        """Return the islands that a compute task runs as a whole, along the forward."""
        found = tuple(
            island
            for island in self.islands[task.stage, task.microbatch]
            if task.first_segment <= island.first and island.last <= task.last_segment
        )
        inside = (
            task.kind is TaskKind.R and task.first_segment in self.island_at(task, task.first_segment).remade
        )
        check_invariant(bool(found) or inside, f"no F of {task.kind.name} at segment {task.first_segment}")
        return found

    def island_at(self, task: Task, segment: int) -> Island:
        """Return the island with a segment, of the stage and microbatch of a task."""
        islands = self.islands[task.stage, task.microbatch]
        return next(island for island in islands if island.first <= segment <= island.last)

    @cached_property
    def remade_kinds(self) -> dict[int, frozenset[str] | None]:
        """Return segment of which some operations are made again -> their kinds; None: all of them.

        All: where it is a core of attention on its own ([Note: core attention] of the compiler).
        """
        found: dict[int, frozenset[str] | None] = {}
        for task in self.tasks:
            if task.kind is TaskKind.R and task.work != NONE:
                kinds = frozenset(o.kind.value for o in self.plan.works[task.work].operations)
                for number in range(task.first_segment, task.last_segment + 1):
                    core = "CP" in dict(self.plan.segments[number].tags)
                    found[number] = None if core else kinds
        return found

    @cached_property
    def on_host(self) -> frozenset[tuple[int, int, int]]:
        """Return (stage, microbatch, first segment) of islands of which the host keeps something."""
        return frozenset(
            (task.stage, task.microbatch, self.island_at(task, task.part).first)
            for task in self.tasks
            if task.kind is TaskKind.OFFLOAD and task.microbatch != NONE and task.bucket == NONE
        )

    def islands_back(self, task: Task) -> tuple[Island, ...]:
        """Return the islands that a B, BI or BW task goes back through, the last one first."""
        return tuple(island for island in reversed(self.islands_of(task)) if island.backward)

    @cached_property
    def reads(self) -> Counter[Copy]:
        """Return how many times tasks of this rank read each copy of a boundary tensor in a step."""
        found: Counter[Copy] = Counter()
        for task in self.tasks:
            found.update(
                self.copy(task.microbatch, value, stage=task.stage) for value in self.values_read(task)
            )
        return found

    def copy(self, microbatch: int, value: Value, *, stage: int) -> Copy:
        """Return which copy of a tensor a stage reads [Note: copies]."""
        return (microbatch, value, stage if (stage, value) in self._own_copies else NONE)

    @cached_property
    def _own_copies(self) -> frozenset[tuple[int, Value]]:
        """Return (stage, value) of what several stages of this rank receive."""
        received = {
            (task.stage, self.borders.outside(value, phase=TaskKind.F))
            for task in self.tasks
            if task.kind is TaskKind.RECV_F
            for value in self.plan.edges[task.edge].values
        }
        times = Counter(value for _, value in received)
        return frozenset(place for place in received if times[place[1]] > 1)

    def values_read(self, task: Task) -> tuple[Value, ...]:
        """Return the names of the tensors that a task reads, with repetitions."""
        if task.kind is TaskKind.F:
            return tuple(value for island in self.islands_of(task) for value in island.inputs)
        if task.kind is TaskKind.R:
            return tuple(value for island in self.islands_of(task) for value in island.inputs_again)
        if task.kind is TaskKind.SEND_F:
            values = self.plan.edges[task.edge].values
            return tuple(self.borders.outside(value, phase=TaskKind.F) for value in values)
        return tuple(before for _, before, _ in self.turned(task)) if is_exchange(task) else ()

    def turned(self, task: Task) -> tuple[tuple[Value, Value, Value], ...]:
        """Return what an exchange turns in the forward: (segment, output), and its names before and behind.

        Of one that gathers again: what it reads, and the name under which F knew the result.
        """
        exchange = self.exchange(task)
        if exchange.role not in {Role.CROSS, Role.AGAIN}:
            return ()
        if exchange.role is Role.CROSS and pass_of(task) is TaskKind.B:
            return ()
        crossing = self.borders.crossing(exchange.border, phase=TaskKind.F).items()
        if pass_of(task) is not TaskKind.R:
            return tuple((v, before, (v[0], v[1], exchange.border, 0)) for v, (before, _) in crossing)
        found = []
        for value, (_, takers) in crossing:
            taker = next((t for t in takers if (task.stage, t) in self._unit), None)
            if taker is not None:
                path = self.borders.path(value[0], taker)
                before = self._name_again(value, path[: path.index(exchange.border)], taker)
                found.append((value, before, (value[0], value[1], exchange.border, 1)))
        return tuple(found)

    @cached_property
    def gathered_again(self) -> frozenset[Value]:
        """Return the names of what islands take in F and B reads from another gather."""
        return frozenset(
            behind
            for task in self.tasks
            if is_exchange(task) and self.exchange(task).role is Role.AGAIN
            for _, _, behind in self.turned(task)
        )

    @cached_property
    def last_reads_again(self) -> dict[tuple[int, int], tuple[Value, ...]]:
        """Return (stage, first segment) of an island -> what no B after its own reads from a gather."""
        last: dict[Value, tuple[int, int]] = {}
        for islands in self.islands.values():
            for island in islands:
                for value in self.gathered_again.intersection(island.inputs):
                    place = (island.stage, island.first)
                    last[value] = min(last.get(value, place), place)
        return {place: tuple(v for v, at in last.items() if at == place) for place in set(last.values())}

    @cached_property
    def uses(self) -> Counter[tuple[int, int, str]]:
        """Return (stage, microbatch, parameter) -> how many islands have a part of its gradient."""
        return Counter(
            (task.stage, task.microbatch, name)
            for task in self.tasks
            if task.kind in _GIVE_GRADIENTS
            for island in self.islands_back(task)
            for name in island.parameters
        )

    @cached_property
    def accumulation_runs(self) -> dict[str, tuple[tuple[tuple[int, int], ...], ...]]:
        """Return parameter -> runs of (stage, microbatch), in the order in which gradients are added.

        [Note: summation tree]
        The parts of one microbatch and stage are summed first (as their tasks follow each other), the
        total is added to its run when the last part is there. A run is what one reduction takes: the whole
        step, or neighbouring backward tasks. Then come tied holders, then replicas level by level, in rank
        order; runs that are reduced on their own are added up after that, in order.
        """
        left = Counter(self.uses)
        order: dict[str, dict[int, list[tuple[int, int]]]] = {}
        for task in self.tasks:
            if task.kind not in _GIVE_GRADIENTS:
                continue
            sums = {self.run_sums[buffer]: buffer for buffer in task.reads if buffer in self.run_sums}
            for name in [name for island in self.islands_back(task) for name in island.parameters]:
                key = (task.stage, task.microbatch, name)
                left[key] -= 1
                if left[key] == 0:
                    run = sums.get(self.bucket_of.get(name, NONE), NONE)
                    runs = order.setdefault(name, {})
                    runs.setdefault(run, []).append((task.stage, task.microbatch))
        return {name: tuple(map(tuple, runs.values())) for name, runs in order.items()}

    @cached_property
    def part_order(self) -> dict[tuple[int, int, str], tuple[int, ...]]:
        """Return (stage, microbatch, parameter) -> islands, by first segment, in the order of their parts."""
        order: dict[tuple[int, int, str], list[int]] = {}
        for task in self.tasks:
            for island in self.islands_back(task) if task.kind in _GIVE_GRADIENTS else ():
                for name in island.parameters:
                    order.setdefault((task.stage, task.microbatch, name), []).append(island.first)
        return {use: tuple(firsts) for use, firsts in order.items()}

    @cached_property
    def accumulation_order(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return parameter -> the (stage, microbatch) whose gradients are added to its sum, in order."""
        return {name: tuple(chain(*runs)) for name, runs in self.accumulation_runs.items()}

    @cached_property
    def bucket_of(self) -> dict[str, int]:
        """Return trained parameter -> the bucket that owns it."""
        return {
            name: bucket
            for bucket in owned_buckets(self.plan, self.pipeline_rank)
            for name in self.device.buckets[bucket].parameters
        }

    @cached_property
    def brought(self) -> dict[int, int]:
        """Return buffer -> the bucket whose parameters are brought there before tasks that use them."""
        return {
            buffer: task.bucket
            for task in self.tasks
            if task.bucket != NONE and task.phase != NONE and task.kind in _BRINGING
            for buffer in task.allocates
        }

    @cached_property
    def optimizer_on_host(self) -> frozenset[int]:
        """Return the buckets whose optimizer state waits on the host."""
        return frozenset(t.bucket for t in self._offloads if t.phase == NONE)

    @cached_property
    def parameters_on_host(self) -> frozenset[int]:
        """Return the buckets whose parameters wait on the host."""
        return frozenset(t.bucket for t in self._offloads if t.phase != NONE)

    @property
    def _offloads(self) -> list[Task]:
        return [task for task in self.tasks if task.kind is TaskKind.OFFLOAD and task.bucket != NONE]

    @cached_property
    def run_sums(self) -> dict[int, int]:
        """Return buffer -> the bucket whose gradients are summed there until they are reduced."""
        return {
            buffer: task.bucket
            for task in self.tasks
            if task.bucket != NONE and task.phase != NONE and task.kind in REDUCTIONS
            for buffer in task.reads
        }

    def levels(self, bucket: int) -> tuple[Level, ...]:
        """Return the sums over replicas of a bucket's gradients, in order."""
        found = {
            (task.kind, task.group, task.phase != NONE): None
            for task in self.tasks
            if task.bucket == bucket and task.kind in REDUCTIONS
        }
        return tuple(
            Level(members=self.plan.groups[group].members, per_run=per_run) for _, group, per_run in found
        )

    @property
    def loss(self) -> tuple[int, int]:
        """Return where the loss comes out of the model."""
        return (len(self.plan.segments) - 1, 0)

    @cached_property
    def gradient_parts(self) -> Counter[Value]:
        """Return name of a gradient -> how many parts of it are made for each microbatch."""
        found: Counter[Value] = Counter()
        seen: set[object] = set()
        for (stage, _), islands in self.islands.items():
            for island in (i for i in islands if i.backward and (stage, i.first) not in seen):
                seen.add((stage, island.first))
                pairs = zip(island.inputs, island.gradients, strict=True)
                found.update(name for value, name in pairs if self.requires_grad(value))
        for task in self.tasks:
            if is_exchange(task) and pass_of(task) is TaskKind.B and task.microbatch == 0:
                exchange = self.exchange(task)
                if exchange.role is Role.CROSS:
                    crossing = self.borders.crossing(exchange.border, phase=TaskKind.B)
                    found.update(before for before, _ in crossing.values())
            elif task.kind is TaskKind.RECV_B and task.microbatch == 0:
                values = self.plan.edges[task.edge].grad_values
                found.update(self.borders.outside(value, phase=TaskKind.B) for value in values)
        return found

    def is_passed_on(self, island: Island, value: Value) -> bool:
        """Return whether one graph would do for an island and the one of its stage that made a tensor."""
        stage, producer = island.stage, value[0]
        if island.recomputed or producer < 0 or self.plan.segments[producer].stage != stage:
            return False
        return not self._is_recomputed[producer]

    @cached_property
    def _is_recomputed(self) -> dict[int, bool]:
        """Return segment of this rank -> whether F keeps nothing of it."""
        return {
            number: island.recomputed
            for islands in self.islands.values()
            for island in islands
            for number in range(island.first, island.last + 1)
        }

    def requires_grad(self, value: Value) -> bool:
        """Return whether a gradient flows to the tensor."""
        segment, output = value[:2]
        return segment >= 0 and self.plan.segments[segment].outputs[output].requires_grad

    def _islands(self, stage: int, spans: dict[TaskKind, list[tuple[int, int]]]) -> Iterator[Island]:
        again, backward = (
            {i for kind in kinds for first, last in spans[kind] for i in range(first, last + 1)}
            for kinds in ((TaskKind.R,), _THROUGH)
        )
        remade = {
            i
            for kind in _THROUGH
            for first, last in spans[kind]
            if not again.issuperset(range(first, last + 1))
            for i in again.intersection(range(first, last + 1))
        }
        cuts = [
            span
            for kind, found in spans.items()
            for span in found
            if kind is not TaskKind.R or span[0] not in remade
        ]
        starts = {first for first, _ in cuts}
        for begin, end in sorted(spans[TaskKind.F]):
            at = begin
            while at <= end:
                last = at
                while at in backward and last < end and last + 1 in backward and last + 1 not in starts:
                    last += 1
                ended = any(at <= stop < last for _, stop in cuts)
                check_invariant(not ended, f"a task ends inside of segments {at} to {last}")
                inside = frozenset(remade.intersection(range(at, last + 1)))
                island = self._island(stage, (at, last), again=at in again - remade, backward=at in backward)
                yield replace(island, remade=inside)
                at = last + 1

    def _island(self, stage: int, span: tuple[int, int], *, again: bool, backward: bool) -> Island:
        first, last = span
        inside = range(first, last + 1)
        segments = self.plan.segments
        outputs: list[Value] = sorted({
            value
            for i, segment in enumerate(segments)
            for value in segment.inputs
            if value[0] in inside and i not in inside
        })  # fmt: skip
        if self.loss[0] in inside:
            outputs = sorted({*outputs, self.loss})
        taken: dict[Value, int] = {
            v: i for i in reversed(inside) for v in reversed(segments[i].inputs) if v[0] not in inside
        }
        taken = dict(reversed(taken.items()))
        return Island(
            stage=stage,
            first=first,
            last=last,
            recomputed=again,
            remade=frozenset(),
            backward=backward,
            inputs=tuple(self.borders.taken(v, i, phase=TaskKind.F) for v, i in taken.items()),
            inputs_again=tuple(
                self._name_again(v, self.borders.path(v[0], i), i) if again else v for v, i in taken.items()
            ),
            gradients=tuple(
                self.borders.taken(v, i, phase=TaskKind.B) if self.requires_grad(v) else v
                for v, i in taken.items()
            ),
            outputs=tuple(outputs),
            parameters=tuple(dict.fromkeys(name for i in inside for name in segments[i].parameters)),
        )

    def _name_again(self, value: Value, crossed: tuple[int, ...], taker: int) -> Value:
        """Return the name of a tensor for an R task of segment `taker`, behind some borders."""
        stage = self.plan.segments[taker].stage
        unit = self._unit.get((stage, taker))
        remade = unit is not None and self._unit.get((stage, value[0])) == unit
        name = made_again(value) if remade else value
        for border in crossed:
            if self.borders.turns(border, value, TaskKind.F):
                again = int((stage, border) in self._exchanged_again)
                name = (value[0], value[1], border, again)
        return name

    @cached_property
    def _exchanged_again(self) -> frozenset[tuple[int, int]]:
        """Return the (stage, border) at which R tasks have exchanges."""
        found = ((t, self.exchange(t)) for t in self.tasks if is_exchange(t) and pass_of(t) is TaskKind.R)
        return frozenset((task.stage, exchange.border) for task, exchange in found)

    @cached_property
    def _unit(self) -> dict[tuple[int, int], int]:
        """Return (stage, segment) -> which run of R tasks makes it again [Note: made again]."""
        found: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        units = 0
        for task in self.tasks:
            if task.kind is not TaskKind.R:
                continue
            place = (task.stage, task.microbatch)
            if task.first_segment < last.get(place, -1) or place not in last:
                units += 1
            last[place] = task.first_segment
            for segment in range(task.first_segment, task.last_segment + 1):
                found.setdefault((task.stage, segment), units)
        return found


def _exchange_key(task: Task) -> tuple[int, int, int, int]:
    return int(task.kind), task.phase, task.part, task.group


def shard_range(plan: Plan, rank: int, bucket: int) -> tuple[int, int]:
    """Return the elements [start, end) of a bucket's flat buffer whose optimizer state `rank` owns."""
    facts = plan.device_plans[plan.pipeline_rank_of(rank)].buckets[bucket]
    share = facts.padded_numel // facts.shard_count
    if facts.shard_count == 1:
        return (0, share)
    position = plan.groups[facts.group].of(rank).index(rank)
    return (position * share, (position + 1) * share)


def summed_range(plan: Plan, rank: int, bucket: int) -> tuple[int, int]:
    """Return the elements of a bucket whose gradients `rank` sums over the step: its shard, or all."""
    facts = plan.device_plans[plan.pipeline_rank_of(rank)].buckets[bucket]
    return shard_range(plan, rank, bucket) if facts.zero >= _CUT_GRADIENTS else (0, facts.padded_numel)


def held_range(plan: Plan, rank: int, bucket: int) -> tuple[int, int]:
    """Return the elements of a bucket that `rank` holds between their uses: its shard, or all."""
    facts = plan.device_plans[plan.pipeline_rank_of(rank)].buckets[bucket]
    return shard_range(plan, rank, bucket) if facts.zero >= _CUT_PARAMETERS else (0, facts.padded_numel)


def offsets(plan: Plan, pipeline_rank: int, bucket: int) -> dict[str, tuple[int, int]]:
    """Return parameter -> its elements [start, end) in the flat buffer of a bucket."""
    sizes = local_numel(plan)
    found: dict[str, tuple[int, int]] = {}
    start = 0
    for name in plan.device_plans[pipeline_rank].buckets[bucket].parameters:
        found[name] = (start, start + sizes[name])
        start += sizes[name]
    return found


def owned_buckets(plan: Plan, pipeline_rank: int) -> tuple[int, ...]:
    """Return the buckets that own parameters: all but those that only name tied ones."""
    buckets = plan.device_plans[pipeline_rank].buckets
    return tuple(i for i, bucket in enumerate(buckets) if bucket.kind != "tied")


def first_holder(plan: Plan) -> dict[str, int]:
    """Return parameter -> the lowest pipeline rank that holds it."""
    found: dict[str, int] = {}
    for rank in range(plan.num_pipeline_ranks):
        for bucket in owned_buckets(plan, rank):
            for name in plan.device_plans[rank].buckets[bucket].parameters:
                found.setdefault(name, rank)
    return found


def counted_ranges(plan: Plan, rank: int, bucket: int) -> tuple[tuple[int, int], ...]:
    """Return the elements of a bucket whose squares `rank` adds to the global gradient norm.

    [Note: each logical element once]
    Of ranks that hold the same piece of a parameter, and of it the same shard, only the first counts; of a
    tied parameter only the first holder.
    """
    home = plan.pipeline_rank_of(rank)
    start, end = shard_range(plan, rank, bucket)
    alike = [r for r in plan.mesh.ranks(pp=home) if shard_range(plan, r, bucket) == (start, end)]
    first = first_holder(plan)
    ranges: list[tuple[int, int]] = []
    for name, (low, high) in offsets(plan, home, bucket).items():
        low, high = max(low, start), min(high, end)
        piece = piece_of(plan, rank, name)
        lowest = next(other for other in alike if piece_of(plan, other, name) == piece)
        if first[name] != home or lowest != rank or low >= high:
            continue
        if ranges and ranges[-1][1] == low:
            ranges[-1] = (ranges[-1][0], high)
        else:
            ranges.append((low, high))
    return tuple(ranges)
