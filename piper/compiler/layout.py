"""`Layout`: when each block of a device is dispatched, from its order row.

[Note: compute numbers]
All compute tasks of a device are numbered in the order of its row. The blocks of a slot with one pass
follow each other; passes that share a slot are interleaved evenly, so that the exchanges of one run while
the other computes; parts of one stage and microbatch in a slot count as one and follow each other.
Everything else is dispatched next to a compute task (`Entry.anchor`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from piper.compiler.blocks import BlockKey
from piper.compiler.columns import Numbers
from simulator.plan import NONE, TaskKind, TaskName


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowNames:
    """The tasks of a row as columns, int64 [tasks] each.

    Args:
        keys: the blocks that the row has, in order of first appearance.
        key: of each task, its place in `keys`.
        microbatch, slot: of each task.
    """

    keys: tuple[BlockKey, ...]
    key: Numbers
    microbatch: Numbers
    slot: Numbers

    @classmethod
    def of(cls, row: Sequence[Sequence[TaskName]]) -> RowNames:
        """Return the columns of a row."""
        names = [name for slot in row for name in slot]
        kinds = np.array([name.kind for name in names], dtype=np.int64)
        code = np.array([name.stage for name in names], dtype=np.int64) * _KINDS + kinds
        parts = np.array([name.part for name in names], dtype=np.int64) - NONE
        num_parts = int(parts.max(initial=0)) + 1
        code = code * num_parts + parts
        distinct, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return cls(
            keys=tuple(
                (c // num_parts // _KINDS, TaskKind(c // num_parts % _KINDS), c % num_parts + NONE)
                for c in distinct[order].tolist()
            ),
            key=place[inverse],
            microbatch=np.array([name.microbatch for name in names], dtype=np.int64),
            slot=np.repeat(np.arange(len(row)), [len(slot) for slot in row]),
        )

    def by_microbatch(self) -> dict[int, tuple[BlockKey, ...]]:
        """Return the blocks of each microbatch that the row has, in the order of the row."""
        order = np.argsort(self.microbatch, kind="stable")
        found, starts = np.unique(self.microbatch[order], return_index=True)
        parts = np.split(self.key[order], starts[1:])
        alike: dict[bytes, tuple[BlockKey, ...]] = {}
        for part in parts:
            if part.tobytes() not in alike:
                alike[part.tobytes()] = tuple(self.keys[number] for number in part.tolist())
        return {m: alike[part.tobytes()] for m, part in zip(found.tolist(), parts, strict=True)}


_KINDS = max(TaskKind) + 1


def lay_out(names: RowNames, num_compute: Mapping[BlockKey, int], *, num_microbatches: int) -> Layout:
    """Return where every block of a row stands, from the number of its compute tasks."""
    sizes = np.array([num_compute[key] for key in names.keys], dtype=np.int64)
    num_slots = int(names.slot.max(initial=-1)) + 1
    lengths = np.zeros(num_slots, dtype=np.int64)
    np.add.at(lengths, names.slot, sizes[names.key])
    first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    slot_of = np.full((len(names.keys), num_microbatches), NONE, dtype=np.int64)
    slot_of[names.key, names.microbatch] = names.slot
    compute = [
        first[slot_of[i]][:, None] + np.arange(size, dtype=np.int64)[None, :]
        for i, size in enumerate(sizes.tolist())
    ]
    _interleave(names, sizes.tolist(), first, compute=compute)
    return Layout(
        placed={key: Placed(slot=slot_of[i], compute=compute[i]) for i, key in enumerate(names.keys)},
        first_compute=first,
    )


def _interleave(names: RowNames, sizes: Sequence[int], first: Numbers, *, compute: Sequence[Numbers]) -> None:
    """Set the numbers of passes that share a slot: spread evenly, ties in the order of the slot."""
    offsets: dict[tuple[tuple[int, int], ...], list[Numbers]] = {}
    starts = np.flatnonzero(np.diff(names.slot, prepend=-1))
    ends = np.append(starts[1:], len(names.slot))
    for start, end in zip(*(bound[ends - starts > 1].tolist() for bound in (starts, ends)), strict=True):
        kinds = tuple(names.key[start:end].tolist())
        microbatches = names.microbatch[start:end].tolist()
        members = tuple(zip(kinds, _together(names, kinds, microbatches), strict=True))
        if members not in offsets:
            offsets[members] = _spread([(sizes[key], member) for key, member in members])
        begin = first[names.slot[start]]
        for key, microbatch, offset in zip(kinds, microbatches, offsets[members], strict=True):
            compute[key][microbatch] = begin + offset


def _together(names: RowNames, kinds: Sequence[int], microbatches: Sequence[int]) -> list[int]:
    """Return for each block of a slot a number, the same for those of one stage and microbatch."""
    passes = [(names.keys[kind][0], m) for kind, m in zip(kinds, microbatches, strict=True)]
    number = {found: i for i, found in enumerate(dict.fromkeys(passes))}
    return [number[found] for found in passes]


def _spread(blocks: Sequence[tuple[int, int]]) -> list[Numbers]:
    """Return the numbers of each block (compute tasks, member of the slot); members are interleaved."""
    totals: Counter[int] = Counter()
    for size, member in blocks:
        totals[member] += size
    places = [((i + 0.5) / total, member, i) for member, total in totals.items() for i in range(total)]
    numbers: dict[int, list[int]] = {member: [] for member in totals}
    for number, (_, member, _) in enumerate(sorted(places)):
        numbers[member].append(number)
    found: list[Numbers] = []
    for size, member in blocks:
        found.append(np.array(numbers[member][:size], dtype=np.int64))
        del numbers[member][:size]
    return found
