"""The global training graph: captured segments become F and B nodes; directives and passes rewrite them."""

from piper.graph.build import build_graph
from piper.graph.captured import CapturedModel, CapturedSegment, PassCost
from piper.graph.cut import Units, default_cut, stages_of_segments, units_of
from piper.graph.dump import dump
from piper.graph.facts import Replication, require_unclaimed
from piper.graph.filters import Filter
from piper.graph.graph import EdgeKind, Graph, GraphEdge, Node, Rewrite, Rows
from piper.graph.verify import topological_order, verify

__all__ = [
    "CapturedModel",
    "CapturedSegment",
    "EdgeKind",
    "Filter",
    "Graph",
    "GraphEdge",
    "Node",
    "PassCost",
    "Replication",
    "Rewrite",
    "Rows",
    "Units",
    "build_graph",
    "default_cut",
    "dump",
    "require_unclaimed",
    "stages_of_segments",
    "topological_order",
    "units_of",
    "verify",
]
