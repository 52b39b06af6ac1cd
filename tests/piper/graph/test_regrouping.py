"""What is regrouped between stages with unlike meshes, and which meshes do not go together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper.errors import StrategyError
from piper.graph import ExpertSharding, Graph, Shares, StageMesh
from piper.graph.regrouping import Regrouping, regrouping, require_stage_meshes
from simulator.plan import TaskKind
from tests.facts import COARSE, FINE, PLAIN_TP, TP, graph_of

COLLECTIVE = {"gather": TaskKind.ALL_GATHER, "all_to_all": TaskKind.ALL_TO_ALL}


def between(case: str, source: int, target: int) -> Regrouping | None:
    return regrouping(Shares(graph=graph_of(case)), source=source, target=target)


def how(kind: str, pieces: int, count: int, stride: int) -> Regrouping:
    return Regrouping(kind=COLLECTIVE[kind], pieces=pieces, count=count, stride=stride)


@pytest.mark.parametrize(
    ("case", "down", "up"),
    [
        ("tp", None, None),
        ("meshes", how("all_to_all", 1, 4, 1), how("all_to_all", 1, 4, 1)),
        ("meshes_plain", how("gather", 4, 4, 1), None),
        ("meshes_cp", how("all_to_all", 2, 4, 1), how("all_to_all", 1, 4, 1)),
    ],
)
def test_the_receiving_side_exchanges_what_its_ranks_lack(
    case: str, down: Regrouping | None, up: Regrouping | None
) -> None:
    """`down` into the stage with fewer replicas, `up` back."""
    assert between(case, 0, 1) == down
    assert between(case, 1, 0) == up


def test_ranks_that_got_the_same_part_of_a_layer_gather() -> None:
    """Replicas of two ranks become replicas of four: rank 0 gathers with rank 2, not with rank 1."""
    graph = graph_of("tp", axes={"tp": 2, "dp": 2}, tensor_shardings=(PLAIN_TP,), stage_meshes=(COARSE,))
    assert regrouping(Shares(graph=graph), source=0, target=1) == how("gather", 2, 2, 2)


def refused(graph: Graph) -> StrategyError:
    with pytest.raises(StrategyError) as caught:
        require_stage_meshes(Shares(graph=graph))
    return caught.value


def test_stages_that_share_a_parameter_and_no_mesh_are_refused_by_its_name() -> None:
    axes = {"tp": 2, "dp": 2}
    found = refused(graph_of("tied", axes=axes, tensor_shardings=(TP,), stage_meshes=(COARSE,)))
    assert "embed.weight" in found.rule
    assert found.fix == "give the stages 0 and 1 the same tp and dp"
    same = StageMesh(segments=COARSE.segments, axes=(("tp", 2), ("cp", 1), ("dp", 2)), shard_ranks=1)
    require_stage_meshes(
        Shares(graph=graph_of("tied", axes=axes, tensor_shardings=(TP,), stage_meshes=(same,)))
    )


def test_a_stage_of_one_mesh_that_a_row_puts_beside_one_of_another_is_refused() -> None:
    graph = graph_of(
        "two_directions", axes={"tp": 2, "dp": 2}, tensor_shardings=(TP,), stage_meshes=(COARSE,)
    )
    found = refused(graph)
    assert found.value == "stage 1"
    assert "stage 0 on the same pipeline rank 0 as tp 2 x cp 1 x dp 2" in found.rule


def test_an_axis_for_experts_needs_experts_in_those_stages() -> None:
    mesh = replace(FINE, axes=(*FINE.axes, ("ep", 4)))
    shard = ExpertSharding(segments=(6,), degree=4)
    graph = graph_of("ep", axes={"dp": 4}, stage_meshes=(mesh,), expert_shardings=(shard,))
    assert refused(graph).field == "mesh.axes.ep"
    beside = replace(mesh, segments=COARSE.segments)
    require_stage_meshes(Shares(graph=replace(graph, stage_meshes=(beside,))))


def test_a_stage_without_ranks_of_tp_has_no_region_though_a_fact_claims_it() -> None:
    graph = graph_of("meshes")
    assert Shares(graph=graph).tensor_of.keys() == {4, 6}
    assert Shares(graph=graph).outside_degree == (1,) * 4 + (4,) * 5
