"""What one rank holds through all steps, and what the messages of its buckets weigh (DESIGN 3)."""

from __future__ import annotations

from cost_models.ops import DTYPE_BYTES
from piper.compiler.liveness import Buffer
from piper.graph import Graph, Node, Replication
from simulator.plan import Bucket, MemoryClass, TaskKind

SHARDED_GRADIENTS, SHARDED_PARAMETERS = 2, 3
"""ZeRO levels from which on these are cut."""

GRADIENT_BYTES = 4
"""Main gradients are fp32 (DESIGN 3)."""

OPTIMIZER_BYTES = {("adamw", 4): 8, ("adamw", 2): 12, ("sgd", 4): 0, ("sgd", 2): 4}
"""(optimizer, bytes of a parameter) -> state: fp32 moments, fp32 master of a 2-byte parameter (DESIGN 3)."""


def static_buffers(graph: Graph, pipeline_rank: int) -> list[Buffer]:
    """Return what lives through all steps: parameters, gradients, optimizer state (DESIGN 3), tables."""
    element = DTYPE_BYTES[graph.dtype]
    state = OPTIMIZER_BYTES[graph.optimizer, element]
    found: list[Buffer] = []
    for bucket in (b for b in graph.buckets[pipeline_rank] if b.kind != "tied"):
        shard = bucket.padded_numel // bucket.shard_count
        for memory_class, size in (
            (
                MemoryClass.PARAMETERS,
                (shard if bucket.zero >= SHARDED_PARAMETERS else bucket.padded_numel) * element,
            ),
            (
                MemoryClass.GRADIENTS,
                (shard if bucket.zero >= SHARDED_GRADIENTS else bucket.padded_numel) * GRADIENT_BYTES,
            ),
            (MemoryClass.OPTIMIZER, shard * state),
        ):
            found.append(_buffer(f"{memory_class.name.lower()} of stage {bucket.stage}", size, memory_class))
    frozen = _frozen_numel(graph, pipeline_rank) * element
    found.append(_buffer("frozen parameters", frozen, MemoryClass.PARAMETERS))
    found.append(_buffer("buffers of the module", graph.model.buffer_bytes, MemoryClass.WORKSPACE))
    return [buffer for buffer in found if buffer.size_bytes]


def _buffer(label: str, size_bytes: int, memory_class: MemoryClass) -> Buffer:
    return Buffer(size_bytes=size_bytes, memory_class=memory_class, label=label, touches=())


def replication_of(graph: Graph, bucket: Bucket) -> Replication:
    """Return the fact about a bucket's stage; the default where nothing replicates it."""
    segments = graph.segments_of_stage(bucket.stage)
    return next((r for r in graph.replications if segments[0] in r.segments), Replication(segments=segments))


def bucket_message_bytes(graph: Graph, bucket: Bucket, node: Node) -> int:
    """Return the bytes of a bucket's collective, as its kind counts them (`simulator.plan.Task`)."""
    if node.kind is TaskKind.ALL_GATHER:
        return bucket.padded_numel * DTYPE_BYTES[graph.dtype]
    reduced = bucket.padded_numel
    if node.kind is TaskKind.ALL_REDUCE and bucket.kind != "tied":
        reduced //= bucket.shard_count
    return reduced * GRADIENT_BYTES


def _frozen_numel(graph: Graph, pipeline_rank: int) -> int:
    used = {
        name
        for stage in graph.stages_of_rank(pipeline_rank)
        for segment in graph.segments_of_stage(stage)
        for name in graph.model.segments[segment].parameters
    }
    return sum(p.numel for p in graph.model.parameters if p.name in used and not p.trainable)
