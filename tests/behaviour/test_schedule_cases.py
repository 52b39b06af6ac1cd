"""What users of other frameworks ran into with schedules, each with what is right instead."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from piper.cli import main
from piper.errors import StrategyError
from piper.graph import Units, default_cut
from piper.schedules import parse_costs, schedule_rows
from piper.schedules.preview import preview_schedule
from simulator.plan import Plan
from simulator.plan.check import check_plan
from simulator.plan.task import TaskKind, TaskName
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


def timetable(path: Path, cells: Iterable[tuple[int, int, TaskName]]) -> str:
    """Write rank, slot and pass of each cell as a schedule file."""
    lines = [f"{rank},{slot},{task.kind.name},{task.stage},{task.microbatch}" for rank, slot, task in cells]
    path.write_text("\n".join(["rank,slot,op,stage,microbatch", *lines]) + "\n")
    return str(path)


def test_1f1b_of_8_ranks_and_32_microbatches_is_possible_in_78_slots_but_not_in_71(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """71 = 7 + 2 x 32: rank r runs F and B in turn from slot r on, with gradients that nobody made yet."""
    found = preview_schedule("1f1b", num_pipeline_ranks=8, num_microbatches=32, costs=parse_costs("F=1,B=1"))
    spans = [(rank, span) for rank, row in enumerate(found.spans) for span in row]
    possible = [(rank, int(span.start), task) for rank, span in spans for task in span.tasks]
    assert max(slot for _, slot, _ in possible) + 1 == 78
    assert main(["check", timetable(tmp_path / "78.csv", possible)]) == 0
    in_turn = [
        (rank, rank + 2 * m + late, TaskName(kind=kind, stage=rank, microbatch=m))
        for rank in range(8)
        for m in range(32)
        for late, kind in enumerate((TaskKind.F, TaskKind.B))
    ]
    assert max(slot for _, slot, _ in in_turn) + 1 == 71
    assert main(["check", timetable(tmp_path / "71.csv", in_turn)]) == 4
    assert "0B0 runs in slot 1, but 1B0, which it needs, in slot 2" in capsys.readouterr().err


@pytest.mark.parametrize(("layers", "stages"), [(27, 2), (27, 8), (61, 4)])
def test_a_plan_of_layers_that_do_not_divide_runs_each_of_them_once(layers: int, stages: int) -> None:
    plan = compiled(f"pp={stages}", layers=layers, global_batch=2)
    assert check_plan(plan) == []
    homes = [segment.stage for segment in plan.segments]
    assert homes == sorted(homes)
    assert len(homes) == layers + 2
    assert set(homes) == set(range(stages))
