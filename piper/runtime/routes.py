"""What every task of a pipeline rank reads and writes, derived once from the plan. Free of torch.

[Note: islands]
Autograd is cut where the plan has separate B (or BI) tasks: an island is the run of segments of one B.
Segments without a B (nothing in them needs a gradient) are islands of their own that nothing runs backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from cost_models.errors import check_invariant
from simulator.plan import NONE, DevicePlan, Plan, Task, TaskKind

Value = tuple[int, int]
"""(segment, output); segment -1 is the model input of that number."""


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
        backward: whether a B task exists.
        inputs: tensors from outside, in order of first use.
        outputs: tensors that others take, and the loss.
        parameters: names, in order of first use.
    """

    stage: int
    first: int
    last: int
    recomputed: bool
    backward: bool
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[str, ...]


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
    def islands(self) -> dict[tuple[int, int], tuple[Island, ...]]:
        """Return (stage, microbatch) -> its islands along the forward."""
        spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
        again: set[tuple[int, int, int]] = set()
        for task in self.tasks:
            key = (task.stage, task.microbatch)
            if task.kind in _THROUGH:
                spans.setdefault(key, []).append((task.first_segment, task.last_segment))
            elif task.kind is TaskKind.R:
                again.add((*key, task.first_segment))
        forwards = [task for task in self.tasks if task.kind is TaskKind.F]
        return {
            (task.stage, task.microbatch): tuple(
                self._island(task.stage, span, again=(task.stage, task.microbatch, span[0]) in again)
                for span in _with_gaps(spans.get((task.stage, task.microbatch), []), task)
            )
            for task in forwards
        }

    def island(self, task: Task) -> Island:
        """Return the island of a B, BI or R task."""
        for island in self.islands[task.stage, task.microbatch]:
            if island.first == task.first_segment:
                return island
        check_invariant(False, f"no F of {task.kind.name} at segment {task.first_segment}")
        raise KeyError

    def islands_of(self, task: Task) -> list[Island]:
        """Return the islands whose parameters get gradients from a B or BW task, last one first."""
        found = self.islands[task.stage, task.microbatch]
        inside = [island for island in found if task.first_segment <= island.first <= task.last_segment]
        return [island for island in reversed(inside) if island.backward]

    @cached_property
    def reads(self) -> Counter[tuple[int, Value]]:
        """Return (microbatch, value) -> how many times tasks of this rank read it in a step."""
        found: Counter[tuple[int, Value]] = Counter()
        for task in self.tasks:
            if task.kind is TaskKind.F:
                for island in self.islands[task.stage, task.microbatch]:
                    found.update((task.microbatch, value) for value in island.inputs)
            elif task.kind is TaskKind.R:
                found.update((task.microbatch, value) for value in self.island(task).inputs)
            elif task.kind is TaskKind.SEND_F:
                found.update((task.microbatch, value) for value in self.plan.edges[task.edge].values)
        return found

    @cached_property
    def uses(self) -> Counter[tuple[int, int, str]]:
        """Return (stage, microbatch, parameter) -> how many islands have a part of its gradient."""
        return Counter(
            (task.stage, task.microbatch, name)
            for task in self.tasks
            if task.kind in _GIVE_GRADIENTS
            for island in self.islands_of(task)
            for name in island.parameters
        )

    @cached_property
    def accumulation_order(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return parameter -> the (stage, microbatch) whose gradients are added to its sum, in order.

        [Note: summation tree]
        The parts of one microbatch and stage are summed first (last part first, as autograd does), the
        total is added when the last part is there. Then come tied holders, then replicas, in rank order.
        """
        left = Counter(self.uses)
        order: dict[str, list[tuple[int, int]]] = {}
        for task in self.tasks:
            if task.kind not in _GIVE_GRADIENTS:
                continue
            for name in [name for island in self.islands_of(task) for name in island.parameters]:
                key = (task.stage, task.microbatch, name)
                left[key] -= 1
                if left[key] == 0:
                    order.setdefault(name, []).append((task.stage, task.microbatch))
        return {name: tuple(pairs) for name, pairs in order.items()}

    @property
    def loss(self) -> Value:
        """Return where the loss comes out of the model."""
        return (len(self.plan.segments) - 1, 0)

    def requires_grad(self, value: Value) -> bool:
        """Return whether a gradient flows to the tensor."""
        segment, output = value
        return segment >= 0 and self.plan.segments[segment].outputs[output].requires_grad

    def _island(self, stage: int, span: tuple[int, int], *, again: bool) -> Island:
        first, last = span
        inside = range(first, last + 1)
        segments = self.plan.segments
        outputs = sorted({
            value
            for i, segment in enumerate(segments)
            for value in segment.inputs
            if value[0] in inside and i not in inside
        })  # fmt: skip
        if self.loss[0] in inside:
            outputs = sorted({*outputs, self.loss})
        return Island(
            stage=stage,
            first=first,
            last=last,
            recomputed=again,
            backward=self._has_backward(stage, first),
            inputs=tuple(dict.fromkeys(v for i in inside for v in segments[i].inputs if v[0] not in inside)),
            outputs=tuple(outputs),
            parameters=tuple(dict.fromkeys(name for i in inside for name in segments[i].parameters)),
        )

    @cached_property
    def _backward_starts(self) -> frozenset[tuple[int, int]]:
        return frozenset((t.stage, t.first_segment) for t in self.tasks if t.kind in _THROUGH)

    def _has_backward(self, stage: int, first: int) -> bool:
        return (stage, first) in self._backward_starts


def shard_range(plan: Plan, rank: int, bucket: int) -> tuple[int, int]:
    """Return the elements [start, end) of a bucket's flat buffer whose optimizer state `rank` owns."""
    facts = plan.device_plans[plan.pipeline_rank_of(rank)].buckets[bucket]
    share = facts.padded_numel // facts.shard_count
    if facts.shard_count == 1:
        return (0, share)
    position = plan.groups[facts.group].of(rank).index(rank)
    return (position * share, (position + 1) * share)


def offsets(plan: Plan, pipeline_rank: int, bucket: int) -> dict[str, tuple[int, int]]:
    """Return parameter -> its elements [start, end) in the flat buffer of a bucket."""
    sizes = {parameter.name: parameter.numel for parameter in plan.parameters}
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
    Of replicas that hold the same sum only the first counts; of a tied parameter only the first holder;
    of a sharded bucket each owner its shard.
    """
    home = plan.pipeline_rank_of(rank)
    facts = plan.device_plans[home].buckets[bucket]
    if facts.shard_count == 1 and plan.mesh.ranks(pp=home)[0] != rank:
        return ()
    start, end = shard_range(plan, rank, bucket)
    first = first_holder(plan)
    ranges: list[tuple[int, int]] = []
    for name, (low, high) in offsets(plan, home, bucket).items():
        low, high = max(low, start), min(high, end)
        if first[name] != home or low >= high:
            continue
        if ranges and ranges[-1][1] == low:
            ranges[-1] = (ranges[-1][0], high)
        else:
            ranges.append((low, high))
    return tuple(ranges)


def _with_gaps(spans: list[tuple[int, int]], task: Task) -> Iterator[tuple[int, int]]:
    """Fill the span of an F with the spans of its B tasks and, between them, single segments."""
    ends = dict(spans)
    check_invariant(NONE not in (task.first_segment, task.last_segment), "an F without segments")
    at = task.first_segment
    while at <= task.last_segment:
        end = ends.get(at, at)
        yield (at, end)
        at = end + 1
