"""From a captured model and a cut to the first graph: one F and one B per segment, no devices yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from piper.graph.captured import CapturedModel, CapturedSegment
from piper.graph.graph import Graph, GraphEdge, Node
from simulator.plan import StateDtypes, TaskKind


def build_graph(
    models: Sequence[CapturedModel],
    stage_of_segment: Sequence[int],
    *,
    replica_batch: int,
    dtype: str,
    optimizer: str,
    clip_grad_norm: float | None,
    states: StateDtypes | None = None,
    gathers_overlap: bool = False,
    activation_factor: float = 1.0,
    framework_bytes: int = 0,
    gradients_copied: bool = False,
    sums_in_products: bool = False,
) -> Graph:
    """Return the graph of one microbatch of one replica: F along the data, B against it.

    A segment none of whose outputs needs a gradient gets no B.
    """
    segments = models[0].segments
    nodes: list[Node] = []
    edges: list[GraphEdge] = []
    for i, segment in enumerate(segments):
        tags = _tags(segment, stage_of_segment[i])
        forward = Node(
            uid=f"F.{i}",
            kind=TaskKind.F,
            tags=tags,
            stage=stage_of_segment[i],
            first_segment=i,
            last_segment=i,
        )
        nodes.append(forward)
        edges += [GraphEdge(f"F.{source}", f"F.{i}") for source, _ in segment.inputs if source >= 0]
        if _needs_grad(segment):
            nodes.append(replace(forward, uid=f"B.{i}", kind=TaskKind.B))
            edges.append(GraphEdge(f"F.{i}", f"B.{i}"))
            edges += [
                GraphEdge(f"B.{i}", f"B.{source}")
                for source, output in segment.inputs
                if source >= 0 and segments[source].outputs[output].requires_grad
            ]
    return Graph(
        models=tuple(models),
        stage_of_segment=tuple(stage_of_segment),
        nodes=tuple(nodes),
        edges=tuple(dict.fromkeys(edges)),
        clip_grad_norm=clip_grad_norm,
        replica_batch=replica_batch,
        dtype=dtype,
        optimizer=optimizer,
        states=states,
        gathers_overlap=gathers_overlap,
        activation_factor=activation_factor,
        framework_bytes=framework_bytes,
        gradients_copied=gradients_copied,
        sums_in_products=sums_in_products,
    )


def _needs_grad(segment: CapturedSegment) -> bool:
    return any(output.requires_grad for output in segment.outputs)


def _tags(segment: CapturedSegment, stage: int) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((dict(segment.tags) | {"PP": stage}).items()))
