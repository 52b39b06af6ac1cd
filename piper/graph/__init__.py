"""The global training graph: captured segments become F and B nodes; directives and passes rewrite them."""

from piper.graph.balance import balanced_cut
from piper.graph.build import build_graph
from piper.graph.captured import CapturedModel, CapturedSegment, PassCost
from piper.graph.cut import Units, default_cut, stages_of_segments, units_of
from piper.graph.dump import dump
from piper.graph.facts import (
    ExpertSharding,
    Offloading,
    Recomputation,
    Replication,
    SequenceSharding,
    StageMesh,
    StreamRule,
    TensorSharding,
    require_unclaimed,
)
from piper.graph.filters import Filter
from piper.graph.graph import EdgeKind, Graph, GraphEdge, Node, Rewrite, Rows
from piper.graph.shares import Shares
from piper.graph.verify import topological_order, verify

__all__ = [
    "CapturedModel",
    "CapturedSegment",
    "EdgeKind",
    "ExpertSharding",
    "Filter",
    "Graph",
    "GraphEdge",
    "Node",
    "Offloading",
    "PassCost",
    "Recomputation",
    "Replication",
    "Rewrite",
    "Rows",
    "SequenceSharding",
    "Shares",
    "StageMesh",
    "StreamRule",
    "TensorSharding",
    "Units",
    "balanced_cut",
    "build_graph",
    "default_cut",
    "dump",
    "require_unclaimed",
    "stages_of_segments",
    "topological_order",
    "units_of",
    "verify",
]
