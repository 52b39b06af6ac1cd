"""Copy the stages that an order runs in two directions, so that two pipeline ranks hold each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper.graph.graph import Graph, Node, copied_uid
from piper.graph.rank_groups import context_group, expert_group, on_stream, regrouping_group, tensor_group
from piper.graph.shares import Shares
from simulator.plan import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStages:
    """Give every stage a second home where the rows of the order have it on two pipeline ranks (DualPipe).

    [Note: two directions]
    A microbatch runs through the first homes of all stages, or through the second ones. Both homes of a stage
    hold its parameters; their gradients are summed as those of tied parameters are.

    rewrite: F(rank 0) -> F(rank 1)  ->  F(rank 0) -> F(rank 1);  F'(rank 1) -> F'(rank 0)
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with copies; unchanged unless all stages have two homes."""
        second = _second_homes(graph)
        if len(second) < graph.num_stages:
            return graph
        groups = {group.name: group for group in graph.groups}
        nodes: list[Node] = []
        for node in graph.nodes:
            copied = replace(node, uid=copied_uid(node.uid), pipeline_rank=second[node.stage])
            if node.is_exchange:
                group = on_stream(_group(graph, copied, groups[node.group]), node.stream)
                groups.setdefault(group.name, group)
                copied = replace(copied, group=group.name)
            nodes.append(copied)
        edges = [
            replace(edge, source=copied_uid(edge.source), target=copied_uid(edge.target))
            for edge in graph.edges
        ]
        return replace(graph, groups=tuple(groups.values())).rewrite(add=nodes, connect=edges)


def _second_homes(graph: Graph) -> dict[int, int]:
    """Return, by stage, the other pipeline rank whose row has it."""
    homes = graph.pipeline_rank_of_stage
    return {
        task.stage: rank
        for rank, row in enumerate(graph.rows)
        for slot in row
        for task in slot
        if homes.get(task.stage, rank) != rank
    }


def _group(graph: Graph, node: Node, first: Group) -> Group:
    """Return the ranks of an exchange at the second home of its stage; `first`: those at its first."""
    if first.axis == "ep":
        return expert_group(graph, node.pipeline_rank, Shares(graph=graph).expert_of[node.region[0]])
    if first.axis == "pp":
        stride = first.members[0][1] - first.members[0][0]
        return regrouping_group(graph, node.pipeline_rank, count=first.size, stride=stride)
    return (tensor_group if first.axis == "tp" else context_group)(graph, node.pipeline_rank)
