"""Emission: the templates of every pipeline rank and its order row become dispatch lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from piper.compiler.blocks import LANES, RECEIVE
from piper.compiler.chains import add_chains
from piper.compiler.columns import Numbers
from piper.compiler.emission import Emission
from piper.compiler.microbatches import add_microbatches
from piper.compiler.receives import posted
from piper.compiler.static import static_buffers
from piper.compiler.step_end import add_step_end
from piper.compiler.stream_rules import stream_rules
from piper.graph import EdgeKind, Graph
from simulator.plan import MATCHING_SEND, NONE, DevicePlan, Mesh

COMPUTE_STREAM = 0
_NOBODY = np.array([NONE], dtype=np.int64)


def emit(emissions: Sequence[Emission]) -> tuple[DevicePlan, ...]:
    """Return the device plans of all pipeline ranks.

    Args:
        emissions: one per pipeline rank, fresh.
    """
    for emission in emissions:
        statics = static_buffers(emission.graph, emission.pipeline_rank)
        emission.add_buffers(statics, microbatches=_NOBODY, persistent=True)
        add_microbatches(emission)
    return tuple(_device_plan(emission, emissions) for emission in emissions)


def _device_plan(emission: Emission, emissions: Sequence[Emission]) -> DevicePlan:
    add_chains(emission)
    add_step_end(emission)
    keys = emission.columns.keys()
    rank = np.zeros(len(keys), dtype=np.int64)
    _post_receives(emission, emissions, keys=keys, rank=rank)
    _wait_for_previous_step(emission, keys)
    return DevicePlan(
        pipeline_rank=emission.pipeline_rank,
        stages=emission.graph.stages_of_rank(emission.pipeline_rank),
        streams=tuple(emission.templates.streams),
        buffers=emission.buffer_table(),
        buckets=emission.buckets,
        tasks=emission.columns.table(keys, rank),
        stream_rules=stream_rules(emission.graph, emission.templates.streams),
        mesh=_own_mesh(emission.graph, emission.pipeline_rank),
    )


def _own_mesh(graph: Graph, pipeline_rank: int) -> Mesh | None:
    """Return how the ranks of a pipeline rank are arranged, where it is not as the job's mesh says."""
    stage, axes = graph.stages_of_rank(pipeline_rank)[0], ("tp", "cp", "dp")
    mesh = Mesh(axes=tuple((axis, graph.axis_size(axis, stage=stage)) for axis in axes))
    return None if all(graph.placed_mesh.size(axis) == mesh.size(axis) for axis in axes) else mesh


def _post_receives(
    emission: Emission, emissions: Sequence[Emission], *, keys: Numbers, rank: Numbers
) -> None:
    """Set where receives are dispatched ([Note: receive gating]): keys, and ranks among equal keys."""
    first = emission.layout.first_compute
    last_of_step = _last_compute(emission, keys)
    for (kind, peer), received in emission.received.items():
        sent = emissions[peer].sent[MATCHING_SEND[kind], emission.pipeline_rank]
        tasks, slots = posted(received, sent, num_microbatches=len(emission.sizes))
        keys[tasks] = first[slots] * LANES + RECEIVE
        rank[tasks] = np.arange(len(tasks))
        gated = first[slots] > 0
        emission.columns.link("waits", tasks[gated], emission.compute_task[first[slots[gated]] - 1])
        free = tasks[~gated]
        emission.columns.link("previous_step_waits", free, np.full(len(free), last_of_step, dtype=np.int64))


def _last_compute(emission: Emission, keys: Numbers) -> int:
    """Return the last task of the compute stream in a step."""
    tasks = np.flatnonzero(emission.columns.scalar("stream") == COMPUTE_STREAM)
    return int(tasks[np.lexsort((tasks, keys[tasks]))[-1]])


def _wait_for_previous_step(emission: Emission, keys: Numbers) -> None:
    """Let the first task of each template wait for what it needs of the step before."""
    for uid, instances in emission.instances.items():
        edges = emission.graph.incoming.get(uid, ())
        sources = {edge.source for edge in edges if edge.kind is EdgeKind.PREVIOUS_STEP}
        if not sources:
            continue
        tasks = np.concatenate([found.tasks for found in instances])
        first = tasks[np.argmin(keys[tasks])]
        waits = np.sort(np.concatenate([found.tasks for s in sources for found in emission.instances[s]]))
        emission.columns.link("previous_step_waits", np.full(len(waits), first, dtype=np.int64), waits)
