"""Rows as typed slots: what is read, what is refused, and which orders can run."""

import pytest

from piper.errors import StrategyError
from piper.schedules.rows import parse_rows, row_violations, show_rows, stages_by_rank, validate_rows
from simulator.plan.task import TaskKind, TaskName

TWO = ((0,), (1,))


def violations(*rows: list, stages=TWO, num_microbatches: int = 1) -> tuple[str, ...]:
    parsed = parse_rows(list(rows), where="test")
    return row_violations(parsed, stages=stages, num_microbatches=num_microbatches)


def test_codes_become_task_names_and_codes_again():
    raw = [["0F0", ["0F1", "0B0"]], ["1F0", "1BI0", "1BW0"]]
    rows = parse_rows(raw, where="test")
    assert rows[0][1] == (
        TaskName(kind=TaskKind.F, stage=0, microbatch=1),
        TaskName(kind=TaskKind.B, stage=0, microbatch=0),
    )
    assert show_rows(rows) == raw
    assert parse_rows(rows, where="test") == rows


@pytest.mark.parametrize(
    "slot",
    [
        "",
        "0",
        "F0",
        "0F",
        "0X0",
        "0SEND_F0",
        "0F0/3",
        "0F0@dense0",
        "0R0",
        5,
        None,
        [],
        ["0F0", 7],
        [["0F0"]],
    ],
)
def test_a_slot_that_is_no_pass_is_named_by_rank_and_place(slot):
    with pytest.raises(StrategyError) as caught:
        parse_rows([["0F0"], ["1F0", slot]], where="my.py:f")
    assert caught.value.where == "my.py:f: pipeline rank 1 slot 1"
    assert caught.value.field == "slot"
    assert "2F0" in caught.value.fix


@pytest.mark.parametrize("raw", [None, 3, "0F0", ["0F0"], [["0F0"], None], {"0": ["0F0"]}])
def test_rows_that_are_no_lists_are_refused(raw):
    with pytest.raises(StrategyError) as caught:
        parse_rows(raw, where="my.py:f")
    assert caught.value.field == "rows"
    assert "list of slots" in caught.value.rule
    assert caught.value.fix


def test_stages_go_round_in_a_loop_or_down_and_up_in_a_v():
    assert stages_by_rank(3, 2) == ((0, 3), (1, 4), (2, 5))
    assert stages_by_rank(3, 2, layout="v") == ((0, 5), (1, 4), (2, 3))
    with pytest.raises(StrategyError) as caught:
        stages_by_rank(3, 2, layout="w")
    assert caught.value.field == "stage_of_rank"
    assert "'loop', 'v' or 'bidirectional'" in caught.value.rule


def test_legal_rows_with_fused_split_and_overlapping_passes_pass():
    assert violations(["0F0", "0B0"], ["1F0", "1B0"]) == ()
    assert violations(["0F0", "0BI0", "0BW0"], ["1F0", "1BI0", "1BW0"]) == ()
    rows = ["0F0", "0F1", "0B0", "0B1"], ["1F0", ["1F1", "1B0"], "1B1"]
    assert violations(*rows, num_microbatches=2) == ()
    v = ["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]
    assert violations(*v, stages=((0, 3), (1, 2))) == ()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((["0F0", "0B0"],), "there are 1 rows for 2 pipeline ranks"),
        ((["0F0", "0B0"], ["1F0"]), "stage 1 microbatch 0: there are 0 B, 0 BI, 0 BW, must be 1 B, or"),
        ((["0F0", "0B0"], ["1B0"]), "stage 1 microbatch 0: F stands 0 times, must be once"),
        ((["0F0", "0F0", "0B0"], ["1F0", "1B0"]), "stage 0 microbatch 0: F stands 2 times, must be once"),
        ((["0F0", "0B0"], ["1F0", "1B0", "1BW0"]), "there are 1 B, 0 BI, 1 BW"),
        ((["0F0", "0B0"], ["1F0", "1BI0"]), "there are 0 B, 1 BI, 0 BW"),
        ((["0F0", "1B0"], ["1F0", "0B0"]), "1B0 stands on rank 0, but stage 1 is on 1"),
        ((["0F0", "0B0", "0F1"], ["1F0", "1B0"]), "0F1 of rank 0: there are only microbatches 0..0"),
        ((["0F0", "0B0"], ["1F0", "1B0", "2F0"]), "2F0 of rank 1: there are only stages 0..1"),
        ((["0B0", "0F0"], ["1F0", "1B0"]), "rank 0 is stuck at slot 0, 0B0, which needs 0F0"),
        ((["0F0", "0B0"], ["1B0", "1F0"]), "rank 1 is stuck at slot 0, 1B0, which needs 1F0"),
        ((["0F0", "0BW0", "0BI0"], ["1F0", "1B0"]), "rank 0 is stuck at slot 1, 0BW0, which needs 0B0"),
        (([["0F0", "0B0"]], ["1F0", "1B0"]), "rank 0 is stuck at slot 0, 0F0 and 0B0, which needs 0F0"),
    ],
)
def test_what_is_wrong_with_rows_is_said(rows, message):
    assert any(message in found for found in violations(*rows))


def test_ranks_that_wait_for_each_other_are_all_reported():
    found = violations(["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"], num_microbatches=2)
    assert found == (
        "rank 0 is stuck at slot 1, 0B0, which needs 1B0",
        "rank 1 is stuck at slot 1, 1F1, which needs 0F1",
    )


def test_validation_raises_with_the_first_violation_and_their_number():
    rows = parse_rows([["0F0"], ["1F0"]], where="test")
    with pytest.raises(StrategyError) as caught:
        validate_rows(rows, stages=TWO, num_microbatches=1, where="my.py:f")
    assert caught.value.where == "my.py:f"
    assert caught.value.field == "rows"
    assert caught.value.value == 2
    assert "stage 0 microbatch 0" in caught.value.rule
    assert "(and 1 more)" in caught.value.rule
    assert "on its rank" in caught.value.fix


def test_numbers_larger_than_a_machine_word_are_reported_like_other_ones_that_do_not_exist():
    large = 10**30
    found = violations(["0F0", "0B0", f"0F{large}", f"{large}F0"], ["1F0", "1B0"])
    assert found[0] == f"0F{large} of rank 0: there are only microbatches 0..0"
    assert found[1] == f"{large}F0 of rank 0: there are only stages 0..1"


def test_no_rows_are_no_violation_of_a_schedule_without_stages():
    assert violations(stages=(), num_microbatches=1) == ()
