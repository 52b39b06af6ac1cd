"""`Layout`: when each block of a device is dispatched, from its order row.

[Note: compute numbers]
All compute tasks of a device are numbered in the order of its row. The blocks of a slot with one pass
follow each other; passes that share a slot are interleaved evenly, so that the exchanges of one run while
the other computes. Everything else is dispatched next to a compute task (`Entry.anchor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piper.compiler.blocks import Block, BlockKey
from piper.compiler.columns import Numbers
from simulator.plan import NONE, TaskName


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """The blocks of one key in the row.

    Args:
        slot: int64 [microbatches], the slot, or NONE where the microbatch has no such block.
        compute: int64 [microbatches, compute tasks], their numbers.
    """

    slot: Numbers
    compute: Numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A row as numbers.

    Args:
        placed: by block key.
        first_compute: int64 [slots + 1], number of the first compute task of each slot.
    """

    placed: dict[BlockKey, Placed]
    first_compute: Numbers

    @property
    def num_compute(self) -> int:
        """Return the number of compute tasks of a step."""
        return int(self.first_compute[-1])

    def slot_of_compute(self, compute: Numbers) -> Numbers:
        """Return the slots in which compute numbers lie."""
        return np.searchsorted(self.first_compute, compute, side="right") - 1


def lay_out(
    row: Sequence[Sequence[TaskName]], blocks: dict[BlockKey, Block], *, num_microbatches: int
) -> Layout:
    """Return where every block of a row stands."""
    keys = list(blocks)
    number = {key: i for i, key in enumerate(keys)}
    sizes = [blocks[key].num_compute for key in keys]
    slot_of = np.full((len(keys), num_microbatches), NONE, dtype=np.int64)
    lengths = np.zeros(len(row) + 1, dtype=np.int64)
    shared: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    at_key: list[int] = []
    at_microbatch: list[int] = []
    at_slot: list[int] = []
    for index, slot in enumerate(row):
        total = 0
        for name in slot:
            key = number[name.stage, name.kind]
            total += sizes[key]
            at_key.append(key)
            at_microbatch.append(name.microbatch)
            at_slot.append(index)
        lengths[index + 1] = total
        if len(slot) > 1:
            shared.append((index, tuple((number[n.stage, n.kind], n.microbatch) for n in slot)))
    first = np.cumsum(lengths)
    slot_of[at_key, at_microbatch] = at_slot
    compute = [
        first[slot_of[i]][:, None] + np.arange(sizes[i], dtype=np.int64)[None, :] for i in range(len(keys))
    ]
    _interleave(shared, sizes, first, compute=compute)
    return Layout(
        placed={key: Placed(slot=slot_of[i], compute=compute[i]) for key, i in number.items()},
        first_compute=first,
    )


def _interleave(
    shared: Sequence[tuple[int, tuple[tuple[int, int], ...]]],
    sizes: Sequence[int],
    first: Numbers,
    *,
    compute: Sequence[Numbers],
) -> None:
    """Set the numbers of passes that share a slot: spread evenly, ties in the order of the slot."""
    offsets: dict[tuple[int, ...], list[Numbers]] = {}
    for index, members in shared:
        kinds = tuple(key for key, _ in members)
        if kinds not in offsets:
            offsets[kinds] = _spread([sizes[key] for key in kinds])
        for (key, microbatch), offset in zip(members, offsets[kinds], strict=True):
            compute[key][microbatch] = first[index] + offset


def _spread(sizes: Sequence[int]) -> list[Numbers]:
    places = [((i + 0.5) / size, member, i) for member, size in enumerate(sizes) for i in range(size)]
    found = [np.zeros(size, dtype=np.int64) for size in sizes]
    for number, (_, member, i) in enumerate(sorted(places)):
        found[member][i] = number
    return found
