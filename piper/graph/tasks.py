"""Rows of filters -> tasks of one pipeline rank: what the slots of an `order` mean in a graph.

[Note: slots]
A slot is a list of filters. A filter means every task that it matches; these must be whole stages, and no
other task may lie on a path between two of them. Several tasks of one filter follow each other, microbatch
by microbatch along the data; the tasks of different filters of a slot may overlap, first with first.

[Note: split backward]
A filter with PASS BI or BW splits the backward of the stages and microbatches that it means. Each of them
needs one BI and, not earlier, one BW in the same row, and no B; the others keep B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from piper.errors import StrategyError
from piper.graph.directive import require_tags
from piper.graph.filters import Filter
from piper.graph.graph import Graph
from simulator.plan import TaskKind, TaskName

Slot = tuple[TaskName, ...]
_HALVES = frozenset({"BI", "BW"})
_LETTERS = ("F", "B", "BI", "BW")


def row_of_filters(
    graph: Graph, slots: Sequence[Sequence[Filter]], *, where: str, dimension: str = "MB"
) -> tuple[Slot, ...]:
    """Return the tasks of one row of filters.

    Raises: StrategyError for a filter that matches nothing, a part of a stage, or what is not convex; for
        tasks of several pipeline ranks; for a task that stands twice; for halves without each other.
    """
    for which in (which for slot in slots for which in slot):
        require_tags(graph, which, where=where, field="order.filters", dimensions=(dimension,))
    halved = {
        key
        for slot in slots
        for which in slot
        if which.passes is not None and which.passes & _HALVES
        for key in _keys(graph, which, "B", dimension=dimension, where=where)
    }
    row: list[Slot] = []
    for slot in slots:
        meant = [_tasks(graph, which, halved, dimension=dimension, where=where) for which in slot]
        row += [tuple(t for t in together if t is not None) for together in zip_longest(*meant)]
    _check_home(graph, row, where=where)
    _check_once(row, where=where)
    _check_halves(row, where=where)
    return tuple(part for slot in row for part in _halves_apart(slot))


def stage_graph(graph: Graph) -> dict[tuple[str, int], tuple[tuple[str, int], ...]]:
    """Return which (pass, stage) directly follows which along the data of one microbatch; pass F or B."""
    found: dict[tuple[str, int], dict[tuple[str, int], None]] = {}
    for edge in graph.edges:
        ends = []
        for uid in (edge.source, edge.target):
            node = graph.node[uid]
            ends.append((node.kind.name, node.stage))
        if ends[0] != ends[1] and all(kind in {"F", "B"} for kind, _ in ends):
            found.setdefault(ends[0], {})[ends[1]] = None
    return {source: tuple(sorted(targets)) for source, targets in found.items()}


def _tasks(
    graph: Graph, which: Filter, halved: set[tuple[int, int]], *, dimension: str, where: str
) -> list[TaskName]:
    """Return the tasks that one filter means, in the order in which they run."""
    wanted = which.passes or frozenset(_LETTERS)
    found: list[TaskName] = []
    if "F" in wanted:
        keys = _keys(graph, which, "F", dimension=dimension, where=where)
        found += [_name("F", key) for key in keys]
    for key in _keys(graph, which, "B", dimension=dimension, where=where):
        letters = ("BI", "BW") if key in halved else ("B",)
        found += [_name(letter, key) for letter in letters if letter in wanted]
    if not found:
        raise _nothing(graph, which, halved, where=where)
    successors = stage_graph(graph)
    if len(found) > 1:
        _check_convex(found, successors, which, where=where)
    depth = _depths(successors)
    return sorted(found, key=lambda t: (t.microbatch, depth.get(_place(t), 0), t.kind is TaskKind.BW))


def _keys(graph: Graph, which: Filter, letter: str, *, dimension: str, where: str) -> list[tuple[int, int]]:
    """Return (stage, microbatch) of what a filter means in one pass, its letters of the pass apart."""
    index = which.condition(dimension)
    microbatches = [
        m for m in range(len(graph.micro_batch_sizes)) if index is None or index.holds({dimension: m})
    ]
    tags = which.without(dimension)
    stages: list[int] = []
    for stage in range(graph.num_stages):
        nodes = [n for n in graph.nodes if n.stage == stage and n.kind.name == letter]
        hits = sum(tags.matches_tags(dict(node.tags)) for node in nodes)
        if hits and hits < len(nodes):
            raise StrategyError(
                where=where, field="order.filters", value=which.source,
                rule=f"means a part of stage {stage}: rows order whole stages",
                fix=f'write {{"PP": {stage}, ...}} without other tags',
            )  # fmt: skip
        if hits:
            stages.append(stage)
    return [(stage, m) for stage in stages for m in microbatches]


def _name(letter: str, key: tuple[int, int]) -> TaskName:
    return TaskName(kind=TaskKind[letter], stage=key[0], microbatch=key[1])


def _place(task: TaskName) -> tuple[str, int]:
    return ("F" if task.kind is TaskKind.F else "B", task.stage)


def _nothing(graph: Graph, which: Filter, halved: set[tuple[int, int]], *, where: str) -> StrategyError:
    stages, microbatches = graph.num_stages, len(graph.micro_batch_sizes)
    rule, fix = (
        "matches no task of this strategy",
        f"there are {stages} stages and {microbatches} microbatches",
    )
    if which.passes == frozenset({"B"}) and halved:
        rule, fix = "is split into BI and BW by this row", "name B, or BI and BW, of a stage and microbatch"
    return StrategyError(where=where, field="order.filters", value=which.source, rule=rule, fix=fix)


def _check_convex(
    found: Sequence[TaskName],
    successors: dict[tuple[str, int], tuple[tuple[str, int], ...]],
    which: Filter,
    *,
    where: str,
) -> None:
    """Raise when a task outside lies on a path between two tasks of one microbatch."""
    places: dict[int, set[tuple[str, int]]] = {}
    for task in found:
        places.setdefault(task.microbatch, set()).add(_place(task))
    for microbatch, inside in places.items():
        seen: dict[tuple[str, int], tuple[str, int]] = {}
        front = [(n, n) for p in sorted(inside) for n in successors.get(p, ()) if n not in inside]
        while front:
            place, exit_ = front.pop()
            if place in inside:
                raise StrategyError(
                    where=where, field="order.filters", value=which.source,
                    rule=f"is not convex: {exit_[1]}{exit_[0]}{microbatch} must run between its tasks",
                    fix="name these tasks in slots of their own",
                )  # fmt: skip
            if place not in seen:
                seen[place] = exit_
                front += [(n, exit_) for n in successors.get(place, ())]


def _depths(successors: dict[tuple[str, int], tuple[tuple[str, int], ...]]) -> dict[tuple[str, int], int]:
    """Return the longest path to each place: tasks of one microbatch in the order of their data."""
    incoming = Counter(target for targets in successors.values() for target in targets)
    depth = dict.fromkeys(sorted({*successors, *incoming}), 0)
    ready = [place for place in depth if not incoming[place]]
    while ready:
        place = ready.pop()
        for target in successors.get(place, ()):
            depth[target] = max(depth[target], depth[place] + 1)
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    return depth


def _check_home(graph: Graph, row: Iterable[Slot], *, where: str) -> None:
    homes: dict[int, TaskName] = {}
    for task in (task for slot in row for task in slot):
        homes.setdefault(graph.pipeline_rank_of_stage[task.stage], task)
    if len(homes) > 1:
        shown = " and ".join(f"{task.code} of rank {rank}" for rank, task in sorted(homes.items())[:2])
        raise StrategyError(
            where=where, field="order.filters", value=f"pipeline ranks {sorted(homes)}",
            rule=f"crosses device placement: {shown}", fix="write one order directive per pipeline rank",
        )  # fmt: skip


def _check_once(row: Iterable[Slot], *, where: str) -> None:
    counts = Counter(task for slot in row for task in slot)
    twice = next((task for task, count in counts.items() if count > 1), None)
    if twice is not None:
        raise StrategyError(
            where=where, field="order.filters", value=twice.code, rule=f"stands {counts[twice]} times",
            fix="keep one of them",
        )  # fmt: skip


def _check_halves(row: Iterable[Slot], *, where: str) -> None:
    position = {task: i for i, task in enumerate(task for slot in row for task in slot)}
    for task, place in position.items():
        if task.kind not in {TaskKind.BI, TaskKind.BW}:
            continue
        inputs = TaskName(kind=TaskKind.BI, stage=task.stage, microbatch=task.microbatch)
        weights = TaskName(kind=TaskKind.BW, stage=task.stage, microbatch=task.microbatch)
        other = weights if task == inputs else inputs
        if other not in position:
            raise StrategyError(
                where=where, field="order.filters", value=task.code,
                rule=f"needs one {other.code} in the same order", fix=f"add {other.code}, or name B instead",
            )  # fmt: skip
        if task == weights and place < position[inputs]:
            raise StrategyError(
                where=where, field="order.filters", value=task.code, rule=f"stands before its {inputs.code}",
                fix=f"list {inputs.code} first",
            )  # fmt: skip


def _halves_apart(slot: Slot) -> list[Slot]:
    """Return a slot without the BW whose BI is in it, and that BW right behind it."""
    late = [
        t
        for t in slot
        if t.kind is TaskKind.BW
        and TaskName(kind=TaskKind.BI, stage=t.stage, microbatch=t.microbatch) in slot
    ]
    first = tuple(t for t in slot if t not in late)
    return [part for part in (first, tuple(late)) if part]
