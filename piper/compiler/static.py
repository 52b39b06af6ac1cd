"""What one rank holds through all steps, and what the messages of its buckets weigh (DESIGN 3)."""

from __future__ import annotations

from cost_models.ops import DTYPE_BYTES, kept_dtype
from piper.compiler.liveness import Buffer
from piper.graph import Graph, Node, Shares
from piper.graph.buckets import CUT_GRADIENTS, CUT_PARAMETERS, offloading_of, rule_of
from simulator.plan import HOST_COPY_KINDS, Bucket, MemoryClass, TaskKind


def static_buffers(graph: Graph, pipeline_rank: int) -> list[Buffer]:
    """Return what lives through all steps: parameters, gradients, optimizer state (DESIGN 3), tables."""
    element, gradient = DTYPE_BYTES[kept_dtype(graph.dtype)], DTYPE_BYTES[graph.state_dtypes.gradient]
    gradient += DTYPE_BYTES["fp32"] if graph.gradients_copied else 0
    found: list[Buffer] = []

    def away(what: str, bucket: Bucket) -> bool:
        return offloading_of(graph, bucket, what) is not None

    for bucket in (b for b in graph.buckets[pipeline_rank] if b.kind != "tied"):
        shard = bucket.padded_numel // bucket.shard_count
        gradients = (shard if bucket.zero >= CUT_GRADIENTS else bucket.padded_numel) * gradient
        for memory_class, size in (
            (MemoryClass.PARAMETERS, 0 if away("params", bucket) else parameter_bytes(graph, bucket)),
            (MemoryClass.GRADIENTS, gradients),
            (MemoryClass.OPTIMIZER, 0 if away("optimizer", bucket) else optimizer_bytes(graph, bucket)),
        ):
            found.append(_buffer(f"{memory_class.name.lower()} of stage {bucket.stage}", size, memory_class))
    frozen = _frozen_numel(graph, pipeline_rank) * element
    found.append(_buffer("frozen parameters", frozen, MemoryClass.PARAMETERS))
    found.append(_buffer("buffers of the framework", graph.framework_bytes, MemoryClass.WORKSPACE))
    found.append(_buffer("buffers of the module", graph.model.buffer_bytes, MemoryClass.WORKSPACE))
    return [buffer for buffer in found if buffer.size_bytes]


def parameter_bytes(graph: Graph, bucket: Bucket) -> int:
    """Return the parameters of a bucket that a rank keeps between their uses."""
    parts = bucket.shard_count if bucket.zero >= CUT_PARAMETERS else 1
    return bucket.padded_numel // parts * graph.state_dtypes.parameter_bytes(bucket.zero)


def optimizer_bytes(graph: Graph, bucket: Bucket) -> int:
    """Return the optimizer state of a bucket on one rank."""
    state = graph.state_dtypes.optimizer_bytes(graph.optimizer, bucket.zero)
    return bucket.padded_numel // bucket.shard_count * state


def _buffer(label: str, size_bytes: int, memory_class: MemoryClass) -> Buffer:
    return Buffer(size_bytes=size_bytes, memory_class=memory_class, label=label, touches=())


def bucket_message_bytes(graph: Graph, bucket: Bucket, node: Node) -> int:
    """Return the bytes of a bucket's collective, as its kind counts them (`simulator.plan.Task`)."""
    if node.kind in HOST_COPY_KINDS:
        return (parameter_bytes if node.moves == "params" else optimizer_bytes)(graph, bucket)
    if node.kind is TaskKind.ALL_GATHER:
        return bucket.padded_numel * DTYPE_BYTES[graph.state_dtypes.gather]
    reduced = bucket.padded_numel
    if node.kind is TaskKind.ALL_REDUCE and bucket.kind != "tied":
        reduced //= bucket.shard_count
    return reduced * DTYPE_BYTES[rule_of(graph, bucket).reduce_dtype or graph.state_dtypes.reduce]


def _frozen_numel(graph: Graph, pipeline_rank: int) -> int:
    used = {
        name
        for stage in graph.stages_of_rank(pipeline_rank)
        for segment in graph.segments_of_stage(stage)
        for name in graph.model.segments[segment].parameters
    }
    frozen = [p.name for p in graph.model.parameters if p.name in used and not p.trainable]
    return Shares(graph=graph).local_numel(frozen) if frozen else 0
