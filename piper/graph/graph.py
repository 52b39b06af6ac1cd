"""`Graph`: the global training graph of one step, as templates over the microbatches. Immutable.

[Note: templates]
There is one node per (piece of the model, pass), not per microbatch: `per_microbatch` nodes run once
for each microbatch, the others once per step. An edge between two nodes of the same sort means the same
microbatch; from a `per_microbatch` node to a per-step node it means after *all* microbatches; an edge of
kind `PREVIOUS_STEP` leads from a node of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from cost_models.errors import check_invariant
from piper.graph.captured import CapturedModel
from piper.graph.facts import (
    ExpertSharding,
    Offloading,
    Recomputation,
    Replication,
    SequenceSharding,
    StageMesh,
    StreamRule,
    TensorSharding,
)
from simulator.plan import COLLECTIVE_KINDS, NONE, Bucket, Edge, Group, Mesh, StateDtypes, TaskKind, TaskName


class EdgeKind(StrEnum):
    """Why the target comes after the source."""

    DATA = "data"
    TEMPORAL = "temporal"
    PREVIOUS_STEP = "previous_step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A template of tasks.

    Args:
        uid: unique and speaking: "F.3", "B.0-9", "SEND_F.e1".
        kind: as in the plan.
        tags: tag name -> index, sorted by name; "PP" is the stage.
        stage: stage it belongs to, or NONE.
        pipeline_rank: where it runs, or NONE (not placed yet).
        stream: name of the stream it runs on.
        per_microbatch: once per microbatch, or once per step.
        first_segment, last_segment: compute: what it covers.
        recomputed: compute F and B: its activations are thrown away after F and made again before B.
        edge: transfers: index in `Graph.crossings`.
        peer: transfers: pipeline rank at the other end.
        group: collectives: name of the rank group.
        bucket: bucket name.
        phase: exchanges, and collectives of a bucket per microbatch: what they serve: F, R, or B (BI too).
        values: exchanges: the boundary tensors that they turn into others, as (segment, output).
        enters: exchanges: they stand before a region (else behind one).
        region: exchanges: first and last segment of the region; copies of activations: of what they move.
        pieces: exchanges between stages: from how many replicas of the other stage tensors are gathered.
        prefetch: copies to the device: how many compute tasks before their use they may start.
        moves: copies of a bucket: "optimizer" or "params".
    """

    uid: str
    kind: TaskKind
    tags: tuple[tuple[str, int], ...] = ()
    stage: int = NONE
    pipeline_rank: int = NONE
    stream: str = "compute"
    per_microbatch: bool = True
    first_segment: int = NONE
    last_segment: int = NONE
    recomputed: bool = False
    edge: int = NONE
    peer: int = NONE
    group: str = ""
    bucket: str = ""
    phase: TaskKind | None = None
    values: tuple[tuple[int, int], ...] = ()
    enters: bool = True
    region: tuple[int, int] = (NONE, NONE)
    pieces: int = 1
    prefetch: int = 0
    moves: str = ""

    @property
    def is_exchange(self) -> bool:
        """Return whether it is a collective inside a pass."""
        return self.phase is not None and not self.bucket and self.kind in COLLECTIVE_KINDS

    @property
    def is_regrouping(self) -> bool:
        """Return whether it is an exchange of what came from a stage with another mesh."""
        return self.is_exchange and self.group.startswith("pp")

    @property
    def pass_kind(self) -> TaskKind:
        """Return the pass of a per-microbatch node: F, B (for BI too) or BW."""
        return _PASS_OF[self.kind if self.phase is None else self.phase]


_PASS_OF = {
    TaskKind.F: TaskKind.F,
    TaskKind.SEND_F: TaskKind.F,
    TaskKind.RECV_F: TaskKind.F,
    TaskKind.R: TaskKind.B,
    TaskKind.B: TaskKind.B,
    TaskKind.BI: TaskKind.B,
    TaskKind.SEND_B: TaskKind.B,
    TaskKind.RECV_B: TaskKind.B,
    TaskKind.BW: TaskKind.BW,
}


@dataclass(frozen=True, slots=True, order=True)
class GraphEdge:
    """`target` comes after `source`."""

    source: str
    target: str
    kind: EdgeKind = EdgeKind.DATA


Rows = tuple[tuple[tuple[TaskName, ...], ...], ...]
"""Per pipeline rank its slots; a slot is one task, or several that may overlap."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes and edges, with the facts that directives state and passes read.

    Args:
        models: the captured model, at each distinct microbatch size (the first size leads), those of stages
            with a mesh of their own included.
        stage_of_segment: the stage of every segment, after the cut.
        nodes, edges: the templates.
        mesh: axes over the ranks (None before `mesh`).
        replica_batch: sequences per step of one replica.
        micro_batch_sizes: sequences of each microbatch of a replica (empty before `split`).
        replications, tensor_shardings, expert_shardings, sequence_shardings, recomputations, offloadings,
            stream_rules, stage_meshes: what directives said (`piper.graph.facts`).
        transfer_stream: name that rules for the streams of transfers use ("": "pp").
        crossings: tensors between stages on different pipeline ranks (after the transfers pass).
        buckets: pipeline rank -> buckets in order (after the reductions pass).
        groups: the ranks that run collectives together (`piper.graph.rank_groups`), as passes need them.
        rows: order of compute tasks per pipeline rank; until the order is completed, some or all tasks of
            a rank may be missing.
        row_lines: file and line of each row ("": not stated).
        row_borders: where rows divide stages (`piper.graph.parts`): a pass (F, B or BW; a border of BW is one
            of B too) and the segment with which a part begins.
        mesh_line: file and line of the mesh.
        schedule: name of the order.
        clip_grad_norm: largest global gradient norm, or None.
        dtype, optimizer: of the training.
        states: dtypes of gradients, masters, moments and messages, or None: `StateDtypes.of(dtype)`.
        gathers_overlap: a forward waits for updated parameters (ZeRO-1, 2) bucket by bucket, not for all of
            its stage.
        gradients_copied: gradients are held once more in fp32.
        sums_in_products: products that make gradients of weights add them to the sum over microbatches.
        framework_bytes: buffers that the framework holds on every device.
        activation_factor: bytes that are kept from F to B, over those that the operations are known to keep.
    """

    models: tuple[CapturedModel, ...]
    stage_of_segment: tuple[int, ...]
    nodes: tuple[Node, ...]
    edges: tuple[GraphEdge, ...]
    replica_batch: int
    mesh: Mesh | None = None
    micro_batch_sizes: tuple[int, ...] = ()
    replications: tuple[Replication, ...] = ()
    tensor_shardings: tuple[TensorSharding, ...] = ()
    expert_shardings: tuple[ExpertSharding, ...] = ()
    sequence_shardings: tuple[SequenceSharding, ...] = ()
    recomputations: tuple[Recomputation, ...] = ()
    offloadings: tuple[Offloading, ...] = ()
    stream_rules: tuple[StreamRule, ...] = ()
    stage_meshes: tuple[StageMesh, ...] = ()
    transfer_stream: str = ""
    crossings: tuple[Edge, ...] = ()
    buckets: tuple[tuple[Bucket, ...], ...] = ()
    groups: tuple[Group, ...] = ()
    rows: Rows = ()
    row_lines: tuple[str, ...] = ()
    row_borders: tuple[tuple[TaskKind, int], ...] = ()
    mesh_line: str = "strategy"
    schedule: str = ""
    clip_grad_norm: float | None = None
    dtype: str = "bf16"
    optimizer: str = "adamw"
    states: StateDtypes | None = None
    gathers_overlap: bool = False
    activation_factor: float = 1.0
    framework_bytes: int = 0
    gradients_copied: bool = False
    sums_in_products: bool = False

    @property
    def state_dtypes(self) -> StateDtypes:
        """Return the dtypes of gradients, masters, moments and messages."""
        return self.states or StateDtypes.of(self.dtype)

    @property
    def model(self) -> CapturedModel:
        """Return the model at the leading microbatch size."""
        return self.models[0]

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return max(self.stage_of_segment) + 1

    @property
    def placed_mesh(self) -> Mesh:
        """Return the mesh, which `mesh` must have stated."""
        check_invariant(self.mesh is not None, "the graph has no mesh")
        return self.mesh or Mesh(axes=())

    @property
    def num_pipeline_ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return self.placed_mesh.size("pp")

    def axis_size(self, axis: str, *, stage: int) -> int:
        """Return the size of a mesh axis for the ranks of a stage."""
        own = self._stage_mesh_of.get(stage)
        return self.placed_mesh.size(axis) if own is None else dict(own.axes).get(axis, 1)

    def local_batch(self, size: int, *, stage: int) -> int:
        """Return the sequences of a microbatch on a replica of a stage; of the job's mesh it has `size`."""
        return size * self.placed_mesh.size("dp") // self.axis_size("dp", stage=stage)

    def stage_mesh(self, stage: int) -> StageMesh | None:
        """Return what is stated about the ranks of one stage alone, or None."""
        return self._stage_mesh_of.get(stage)

    @cached_property
    def _stage_mesh_of(self) -> dict[int, StageMesh]:
        return {self.stage_of_segment[i]: fact for fact in self.stage_meshes for i in fact.segments}

    @cached_property
    def node(self) -> dict[str, Node]:
        """Return nodes by uid."""
        return {node.uid: node for node in self.nodes}

    @cached_property
    def incoming(self) -> dict[str, tuple[GraphEdge, ...]]:
        """Return the edges into each node."""
        return _by(self.edges, lambda edge: edge.target)

    @cached_property
    def outgoing(self) -> dict[str, tuple[GraphEdge, ...]]:
        """Return the edges out of each node."""
        return _by(self.edges, lambda edge: edge.source)

    @cached_property
    def pipeline_rank_of_stage(self) -> dict[int, int]:
        """Return where each stage lives; its first home, where it has two."""
        return {stage: ranks[0] for stage, ranks in self.pipeline_ranks_of_stage.items()}

    @cached_property
    def pipeline_ranks_of_stage(self) -> dict[int, tuple[int, ...]]:
        """Return the pipeline ranks that hold each stage, its first home first."""
        found: dict[int, dict[int, None]] = {}
        for node in self.nodes:
            if node.kind is TaskKind.F:
                found.setdefault(node.stage, {})[node.pipeline_rank] = None
        return {stage: tuple(ranks) for stage, ranks in found.items()}

    def stages_of_rank(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the stages of one pipeline rank, rising."""
        homes = self.pipeline_ranks_of_stage
        return tuple(sorted(stage for stage, ranks in homes.items() if pipeline_rank in ranks))

    def segments_of_stage(self, stage: int) -> tuple[int, ...]:
        """Return the segments of one stage, rising."""
        return self._segments_of_stage.get(stage, ())

    @cached_property
    def _segments_of_stage(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for segment, stage in enumerate(self.stage_of_segment):
            found.setdefault(stage, []).append(segment)
        return {stage: tuple(segments) for stage, segments in found.items()}

    def rewrite(
        self, *, drop: Iterable[str] = (), add: Iterable[Node] = (), connect: Iterable[GraphEdge] = ()
    ) -> Graph:
        """Return a graph without the nodes `drop` (and their edges), with nodes and edges added."""
        gone = frozenset(drop)
        nodes = (*(n for n in self.nodes if n.uid not in gone), *add)
        kept = (e for e in self.edges if e.source not in gone and e.target not in gone)
        return replace(self, nodes=nodes, edges=tuple(dict.fromkeys((*kept, *connect))))

    def map_nodes(self, changed: dict[str, Node]) -> Graph:
        """Return a graph in which nodes are replaced by uid."""
        return replace(self, nodes=tuple(changed.get(n.uid, n) for n in self.nodes))


class Rewrite(Protocol):
    """A directive or a pass: a frozen dataclass that turns a graph into a graph."""

    def apply(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the argument is not changed."""


def copied_uid(uid: str) -> str:
    """Return the uid of the node that stands for `uid` at the second home of its stage."""
    return f"{uid}'"


def _by(edges: Iterable[GraphEdge], key: Callable[[GraphEdge], str]) -> dict[str, tuple[GraphEdge, ...]]:
    found: dict[str, list[GraphEdge]] = {}
    for edge in edges:
        found.setdefault(key(edge), []).append(edge)
    return {uid: tuple(listed) for uid, listed in found.items()}
