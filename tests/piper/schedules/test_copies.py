"""Virtual stages that are copies of the model's stages: what runs where, and what is refused."""

import pytest

from piper.errors import StrategyError
from piper.schedules import copies_of, find_schedule, schedule_rows, show_rows, stages_of
from piper.schedules.copies import Copies, copy_of, in_model_stages
from piper.schedules.entries import with_transfers
from piper.schedules.preview import preview_schedule
from piper.schedules.rows import parse_rows, row_violations
from piper.schedules.schedule_file import load_schedule_file
from simulator.plan.task import NONE

COUNTS = {"num_pipeline_ranks": 4, "num_microbatches": 8, "virtual_stages_per_rank": 2}
TWO_WAYS = [["0F0", "3F1", "3B1", "0B0"], ["2F1", "1F0", "1B0", "2B1"]]
STAGES = ((0, 3), (1, 2))


def test_a_virtual_stage_is_a_stage_of_one_copy():
    assert [copy_of(stage, num_stages=8, copies=2) for stage in (0, 3, 4, 7)] == [
        (0, 0),
        (3, 0),
        (0, 1),
        (3, 1),
    ]
    assert copy_of(5, num_stages=8, copies=1) == (5, 0)


def test_nothing_passes_from_copy_to_copy():
    two = Copies(num_stages=8, count=2)
    assert [two.goal(stage, forward=True) for stage in range(8)] == [1, 2, 3, NONE, 5, 6, 7, NONE]
    assert [two.goal(stage, forward=False) for stage in range(8)] == [NONE, 0, 1, 2, NONE, 4, 5, 6]
    assert [list(two.microbatches(stage, 6)) for stage in (3, 4)] == [[0, 1, 2], [3, 4, 5]]


def test_every_rank_of_dualpipe_holds_a_stage_and_the_copy_of_the_opposite_one():
    assert copies_of(find_schedule("dualpipe")) == 2
    assert copies_of(find_schedule("dualpipe_v")) == 1
    stages = stages_of("dualpipe", num_pipeline_ranks=4, virtual_stages_per_rank=2)
    assert stages == ((0, 7), (1, 6), (2, 5), (3, 4))
    of_model = [[copy_of(stage, num_stages=8, copies=2)[0] for stage in held] for held in stages]
    assert of_model == [[0, 3], [1, 2], [2, 1], [3, 0]]


def test_rows_of_model_stages_run_each_microbatch_once_on_each_stage():
    rows = in_model_stages(schedule_rows("dualpipe", **COUNTS), Copies(num_stages=8, count=2))
    tasks = [task for row in rows for slot in row for task in slot]
    assert len(set(tasks)) == len(tasks)
    assert {(t.stage, t.microbatch) for t in tasks} == {(s, m) for s in range(4) for m in range(8)}
    assert show_rows(rows)[3][:3] == ["0F4", "0F5", "0F6"]


def test_rows_in_two_directions_are_legal_with_copies_only():
    rows = parse_rows(TWO_WAYS, where="test")
    assert row_violations(rows, stages=STAGES, num_microbatches=2, copies=2) == ()
    assert "F stands 0 times" in row_violations(rows, stages=STAGES, num_microbatches=2)[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("3F1", "3F0", "stage 3 microbatch 0: this copy of the model runs only microbatches 1..1"),
        ("2F1", "2F0", "stage 2 microbatch 1: F stands 0 times"),
        ("3B1", "3BI1", "stage 3 microbatch 1: there are 0 B, 1 BI, 0 BW"),
    ],
)
def test_what_a_copy_must_not_run_is_said(old, new, message):
    rows = parse_rows([[new if code == old else code for code in row] for row in TWO_WAYS], where="test")
    found = row_violations(rows, stages=STAGES, num_microbatches=2, copies=2)
    assert any(message in line for line in found)


def test_counts_that_copies_cannot_share_are_said():
    rows = parse_rows(TWO_WAYS, where="test")
    assert row_violations(rows, stages=STAGES, num_microbatches=3, copies=2) == (
        "3 microbatches cannot be divided between 2 copies",
    )


def test_ranks_that_wait_for_each_other_across_directions_are_found():
    rows = parse_rows([["3F1", "0F0", "3B1", "0B0"], ["1F0", "2F1", "1B0", "2B1"]], where="test")
    assert row_violations(rows, stages=STAGES, num_microbatches=2, copies=2) == (
        "rank 0 is stuck at slot 0, 3F1, which needs 2F1",
        "rank 1 is stuck at slot 0, 1F0, which needs 0F0",
    )


def test_the_last_stage_of_a_copy_sends_nothing_forward():
    entries = with_transfers(parse_rows(TWO_WAYS, where="test"), stages=STAGES, copies=2)
    assert [[entry.code for entry in row] for row in entries] == [
        ["0F0", "0SEND_F0", "3RECV_F1", "3F1", "3B1", "3SEND_B1", "0RECV_B0", "0B0"],
        ["1RECV_F0", "2F1", "2SEND_F1", "1F0", "2RECV_B1", "1B0", "1SEND_B0", "2B1"],
    ]


def test_a_file_in_two_directions_is_told_from_a_v(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text("\n".join(",".join(row) for row in TWO_WAYS))
    file = load_schedule_file(str(path))
    assert (file.copies, file.stage_of_rank) == (2, STAGES)
    found = preview_schedule(str(path), num_pipeline_ranks=2, num_microbatches=2, virtual_stages_per_rank=2)
    assert found.in_flight == (2, 2)
    path.write_text("0F0,0F1,3F0,3B0,3F1,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
    assert load_schedule_file(str(path)).copies == 1


USER_FILE = """
def two_ways(*, num_pipeline_ranks, num_microbatches, **_):
    half, last = num_microbatches // 2, 2 * num_pipeline_ranks - 1
    rows = []
    for rank in range(num_pipeline_ranks):
        ways = [(rank, range(half)), (last - rank, range(half, 2 * half))]
        near, far = ways if rank < num_pipeline_ranks // 2 else ways[::-1]
        runs = [("F", near), ("F", far), ("B", far), ("B", near)]
        rows.append([f"{stage}{kind}{m}" for kind, (stage, own) in runs for m in own])
    return rows

two_ways.stage_of_rank = "bidirectional"
"""


def test_a_users_function_may_run_in_two_directions(tmp_path):
    (tmp_path / "mine.py").write_text(USER_FILE)
    name = f"{tmp_path / 'mine.py'}:two_ways"
    found = preview_schedule(name, num_pipeline_ranks=2, num_microbatches=4, virtual_stages_per_rank=2)
    assert found.copies == 2
    assert max(found.in_flight) == 4
    with pytest.raises(StrategyError, match="3 microbatches cannot be divided between 2 copies"):
        schedule_rows(name, num_pipeline_ranks=2, num_microbatches=3, virtual_stages_per_rank=2)
