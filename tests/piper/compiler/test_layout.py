"""A row of slots becomes numbers: which compute task of the device each pass of a microbatch is."""

from __future__ import annotations

from piper.compiler.blocks import COMPUTE, Block, BlockKey, Entry
from piper.compiler.layout import RowNames, lay_out
from piper.graph import Node
from simulator.plan import TaskKind, TaskName


def block(kind: TaskKind, parts: int) -> tuple[BlockKey, Block]:
    entries = tuple(
        Entry(node=Node(uid=f"{kind.name}.{i}", kind=kind), anchor=i, lane=COMPUTE) for i in range(parts)
    )
    return (0, kind), Block(key=(0, kind), entries=entries)


def name(code: str) -> TaskName:
    return TaskName.parse(code)


BLOCKS = dict([block(TaskKind.F, 2), block(TaskKind.B, 4)])


def test_passes_that_follow_each_other_are_numbered_in_turn() -> None:
    row = [(name(code),) for code in ("0F0", "0F1", "0B0", "0B1")]
    layout = lay_out(RowNames.of(row), BLOCKS, num_microbatches=2)
    assert layout.placed[0, TaskKind.F].compute.tolist() == [[0, 1], [2, 3]]
    assert layout.placed[0, TaskKind.B].compute.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert layout.placed[0, TaskKind.B].slot.tolist() == [2, 3]
    assert layout.num_compute == 12
    assert layout.slot_of_compute(layout.placed[0, TaskKind.B].compute[1]).tolist() == [3, 3, 3, 3]


def test_passes_that_share_a_slot_are_interleaved_evenly() -> None:
    row = [(name("0F0"),), (name("0F1"), name("0B0")), (name("0B1"),)]
    layout = lay_out(RowNames.of(row), BLOCKS, num_microbatches=2)
    shared = dict.fromkeys(layout.placed[0, TaskKind.F].compute[1].tolist(), "F")
    shared |= dict.fromkeys(layout.placed[0, TaskKind.B].compute[0].tolist(), "B")
    assert "".join(shared[number] for number in sorted(shared)) == "BFBBFB"
    assert sorted(shared) == list(range(2, 8))


def test_a_microbatch_has_its_blocks_in_the_order_of_the_row() -> None:
    names = RowNames.of([(name("0F1"),), (name("0B1"), name("0F0"))])
    forward, backward = (0, TaskKind.F), (0, TaskKind.B)
    assert names.keys == (forward, backward)
    assert names.by_microbatch() == {0: (forward,), 1: (forward, backward)}
