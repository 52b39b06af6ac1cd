"""Exchange tensors where they enter and leave regions that are cut (tensor, expert, context parallelism)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from cost_models.ops import OpKind
from piper.graph.cuttable import require_cuttable, require_used_axes
from piper.graph.facts import ExpertSharding, SequenceSharding, TensorSharding
from piper.graph.graph import Graph, GraphEdge, Node
from piper.graph.rank_groups import (
    context_group,
    expert_group,
    on_stream,
    regrouping_group,
    tensor_group,
)
from piper.graph.regrouping import Regrouping, regrouping, require_stage_meshes
from piper.graph.shares import Shares, gathers_features, normalises_cut_features
from piper.graph.streams import TRANSFERS
from simulator.plan import Group, TaskKind

Value = tuple[int, int]
"""(segment, output)."""

F, B = TaskKind.F, TaskKind.B


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertExchanges:
    """Put a collective on every edge over the border of a region; one per border and pass.

    [Note: exchanges]
    What crosses a border, and what turns it (F on entering, F on leaving | B on entering, B on leaving):
      tp, sequence_parallel   all-gather, reduce-scatter | reduce-scatter, all-gather
      tp                      nothing, all-reduce        | all-reduce, nothing
      ep; cp all_to_all       all-to-all                 | all-to-all
    All tensors that cross a border in one direction travel together; those that pass the region by
    (residuals) do not wait for them. Only tensors with a microbatch dimension are exchanged, in B only
    gradients. cp ring: keys and values go round while attention computes, so the ring shift stands beside it.

    Where a region normalises over its cut features (a loss over a cut vocabulary), ranks agree on maximum,
    sum and the wanted entry of each row behind F: one all-reduce (Shoeybi et al. 2019, section 3). Where it
    gathers these features before the loss (`cross_entropy: gathered`), an all-gather of them stands there.

    With sequence_parallel a region's gathered inputs are not kept for the backward: they are gathered again,
    while B (or BI) computes, for the gradients of parameters (Korthikanti et al. 2022, section 4.2.2).
    Between stages with unlike meshes, the receiving side regroups what arrives (`piper.graph.regrouping`).

    An `asynchronous` region computes piece by piece while its pieces travel, so all its collectives stand
    beside it (Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition"), unless
    a row divides its computation: other tasks may then come between.

    rewrite: F{before} -> F{region} -> F{after}
          -> F{before} -> all-gather -> F{region} -> reduce-scatter -> F{after}   (tp, sequence_parallel)
             F{before} -> F{attention} -> F{after}
          -> F{before} -> {F{attention}, ring shift} -> F{after}                  (cp ring)
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with exchanges; raises StrategyError where a region cannot be cut as stated."""
        require_used_axes(graph)
        shares = Shares(graph=graph)
        require_stage_meshes(shares)
        if not (graph.tensor_shardings or graph.expert_shardings or graph.sequence_shardings):
            return graph
        require_cuttable(graph, shares)
        return _Rewiring(graph=graph, shares=shares).rewired()


@dataclass(frozen=True, slots=True)
class _Border:
    """One side of a region: `axis` "tp", "ep" or "cp", its first and last segment.

    Of a stage whose neighbour has another mesh: axis "pp", and how the tensors that arrive are regrouped.
    """

    axis: str
    region: tuple[int, int]
    enters: bool
    regrouping: Regrouping | None = None


@dataclass(kw_only=True)
class _Rewiring:
    graph: Graph
    shares: Shares
    exchanges: dict[tuple[_Border, TaskKind], Node] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    _known: dict[object, Group] = field(default_factory=dict)

    def rewired(self) -> Graph:
        """Return the graph with edges through exchanges and beside ring shifts."""
        edges: dict[GraphEdge, None] = {}
        for value, consumer in self._flows:
            through = self._borders(value[0], consumer)
            edges |= dict.fromkeys(self._path(value, consumer, through, phase=F))
            if self._has_gradient(value) and f"B.{consumer}" in self.graph.node:
                edges |= dict.fromkeys(self._path(value, consumer, through[::-1], phase=B))
        kept = [edge for edge in self.graph.edges if self._turns_round(edge)]
        graph = replace(self.graph, edges=(*kept, *self._in_pieces(edges)))
        graph = graph.rewrite(add=self.exchanges.values())
        graph = self._normalised(self._gathered_again(self._rung(graph)))
        return replace(graph, groups=(*graph.groups, *self.groups.values()))

    @cached_property
    def _flows(self) -> list[tuple[Value, int]]:
        """Every boundary tensor with a segment that takes it."""
        segments = self.graph.model.segments
        return [(v, i) for i, segment in enumerate(segments) for v in segment.inputs if v[0] >= 0]

    def _turns_round(self, edge: GraphEdge) -> bool:
        """Return whether an edge leads from a forward to a backward."""
        return self.graph.node[edge.source].pass_kind is not self.graph.node[edge.target].pass_kind

    def _has_gradient(self, value: Value) -> bool:
        return self.graph.model.segments[value[0]].outputs[value[1]].requires_grad

    def _borders(self, producer: int, consumer: int) -> list[_Border]:
        """Return the borders that lie between two segments, in the order in which data crosses them."""
        out = [_Border(axis, region, False) for axis, region in self._around(producer)]
        into = [_Border(axis, region, True) for axis, region in self._around(consumer)]
        shared = {(border.axis, border.region) for border in out}
        shared &= {(border.axis, border.region) for border in into}
        between = self._stage_borders(producer, consumer)
        return [b for b in (*out[::-1], *between, *into) if (b.axis, b.region) not in shared]

    def _stage_borders(self, producer: int, consumer: int) -> list[_Border]:
        """Return the borders between the stages of two segments at which tensors are regrouped."""
        of = self.graph.stage_of_segment
        source, target = of[producer], of[consumer]
        if not self.graph.stage_meshes or source == target:
            return []
        down = regrouping(self.shares, source=source, target=target)
        up = regrouping(self.shares, source=target, target=source)
        return [
            *([] if up is None else [_Border("pp", self._span(source), False, up)]),
            *([] if down is None else [_Border("pp", self._span(target), True, down)]),
        ]

    def _span(self, stage: int) -> tuple[int, int]:
        segments = self.graph.segments_of_stage(stage)
        return segments[0], segments[-1]

    def _around(self, segment: int) -> list[tuple[str, tuple[int, int]]]:
        """Return the regions with exchanges at their borders around a segment, outermost first."""
        found = [(axis, self.shares.region(axis, segment)) for axis in ("tp", "ep")]
        sequence = self.shares.sequence_of.get(segment)
        if sequence is not None and sequence.method == "all_to_all":
            found.append(("cp", self.shares.region("cp", segment)))
        return [(axis, region) for axis, region in found if region is not None]

    def _path(
        self, value: Value, consumer: int, through: Iterable[_Border], *, phase: TaskKind
    ) -> Iterator[GraphEdge]:
        """Yield the edges of one boundary tensor in one pass, through the exchanges that turn it."""
        source, target = f"{phase.name}.{value[0]}", f"{phase.name}.{consumer}"
        if phase is B:
            source, target = target, source
        turned = self.graph.model.segments[value[0]].outputs[value[1]].batch_dim is not None
        sources = [source]
        for border in through if turned else ():
            kind = self._kind(border, phase)
            if kind is None:
                continue
            node = self._exchange(border, value, phase=phase, kind=kind)
            beside, inwards = self._is_beside(border, phase), _inwards(border, phase)
            yield from (GraphEdge(uid, node.uid) for uid in sources)
            if not beside:
                sources = [node.uid]
            elif not inwards:
                sources.append(node.uid)
        yield from (GraphEdge(uid, target) for uid in sources)

    def _is_beside(self, border: _Border, phase: TaskKind) -> bool:
        """Return whether the exchanges of a region run while it computes."""
        first, last = border.region
        asynchronous = border.axis == "tp" and self.shares.tensor_of[first].asynchronous
        return asynchronous and not any(
            kind is phase and first < i <= last for kind, i in self.graph.row_borders
        )

    def _in_pieces(self, edges: Iterable[GraphEdge]) -> list[GraphEdge]:
        """Return edges in which the last exchange of an asynchronous region does not wait for its compute.

        A region that only takes tensors, or only gives some, waits for its exchanges as others do.
        """
        first_of: dict[str, str] = {}
        alone: list[GraphEdge] = []
        for (border, phase), node in self.exchanges.items():
            if not self._is_beside(border, phase):
                continue
            partner = self.exchanges.get((replace(border, enters=not border.enters), phase))
            if not _inwards(border, phase):
                first_of |= {} if partner is None else {node.uid: partner.uid}
            elif partner is None:
                alone += [GraphEdge(node.uid, uid) for uid in self._inside(node)]
        kept = [edge for edge in edges if edge.target not in first_of]
        return [*kept, *alone, *(GraphEdge(first, last) for last, first in first_of.items())]

    def _inside(self, node: Node) -> list[str]:
        """Return what takes, inside a region, the tensors or gradients that an exchange brings in."""
        if node.phase is B:
            return [f"B.{segment}" for segment, _ in node.values]
        span = range(node.region[0], node.region[1] + 1)
        return [
            f"F.{consumer}" for value, consumer in self._flows if value in node.values and consumer in span
        ]

    def _kind(self, border: _Border, phase: TaskKind) -> TaskKind | None:
        """Return what turns a tensor at a border ([Note: exchanges])."""
        if border.regrouping is not None:
            return border.regrouping.kind if _inwards(border, phase) else None
        if border.axis != "tp":
            return TaskKind.ALL_TO_ALL
        towards = _inwards(border, phase)
        if self.shares.sequence_parallel:
            return TaskKind.ALL_GATHER if towards else TaskKind.REDUCE_SCATTER
        return None if towards else TaskKind.ALL_REDUCE

    def _exchange(self, border: _Border, value: Value, *, phase: TaskKind, kind: TaskKind) -> Node:
        key = (border, phase)
        node = self.exchanges.get(key)
        if node is None:
            node = self._node(border, "in" if border.enters else "out", phase=phase, kind=kind)
        if value not in node.values:
            node = replace(node, values=(*node.values, value))
        self.exchanges[key] = node
        return node

    def _node(self, border: _Border, side: str, *, phase: TaskKind, kind: TaskKind) -> Node:
        axis, region = border.axis, border.region
        home = self.graph.node[f"F.{region[0]}"]
        span = f"{axis}{region[0]}-{region[1]}"
        if border.regrouping is None:
            stream, group = self._place(axis, region[0], home.pipeline_rank)
            tags = home.tags
        else:
            how = border.regrouping
            stream, tags = TRANSFERS, (("PP", home.stage),)
            group = regrouping_group(self.graph, home.pipeline_rank, count=how.count, stride=how.stride)
            span = f"{span}n{how.count}s{how.stride}"
        self.groups[group.name] = group
        return replace(
            home,
            tags=tags,
            uid=f"{kind.name}.{phase.name}.{side}.{span}",
            kind=kind,
            stream=stream,
            first_segment=-1,
            last_segment=-1,
            recomputed=False,
            group=group.name,
            phase=phase,
            enters=border.enters,
            region=region,
            pieces=1 if border.regrouping is None else border.regrouping.pieces,
        )

    def _place(self, axis: str, segment: int, pipeline_rank: int) -> tuple[str, Group]:
        """Return stream and group of the exchanges of a region."""
        expert = self.shares.expert_of.get(segment) if axis == "ep" else None
        key = (axis, pipeline_rank, None if expert is None else replace(expert, segments=()))
        if key not in self._known:
            self._known[key] = (
                tensor_group(self.graph, pipeline_rank)
                if axis == "tp"
                else context_group(self.graph, pipeline_rank)
                if expert is None
                else expert_group(self.graph, pipeline_rank, expert)
            )
        shares = self.shares
        facts: dict[str, Mapping[int, TensorSharding | SequenceSharding | ExpertSharding]] = {
            "tp": shares.tensor_of,
            "cp": shares.sequence_of,
            "ep": shares.expert_of,
        }
        stream = facts[axis][segment].stream
        return stream, on_stream(self._known[key], stream)

    @cached_property
    def _rings(self) -> list[tuple[int, int]]:
        """Segments with attention whose keys and values go round, each a region of its own."""
        segments = self.graph.model.segments
        return [
            (i, i)
            for i, fact in sorted(self.shares.sequence_of.items())
            if fact.method == "ring"
            and any(o.kind is OpKind.ATTENTION for o in segments[i].forward.operations)
        ]

    def _gathered_again(self, graph: Graph) -> Graph:
        """Return the graph with gathers, beside B, of what regions took in F and their BW reads."""
        nodes: list[Node] = []
        edges: list[GraphEdge] = []
        for (border, phase), node in self.exchanges.items():
            back = self.exchanges.get((border, B))
            if phase is not F or node.kind is not TaskKind.ALL_GATHER or back is None:
                continue
            saved = tuple(value for value in node.values if self._is_saved(value, border.region))
            if not saved:
                continue
            again = replace(node, uid=f"{node.uid}.again", phase=TaskKind.R, values=saved)
            out = self.exchanges.get((replace(border, enters=False), B))
            nodes.append(again)
            edges.append(GraphEdge(again.uid, back.uid))
            edges.append(GraphEdge(f"F.{border.region[1]}" if out is None else out.uid, again.uid))
        return graph.rewrite(add=nodes, connect=edges)

    def _normalised(self, graph: Graph) -> Graph:
        """Return the graph with a collective behind each F that normalises over, or gathers, cut features."""
        nodes: list[Node] = []
        edges: list[GraphEdge] = []
        for segment in sorted(self.shares.tensor_of):
            operations = graph.model.segments[segment].forward.operations
            region = self.shares.region("tp", segment)
            gathers = any(map(gathers_features, operations))
            if region is None or not (gathers or any(map(normalises_cut_features, operations))):
                continue
            border = _Border("tp", region, False)
            kind = TaskKind.ALL_GATHER if gathers else TaskKind.ALL_REDUCE
            node = self._node(border, f"norm{segment}", phase=F, kind=kind)
            node = replace(node, region=(segment, segment))
            nodes.append(node)
            edges.append(GraphEdge(f"F.{segment}", node.uid))
            edges += [GraphEdge(node.uid, edge.target) for edge in graph.outgoing.get(f"F.{segment}", ())]
        return replace(graph.rewrite(add=nodes, connect=edges), groups=graph.groups)

    def _is_saved(self, value: Value, region: tuple[int, int]) -> bool:
        """Return whether a segment of a region that is not recomputed saves a boundary tensor."""
        segments = self.graph.model.segments
        return any(
            saved
            for i in range(region[0], region[1] + 1)
            if not self.graph.node[f"F.{i}"].recomputed
            for taken, saved in zip(segments[i].inputs, segments[i].inputs_saved, strict=True)
            if taken == value
        )

    def _rung(self, graph: Graph) -> Graph:
        """Return the graph with ring shifts that run while segments compute.

        A shift takes what its segment takes, shifts before it included: so edges are followed as they grow.
        """
        nodes: list[Node] = []
        edges: list[GraphEdge] = []
        incoming = {uid: list(listed) for uid, listed in graph.incoming.items()}
        outgoing = {uid: list(listed) for uid, listed in graph.outgoing.items()}
        pass_of = {node.uid: node.pass_kind for node in graph.nodes}
        for region, phase in ((region, phase) for region in self._rings for phase in (F, B)):
            uid = f"{phase.name}.{region[0]}"
            if uid not in pass_of:
                continue
            shift = self._node(_Border("cp", region, True), "ring", phase=phase, kind=TaskKind.RING_SHIFT)
            pass_of[shift.uid] = shift.pass_kind
            beside = [
                *(GraphEdge(e.source, shift.uid) for e in incoming.get(uid, ())),
                *(GraphEdge(shift.uid, e.target) for e in outgoing.get(uid, ())),
            ]
            for edge in beside:
                if pass_of[edge.source] is pass_of[edge.target]:
                    incoming.setdefault(edge.target, []).append(edge)
                    outgoing.setdefault(edge.source, []).append(edge)
                    edges.append(edge)
            nodes.append(shift)
        return graph.rewrite(add=nodes, connect=edges)


def _inwards(border: _Border, phase: TaskKind) -> bool:
    """Return whether a pass crosses a border into the region."""
    return border.enters is (phase is F)
