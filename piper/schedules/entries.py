"""Lines of a schedule file in memory: passes that start together, or transfers of one group.

[Note: transfers between ranks]
The output of F on stage s goes to stage s + 1, the input's gradient (B, BI) to stage s - 1, where these
stages lie on another rank: `sSEND_Fm` there meets `(s+1)RECV_Fm`, `sSEND_Bm` meets `(s-1)RECV_Bm`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_models.errors import check_invariant
from piper.schedules.copies import Copies
from piper.schedules.rows import Rows, Slot
from simulator.plan.task import NONE, RECV_KINDS, TaskKind, TaskName

PASS_LETTERS = {
    "F": TaskKind.F,
    "B": TaskKind.B,
    "I": TaskKind.BI,
    "W": TaskKind.BW,
    "BI": TaskKind.BI,
    "BW": TaskKind.BW,
}
"""Letters of passes in files: torch's I and W are our BI and BW; both are read."""

TRANSFER_KINDS = {
    kind.name: kind for kind in (TaskKind.SEND_F, TaskKind.RECV_F, TaskKind.SEND_B, TaskKind.RECV_B)
}
LISTED_KINDS = PASS_LETTERS | TRANSFER_KINDS
NOT_KEPT = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""Tasks of torch's files that follow from the strategy here: read, and left out."""

_PARTNER = {
    TaskKind.SEND_F: (TaskKind.RECV_F, 1),
    TaskKind.RECV_F: (TaskKind.SEND_F, -1),
    TaskKind.SEND_B: (TaskKind.RECV_B, -1),
    TaskKind.RECV_B: (TaskKind.SEND_B, 1),
}
"""Kind at the other end of a transfer, and how far away its stage is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A send or a receive.

    Args:
        task: `2SEND_F0`: of the result of stage 2's F; `2RECV_B0`: of what stage 2's backward needs.
        peer: pipeline rank at the other end, or NONE where the file does not say.
        tensor: instead of stage and microbatch, the name of what is moved.
    """

    task: TaskName
    peer: int = NONE
    tensor: str = ""

    @property
    def receives(self) -> bool:
        """Tell a receive from a send."""
        return self.task.kind in RECV_KINDS

    @property
    def code(self) -> str:
        """Return how messages name it."""
        if self.tensor:
            return f"{'recv' if self.receives else 'send'} {self.tensor}"
        return self.task.code

    def partner(self, rank: int) -> Transfer:
        """Return the other end of a transfer that stands on `rank`."""
        kind, step = _PARTNER[self.task.kind]
        stage = self.task.stage if self.tensor else self.task.stage + step
        task = TaskName(kind=kind, stage=stage, microbatch=self.task.microbatch)
        return Transfer(task=task, peer=rank if self.tensor else NONE, tensor=self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a rank starts at once: a slot of passes, or a group of transfers; never both.

    Args:
        passes: passes that overlap, usually one.
        transfers: transfers that one call posts, usually one.
        line: of the file, from 1; 0 where there is no file.
        slot: when the passes run, counted in slots of one pass each; NONE where the file does not say.
    """

    passes: Slot = ()
    transfers: tuple[Transfer, ...] = ()
    line: int = 0
    slot: int = NONE

    @property
    def code(self) -> str:
        """Return how messages name it."""
        return " + ".join([*(task.code for task in self.passes), *(move.code for move in self.transfers)])


Entries = tuple[tuple[Entry, ...], ...]
"""By pipeline rank, in order."""


def entries_of(rows: Rows) -> Entries:
    """Return rows as entries, without transfers."""
    return tuple(tuple(Entry(passes=slot) for slot in row) for row in rows)


def with_transfers(rows: Rows, *, stages: Sequence[Sequence[int]], copies: int = 1) -> Entries:
    """List the transfers of rows that can run: a send right behind its pass, the receive in the same moment.

    Ranks are visited in turn, each runs one slot if what it needs has been computed or received; the receive
    joins the other rank's list when the send joins this one's. So all lists agree on one order of transfers,
    and no rank waits for another in a circle. See [Note: transfers between ranks].
    """
    owner = {stage: rank for rank, held in enumerate(stages) for stage in held}
    order = Copies(num_stages=len(owner), count=copies)
    found: list[list[Entry]] = [[] for _ in rows]
    done: _Inputs = set()
    place = [0] * len(rows)
    while any(place[rank] < len(row) for rank, row in enumerate(rows)):
        before = sum(place)
        for rank, row in enumerate(rows):
            if place[rank] < len(row) and _is_ready(row[place[rank]], rank, order, done=done):
                slot = row[place[rank]]
                place[rank] += 1
                found[rank].append(Entry(passes=slot))
                for task in slot:
                    _hand_over(task, rank, order, owner=owner, found=found, done=done)
        check_invariant(sum(place) > before, "rows that can run are stuck")
    return tuple(tuple(row) for row in found)


_Inputs = set[tuple[int, bool, int, int]]
"""What ranks have from other stages: rank, whether it is a gradient, stage that needs it, microbatch."""


def _is_ready(slot: Slot, rank: int, order: Copies, *, done: _Inputs) -> bool:
    """Tell whether the rank has the inputs of a slot from other stages."""
    return all(
        (rank, task.kind is not TaskKind.F, task.stage, task.microbatch) in done
        for task in slot
        if task.kind is not TaskKind.BW
        and order.goal(task.stage, forward=task.kind is not TaskKind.F) != NONE
    )


def _hand_over(
    task: TaskName,
    rank: int,
    order: Copies,
    *,
    owner: Mapping[int, int],
    found: list[list[Entry]],
    done: _Inputs,
) -> None:
    """Note that the next stage has its input, and list the transfer if it lies on another rank."""
    forward = task.kind is TaskKind.F
    goal = order.goal(task.stage, forward=forward)
    if task.kind is TaskKind.BW or goal == NONE:
        return
    done.add((owner[goal], not forward, goal, task.microbatch))
    if owner[goal] != rank:
        kind = TaskKind.SEND_F if forward else TaskKind.SEND_B
        send = Transfer(task=TaskName(kind=kind, stage=task.stage, microbatch=task.microbatch))
        receive = send.partner(rank)
        found[rank].append(Entry(transfers=(Transfer(task=send.task, peer=owner[goal]),)))
        found[owner[goal]].append(Entry(transfers=(Transfer(task=receive.task, peer=rank),)))
