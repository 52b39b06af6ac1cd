"""Random graphs: facts of every kind over small transformers, stages anywhere, rows in any order that works.

All that is drawn is legal, so that a violation in the plan, or a hang, is a fault of ours. To add a fact: a
line in `_facts`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from piper.graph import (
    ExpertSharding,
    Graph,
    Offloading,
    Recomputation,
    Replication,
    SequenceSharding,
    StageMesh,
    TensorSharding,
)
from piper.graph.captured import CapturedModel
from piper.graph.graph import Rows
from simulator.plan import TaskKind, TaskName
from tests.facts import with_tied_head
from tests.graphs import placed, transformer


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Where stages and microbatches are.

    Args:
        homes: by stage its pipeline rank.
        microbatches: of a replica.
        both_ways: odd microbatches run at the second homes of stages: those of the mirrored ranks.
    """

    homes: tuple[int, ...]
    microbatches: int
    both_ways: bool

    def home(self, stage: int, microbatch: int) -> int:
        """Return where a microbatch of a stage runs."""
        first = self.homes[stage]
        return max(self.homes) - first if self.both_ways and microbatch % 2 else first


def random_graph(seed: int) -> Graph:
    """Return the graph of a seed, always the same, before the passes."""
    choose = random.Random(seed)
    experts = choose.random() < 0.3
    model = transformer(layers=choose.randint(1, 3), experts=experts)
    if choose.random() < 0.3:
        model = with_tied_head(model)
    shape, ranks = _shape(choose)
    cuts = sorted(choose.sample(range(1, len(model.segments)), len(shape.homes) - 1))
    stages = [sum(i >= cut for cut in cuts) for i in range(len(model.segments))]
    sizes = {"tp": (1, 1, 2), "cp": (1, 1, 2), "dp": (1, 2, 4), "pp": (ranks,)}
    axes = {name: choose.choice(known) for name, known in sizes.items()}
    graph = placed(
        model, stages=stages, axes=axes, microbatches=shape.microbatches, rows=_rows(choose, shape, ranks),
        **dict(_facts(choose, model, axes)),
    )  # fmt: skip
    nodes = tuple(replace(node, pipeline_rank=shape.homes[node.stage]) for node in graph.nodes)
    graph = replace(graph, nodes=nodes, clip_grad_norm=choose.choice([None, 1.0]))
    return graph if shape.both_ways else _with_stage_meshes(choose, graph, experts=experts)


def _with_stage_meshes(choose: random.Random, graph: Graph, *, experts: bool) -> Graph:
    """Give some pipeline ranks twice the tp and half of the replicas, where model and facts allow it."""
    tp, cp, dp, ranks = (graph.placed_mesh.size(axis) for axis in ("tp", "cp", "dp", "pp"))
    turned = any(fact.method == "all_to_all" for fact in graph.sequence_shardings)
    shards = {fact.shard_ranks or 1 for fact in graph.replications}
    shared = [name for segment in graph.model.segments for name in segment.parameters]
    if tp == 1 or dp == 1 or ranks == 1 or turned or len(set(shared)) < len(shared):
        return graph
    if any(dp * cp // 2 % count for count in shards) or choose.random() < 0.3:
        return graph
    chosen = choose.sample(range(ranks), choose.randint(1, ranks - 1))
    homes = graph.pipeline_rank_of_stage
    segments = tuple(i for i, stage in enumerate(graph.stage_of_segment) if homes[stage] in chosen)
    if not any(set(segments) & set(fact.segments) for fact in graph.tensor_shardings):
        return graph
    mesh = StageMesh(segments=segments, axes=(("tp", 2 * tp), ("cp", cp), ("dp", dp // 2)))
    layers = graph.model.facts.layers
    models = (graph.model, transformer(layers=layers, experts=experts, micro_batch=2))
    return replace(graph, models=models, stage_meshes=(mesh,))


def _shape(choose: random.Random) -> tuple[Shape, int]:
    if choose.random() < 0.15:
        return Shape(homes=(0, 1), microbatches=4, both_ways=True), 2
    ranks = choose.choice([1, 2, 3])
    count = ranks * choose.choice([1, 1, 2])
    loop = tuple(stage % ranks for stage in range(count))
    valley = tuple(stage if stage < ranks else 2 * ranks - 1 - stage for stage in range(count))
    anyhow = tuple(choose.randrange(ranks) for _ in range(count))
    homes = choose.choice([loop, valley, anyhow])
    everywhere = set(homes) == set(range(ranks))
    return Shape(
        homes=homes if everywhere else loop, microbatches=choose.randint(1, 4), both_ways=False
    ), ranks


def _rows(choose: random.Random, shape: Shape, ranks: int) -> Rows:
    """Return rows of tasks drawn one after another among those that could run next, some backwards split."""
    left = list(_tasks(choose, shape))
    done: set[TaskName] = set()
    rows: list[list[tuple[TaskName, ...]]] = [[] for _ in range(ranks)]
    while left:
        task = choose.choice([one for one in left if _can_run(one, done, stages=len(shape.homes))])
        left.remove(task)
        done.add(task)
        rows[shape.home(task.stage, task.microbatch)].append((task,))
    return tuple(map(tuple, rows))


def _tasks(choose: random.Random, shape: Shape) -> Iterator[TaskName]:
    for microbatch in range(shape.microbatches):
        for stage in range(len(shape.homes)):
            halves = (TaskKind.BI, TaskKind.BW)
            for kind in (TaskKind.F, *(halves if choose.random() < 0.4 else (TaskKind.B,))):
                yield TaskName(kind=kind, stage=stage, microbatch=microbatch)


def _can_run(task: TaskName, done: set[TaskName], *, stages: int) -> bool:
    def ran(stage: int, *kinds: TaskKind) -> bool:
        return any(TaskName(kind=k, stage=stage, microbatch=task.microbatch) in done for k in kinds)

    if task.kind is TaskKind.F:
        return task.stage == 0 or ran(task.stage - 1, TaskKind.F)
    if task.kind is TaskKind.BW:
        return ran(task.stage, TaskKind.BI)
    behind = task.stage == stages - 1 or ran(task.stage + 1, TaskKind.B, TaskKind.BI)
    return behind and ran(task.stage, TaskKind.F)


def _facts(
    choose: random.Random, model: CapturedModel, axes: dict[str, int]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    tags = [dict(segment.tags) for segment in model.segments]

    def tagged(name: str) -> tuple[int, ...]:
        return tuple(i for i, tag in enumerate(tags) if name in tag)

    ranks = axes["tp"] * axes["cp"] * axes["dp"]
    if axes["tp"] > 1:
        whole = bool(tagged("EP")) or choose.random() < 0.6
        fact = TensorSharding(
            segments=tagged("TP"), sequence_parallel=whole, asynchronous=choose.random() < 0.3
        )
        yield "tensor_shardings", (fact,)
    if axes["cp"] > 1:
        method, even = choose.choice(["ring", "all_to_all"]), choose.random() < 0.5
        yield "sequence_shardings", (SequenceSharding(segments=tagged("CP"), method=method, balanced=even),)
    degrees = [(e, t) for e in (1, 2, 4) for t in (1, 2) if e * t > 1 and ranks % (e * t) == 0]
    if tagged("EP") and degrees:
        degree, tensor_degree = choose.choice(degrees)
        yield "expert_shardings", (
            ExpertSharding(
                segments=tagged("EP"), degree=degree, tensor_degree=tensor_degree,
                imbalance=choose.choice([1.0, 1.3]),
            ),
        )  # fmt: skip
    replication = _replication(choose, tuple(range(len(tags))), replicas=axes["dp"] * axes["cp"])
    yield "replications", (replication,)
    if choose.random() < 0.5:
        units = tuple(i for i in tagged("LAYER") if tags[i]["LAYER"] % 2 == 0)
        selective = Recomputation(segments=units, mode="selective", kinds=("attention", "norm"))
        yield "recomputations", (choose.choice([Recomputation(segments=units), selective]),)
    offloaded = [
        Offloading(segments=segments, what=what, prefetch=choose.randint(0, 3))
        for what in ("activations", "optimizer", "params")
        for segments in [tuple(i for i in range(len(tags)) if choose.random() < 0.7)]
        if segments and choose.random() < 0.2 and not (what == "params" and replication.zero == 3)
    ]
    yield "offloadings", tuple(offloaded)


def _replication(choose: random.Random, segments: tuple[int, ...], *, replicas: int) -> Replication:
    zero = choose.choice([0, 1, 2, 3])
    shards = [None, *(n for n in (1, 2, 4) if replicas % n == 0)] if zero else [None]
    return Replication(
        segments=segments, zero=zero, shard_ranks=choose.choice(shards),
        bucket_bytes=choose.choice([None, None, 1200]), reduce_every=choose.choice(["step", "microbatch"]),
        prefetch=choose.choice([None, 0, 2]), reshard=choose.random() < 0.7,
        reduce_stream=choose.choice(["dp", "red"]), gather_stream=choose.choice(["dp", "blue"]),
        reduce_dtype=choose.choice(["fp32", "bf16"]),
    )  # fmt: skip
