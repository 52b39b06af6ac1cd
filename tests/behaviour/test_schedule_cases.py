"""What users of other frameworks ran into with schedules, each with what is right instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper.cli import main
from piper.errors import StrategyError
from piper.graph import Units, default_cut
from piper.schedules import schedule_rows
from simulator.plan import Plan
from simulator.plan.check import check_plan
from simulator.plan.task import TaskKind
from tests.jobs import compiled


def test_one_microbatch_on_eight_ranks_is_legal_and_warns_of_the_bubble() -> None:
    """The warm-up of stage s is min(M, P - s); nothing hangs; most of the step is bubble."""
    for text, layers in [("pp=8", 8), ("pp=4,vp=2", 8)]:
        plan = compiled(text, layers=layers, global_batch=1)
        assert check_plan(plan) == []
        ranks = len(plan.device_plans)
        assert plan.notices == (
            f"1 microbatch for {ranks} pipeline ranks: bubble, as most ranks wait; "
            f"{2 * ranks} or more fill them",
        )
    rows = schedule_rows("1f1b", num_pipeline_ranks=8, num_microbatches=3)
    warm_up = [[task.kind for slot in row for task in slot].index(TaskKind.B) for row in rows]
    assert warm_up == [min(3, 8 - stage) for stage in range(8)]
    assert not compiled("pp=2", global_batch=2).notices


def test_interleaving_on_two_ranks_sends_both_ways_to_the_same_peer_and_matches_in_order() -> None:
    """The rank before and the rank behind are one: it receives in the order in which is sent."""
    plan = compiled("pp=2,vp=2", global_batch=4)
    assert check_plan(plan) == []
    for kind, received_as in [(TaskKind.SEND_F, TaskKind.RECV_F), (TaskKind.SEND_B, TaskKind.RECV_B)]:
        for rank in range(2):
            sent = transfers(plan, rank, kind)
            assert sent == transfers(plan, 1 - rank, received_as)
            assert len(sent) in {4, 8}


def transfers(plan: Plan, rank: int, kind: TaskKind) -> list[tuple[int, int]]:
    """Return edge and microbatch of a rank's sends or receives, in order."""
    tasks = [task for task in plan.device_plans[rank].tasks if task.kind is kind]
    return [(task.edge, task.microbatch) for task in tasks]


def test_a_last_stage_of_one_layer_on_a_single_rank_is_an_error_not_a_fast_model(tmp_path: Path) -> None:
    """20 layers declared, 1 placed: refused, so that no throughput counts layers that do not run."""
    file = tmp_path / "s.yaml"
    file.write_text(
        "- {op: mesh, axes: {pp: 1, dp: 1}}\n- {op: place, filter: {PP: 0}, at: {pp: 0}, units: 1}\n"
    )
    with pytest.raises(StrategyError, match="add up to the model's 22 units"):
        compiled(str(file), layers=20, global_batch=1)


@pytest.mark.parametrize(
    ("layers", "stages"), [(27, 2), (27, 4), (27, 8), (61, 2), (61, 4), (61, 8), (61, 16)]
)
def test_layers_that_do_not_divide_are_all_placed(layers: int, stages: int) -> None:
    """27 layers on 2 stages: 13 and 14, not 13 and 13; embedding and head are one unit each on the ends."""
    units = Units(of_segment=tuple(range(layers + 2)), before=1, layers=layers, after=1)
    cut = default_cut(units, stages)
    of_layers = [cut[0] - 1, *cut[1:-1], cut[-1] - 1]
    assert sum(of_layers) == layers
    assert max(cut) - min(cut) <= 1
    if stages == 2:
        assert sorted(of_layers) == [layers // 2, layers - layers // 2]


def test_a_table_that_starts_backwards_too_early_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1F1B in less than 2 (M + P - 1) slots lists passes before their inputs: no rank could run it."""
    early = ["0F0,0B0,0F1,0B1", "1F1,1F0,1B0,1B1"]
    file = tmp_path / "early.csv"
    file.write_text("\n".join(early) + "\n")
    assert main(["check", str(file)]) == 4
    assert "circular wait" in capsys.readouterr().err
