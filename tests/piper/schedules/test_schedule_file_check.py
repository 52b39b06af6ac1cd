"""A schedule file alone: what it lost or lists twice, and ranks that wait for each other in a circle."""

import pytest

from piper.errors import StrategyError
from piper.schedules.file_check import file_violations
from piper.schedules.schedule_file import load_schedule_file


@pytest.fixture
def violations(tmp_path):
    def of(text: str) -> tuple[str, ...]:
        path = tmp_path / "file.csv"
        path.write_text(text)
        return file_violations(load_schedule_file(str(path)))

    return of


BOTH_SEND_FIRST = "rank,op,peer,tensor\n0,send,1,x0\n0,recv,1,x1\n1,send,0,x1\n1,recv,0,x0\n"
"""NCCL issue 479: two ranks that both send first."""


def test_two_ranks_that_both_send_first_wait_for_each_other(violations):
    (found,) = violations(BOTH_SEND_FIRST)
    assert found == (
        "circular wait with every send a rendezvous: "
        "rank 0 at send x0 waits for recv x0 of rank 1, which stands behind send x1; "
        "rank 1 at send x1 waits for recv x1 of rank 0, which stands behind send x0"
    )


def test_a_send_and_a_receive_in_one_group_do_not_wait_for_each_other(violations):
    grouped = "rank,order,op,peer,tensor\n0,0,send,1,x0\n0,0,recv,1,x1\n1,0,send,0,x1\n1,0,recv,0,x0\n"
    assert violations(grouped) == ()
    swapped = "rank,op,peer,tensor\n0,send,1,x0\n0,recv,1,x1\n1,recv,0,x0\n1,send,0,x1\n"
    assert violations(swapped) == ()


STUCK_RUNTIME = """rank,order,op,stage,microbatch,peer
0,0,SEND_F,2,1,1
0,1,F,0,2,
0,2,SEND_F,0,2,1
0,3,RECV_B,2,0,1
0,4,B,2,0,
1,0,RECV_F,3,1,0
1,1,SEND_B,3,0,0
1,2,F,3,1,
1,3,B,3,1,
1,4,RECV_F,1,2,0
1,5,SEND_B,3,1,0
1,6,F,1,2,
"""
"""PyTorch issue 172668: an excerpt of what two ranks with four stages ran when they hung."""
STUCK = (
    "circular wait with every send a rendezvous: "
    "rank 0 at 0SEND_F2 waits for 1RECV_F2 of rank 1, which stands behind 3SEND_B0; "
    "rank 1 at 3SEND_B0 waits for 2RECV_B0 of rank 0, which stands behind 0SEND_F2"
)


def test_a_send_before_the_receive_that_the_other_rank_waits_for_is_found_in_an_excerpt(violations):
    assert violations(STUCK_RUNTIME) == (STUCK,)
    in_torchs_form = "2SEND_F1,0F2,0SEND_F2,2RECV_B0,2B0\n3RECV_F1,3SEND_B0,3F1,3B1,1RECV_F2,3SEND_B1,1F2\n"
    assert violations(in_torchs_form) == (STUCK,)


def test_posting_the_receive_first_clears_it(violations):
    cleared = STUCK_RUNTIME.replace("0,2,SEND_F,0,2,1", "0,3,SEND_F,0,2,1").replace(
        "0,3,RECV_B,2,0,1", "0,2,RECV_B,2,0,1"
    )
    assert violations(cleared) == ()


SKIP = """rank,order,op,peer,tensor
0,0,send,1,a
0,{second},send,2,skip
1,0,recv,0,a
1,1,send,2,b
2,0,recv,0,skip
2,{last},recv,1,b
"""
"""PiPPy issue 969: stage 0 also feeds stage 2, past stage 1."""


def test_groups_at_both_ends_of_a_skip_connection_wait_for_what_lies_between(violations):
    (found,) = violations(SKIP.format(second=0, last=0))
    assert found == (
        "circular wait with every send a rendezvous: rank 1 at recv a, which ends together with "
        "send a + send skip of rank 0, which ends together with recv skip + recv b of rank 2, waits for "
        "send b of rank 1, which stands behind recv a"
    )
    assert violations(SKIP.format(second=1, last=1)) == ()
    assert violations(SKIP.format(second=1, last=0)) == ()
    assert violations(SKIP.format(second=0, last=1)) == ()


WHOLE = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
)


def test_a_whole_file_is_legal_with_and_without_transfers(violations):
    assert violations(WHOLE) == ()
    assert violations("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n") == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0B1\n", "\n", "stage 0 microbatch 1: there are 0 B, 0 BI, 0 BW, must be 1 B, or 1 BI and 1 BW"),
        ("1F0,", "1F0,1F0,", "stage 1 microbatch 0: F stands 2 times, must be once"),
        ("1B1,", "1I1,", "stage 1 microbatch 1: there are 0 B, 1 BI, 0 BW"),
        ("1F1,", "0F1,", "0F1 stands on rank 1, but stage 0 is on 0"),
        ("1SEND_B1", "", "0RECV_B1 of rank 0 has no other end in the file"),
        ("0RECV_B1,", "", "1SEND_B1 of rank 1 has no other end in the file"),
        ("0SEND_F1,", "0SEND_F1,0SEND_F1,", "0SEND_F1 of rank 0 stands there twice"),
        ("1SEND_B1", "0SEND_F1", "0SEND_F1 stands on rank 1, but stage 0 is on 0"),
        (
            "1RECV_F1,1F1",
            "1F1,1RECV_F1",
            "rank 1 at 1F1 waits for 1RECV_F1 of rank 1, which stands behind 1F1",
        ),
        ("0F1,0SEND_F1", "0SEND_F1,0F1", "waits for 0F1 of rank 0, which stands behind 0SEND_F1"),
        ("0F0,0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0F0,0SEND_F0", "rank 0 at 0SEND_F1 waits for 1RECV_F1"),
        ("0RECV_B0,0B0", "0B0,0RECV_B0", "rank 0 at 0B0 waits for 0RECV_B0 of rank 0"),
    ],
)
def test_what_a_whole_file_lost_repeats_or_puts_in_a_wrong_place_is_said(violations, old, new, message):
    assert old in WHOLE
    found = violations(WHOLE.replace(old, new, 1))
    assert any(message in text for text in found), found


def test_a_transfer_missing_at_both_ends_is_missed_too(violations):
    text = WHOLE.replace("0SEND_F1,", "").replace("1RECV_F1,", "")
    assert violations(text) == ("the result of 0F1 is not sent to stage 1 on rank 1",)


def test_a_table_that_names_the_wrong_peer_is_told_the_right_one(violations):
    lines = "rank,order,op,stage,microbatch,peer\n0,0,F,0,0,\n0,1,SEND_F,0,0,{peer}\n0,2,B,0,0,\n"
    lines += "1,0,RECV_F,1,0,0\n1,1,F,1,0,\n1,2,B,1,0,\n"
    found = violations(lines.format(peer=2))
    assert "0SEND_F0 of rank 0 names rank 2, but stage 1 is on 1" in found


def test_passes_without_transfers_that_cannot_run_are_a_circular_wait(violations):
    found = violations("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert found == (
        "circular wait: rank 0 at 0B0 waits for 1B0 of rank 1, which stands behind 1F1; "
        "rank 1 at 1F1 waits for 0F1 of rank 0, which stands behind 0B0",
    )


def test_a_stage_that_nobody_runs_is_named(violations):
    assert "stage 1 has no passes" in violations("0F0,0B0\n2F0,2B0\n")


def test_a_pass_listed_twice_in_an_excerpt_is_said(violations):
    assert violations("0F3,0F4\n1F3,1F3\n") == ("1F3 of rank 1 stands there twice",)


TIMETABLE = "rank,slot,op,stage,microbatch\n0,0,F,0,0\n0,{b},B,0,0\n1,{f},F,1,0\n1,2,B,1,0\n"


def test_a_timetable_keeps_one_slot_between_a_pass_and_whatever_needs_it(violations):
    assert violations(TIMETABLE.format(f=1, b=3)) == ()
    assert violations(TIMETABLE.format(f=0, b=3)) == (
        "1F0 runs in slot 0, but 0F0, which it needs, in slot 0",
    )
    assert violations(TIMETABLE.format(f=1, b=2)) == (
        "0B0 runs in slot 2, but 1B0, which it needs, in slot 2",
    )


def test_a_slot_of_a_timetable_takes_one_pass(violations):
    assert "rank 1 runs 1F0 + 1B0 in slot 2, which takes one pass" in violations(TIMETABLE.format(f=2, b=3))


def test_a_timetable_is_not_given_an_order_too(violations):
    with pytest.raises(StrategyError, match="must have only one of order and slot"):
        violations("rank,slot,order,op,stage,microbatch\n0,0,0,F,0,0\n")
