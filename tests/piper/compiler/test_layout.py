"""A row of slots becomes numbers: which compute task of the device each pass of a microbatch is."""

from __future__ import annotations

from piper.compiler.layout import RowNames, lay_out
from simulator.plan import NONE, TaskKind, TaskName


def name(code: str) -> TaskName:
    return TaskName.parse(code)


F, B = (0, TaskKind.F, NONE), (0, TaskKind.B, NONE)
SIZES = {F: 2, B: 4}


def test_passes_that_follow_each_other_are_numbered_in_turn() -> None:
    row = [(name(code),) for code in ("0F0", "0F1", "0B0", "0B1")]
    layout = lay_out(RowNames.of(row), SIZES, num_microbatches=2)
    assert layout.placed[F].compute.tolist() == [[0, 1], [2, 3]]
    assert layout.placed[B].compute.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert layout.placed[B].slot.tolist() == [2, 3]
    assert layout.num_compute == 12
    assert layout.slot_of_compute(layout.placed[B].compute[1]).tolist() == [3, 3, 3, 3]


def test_passes_that_share_a_slot_are_interleaved_evenly() -> None:
    row = [(name("0F0"),), (name("0F1"), name("0B0")), (name("0B1"),)]
    layout = lay_out(RowNames.of(row), SIZES, num_microbatches=2)
    shared = dict.fromkeys(layout.placed[F].compute[1].tolist(), "F")
    shared |= dict.fromkeys(layout.placed[B].compute[0].tolist(), "B")
    assert "".join(shared[number] for number in sorted(shared)) == "BFBBFB"
    assert sorted(shared) == list(range(2, 8))


def test_a_microbatch_has_its_blocks_in_the_order_of_the_row() -> None:
    names = RowNames.of([(name("0F1"),), (name("0B1"), name("0F0"))])
    assert names.keys == (F, B)
    assert names.by_microbatch() == {0: (F,), 1: (F, B)}


def test_parts_are_blocks_of_their_own() -> None:
    row = [(name("0F0/0"),), (name("0F1"),), (name("0F0/3"),)]
    first, second = (0, TaskKind.F, 0), (0, TaskKind.F, 3)
    names = RowNames.of(row)
    assert names.by_microbatch() == {0: (first, second), 1: (F,)}
    layout = lay_out(names, {first: 1, second: 2, F: 3}, num_microbatches=2)
    assert layout.placed[first].compute[0].tolist() == [0]
    assert layout.placed[F].compute[1].tolist() == [1, 2, 3]
    assert layout.placed[second].compute[0].tolist() == [4, 5]


def test_parts_of_a_microbatch_in_a_slot_follow_each_other_and_are_interleaved_as_one() -> None:
    row = [(name("0F1/0"), name("0B0"), name("0F1/3"))]
    first, second = (0, TaskKind.F, 0), (0, TaskKind.F, 3)
    layout = lay_out(RowNames.of(row), {first: 2, second: 2, B: 4}, num_microbatches=2)
    assert layout.placed[first].compute[1].tolist() == [0, 2]
    assert layout.placed[second].compute[1].tolist() == [4, 6]
    assert layout.placed[B].compute[0].tolist() == [1, 3, 5, 7]
