"""`recompute`: throw activations away after the forward, and make them again before the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from cost_models.errors import nearest
from cost_models.ops import OpKind
from piper.errors import StrategyError
from piper.graph.directive import (
    Directive,
    claimed,
    read_choice,
    read_filter,
    read_whole_number,
    refuse_unknown_keys,
    state,
)
from piper.graph.facts import Recomputation
from piper.graph.filters import Filter
from piper.graph.graph import Graph
from simulator.plan import TaskKind

MODES = ("full", "selective", "ops")
SELECTED = (OpKind.ATTENTION.value, OpKind.SOFTMAX.value)
"""What selective recomputation makes again unless it says otherwise: the attention core, whose activations
are large and cheap to make (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 5)."""
_KINDS = tuple(kind.value for kind in OpKind if kind not in {OpKind.FIXED, OpKind.OPTIMIZER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Directive):
    """Keep less of the matched units between F and B; RNG is restored, so masks are the same.

    rewrite: F -> B  ->  F(keeps its input) -> R -> B                               (full)
             F -> B  ->  F(without the results of some kinds) -> R(these kinds) -> B  (selective)
             F -> B  ->  F(keeps its input, and some results) -> R(the rest) -> B     (ops)

    Mode "ops" keeps what torchtitan's selective checkpointing per operator keeps: results of attention and of
    every second linear layer of a unit, the first included (torchtitan/models/llama3/infra/parallelize.py).

    Args:
        filter: the units, e.g. {"LAYER": "*"}.
        mode: "full": only inputs are kept; "selective": the results of the kinds in `ops` are made again;
            "ops": all is made again but results of attention and of every second linear layer.
        ops: selective: kinds of operations (`cost_models.ops.OpKind`), rising.
        layers: only the first so many of the matched units of each stage; None: all.
    """

    op: ClassVar[str] = "recompute"
    keys: ClassVar[tuple[str, ...]] = ("filter", "mode", "ops", "layers")

    filter: Filter
    mode: str = "full"
    ops: tuple[str, ...] = ()
    layers: int | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "recompute", "filter": {"LAYER": "*"}, "mode": "full"}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        mode = read_choice(entry.get("mode", "full"), MODES, where=where, name="recompute.mode")
        ops = _kinds(entry["ops"], where=where) if "ops" in entry else ()
        if ops and mode != "selective":
            raise StrategyError(
                where=where, field="recompute.ops", value=list(ops),
                rule=f'selects kinds of operations, but the mode is "{mode}"',
                fix='write "mode": "selective", or leave ops out',
            )  # fmt: skip
        layers = entry.get("layers")
        return cls(
            filter=read_filter(entry, where=where, op=cls.op),
            mode=mode,
            ops=ops or (SELECTED if mode == "selective" else ()),
            layers=None
            if layers is None
            else read_whole_number(layers, where=where, name="recompute.layers"),
            where=where,
        )

    def apply(self, graph: Graph) -> Graph:
        """State what is made again of the matched segments; segments without a backward keep nothing."""
        segments = claimed(graph, self.filter, where=self.where, op=self.op)
        with_backward = {n.first_segment for n in graph.nodes if n.kind is TaskKind.B}
        segments = tuple(i for i in self._first(graph, segments) if i in with_backward)
        if not segments:
            return graph
        if self.mode != "selective":
            graph = graph.map_nodes({
                node.uid: replace(node, recomputed=True)
                for node in graph.nodes
                if node.first_segment in segments
            })  # fmt: skip
        fact = Recomputation(segments=segments, mode=self.mode, kinds=self.ops, where=self.where)
        return state(graph, "recomputations", fact, op=self.op, value=self.filter.source)

    def _first(self, graph: Graph, segments: tuple[int, ...]) -> tuple[int, ...]:
        """Return the segments of the first `layers` units of each stage."""
        if self.layers is None:
            return segments
        units: dict[int, dict[tuple[int, int], None]] = {}
        keys = {i: _unit(graph, i) for i in segments}
        for i in segments:
            units.setdefault(graph.stage_of_segment[i], {})[keys[i]] = None
        kept = {key for found in units.values() for key in list(found)[: self.layers]}
        return tuple(i for i in segments if keys[i] in kept)


def _unit(graph: Graph, segment: int) -> tuple[int, int]:
    """Return what counts as one unit: the layer, else the unit of the cut, within a stage."""
    tags = dict(graph.model.segments[segment].tags)
    return graph.stage_of_segment[segment], tags.get("LAYER", -1 - tags.get("PP", segment))


def _kinds(value: object, *, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise StrategyError(
            where=where, field="recompute.ops", value=value, rule="must be a list of kinds of operations",
            fix='write for example "ops": ["attention"]',
        )  # fmt: skip
    for kind in value:
        if kind not in _KINDS:
            raise StrategyError(
                where=where, field="recompute.ops", value=kind, rule="is not a kind of operation",
                fix=nearest(str(kind), _KINDS),
            )  # fmt: skip
    return tuple(sorted(set(value)))
