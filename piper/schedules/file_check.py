"""What is wrong with a schedule file: passes lost or done twice, transfers without a partner, circular waits.

[Note: rendezvous]
A rank does what its list says in order. A send ends when the other rank has come to the receive, a receive
when the other rank has come to the send; the transfers of one group end together. No message is buffered, so
what passes here cannot hang where messages are.
[Note: timetables]
Where a file gives slots, each takes one pass, whose result any rank may use from the next slot on. Rows that
can run do not make every timetable of them possible.
[Note: excerpts]
A file in which no stage runs its first microbatch forward shows a part of a step: what it does not list is
taken as done, and nothing is reported as missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from piper.schedules.copies import Copies
from piper.schedules.entries import Entry, Transfer
from piper.schedules.rows import pass_violations
from piper.schedules.schedule_file import ScheduleFile
from simulator.plan.task import NONE, TaskKind, TaskName

Place = tuple[int, int]
"""Rank, and position in its list."""
_Message = tuple[object, ...]
_Pass = tuple[TaskKind, int, int]


def file_violations(file: ScheduleFile) -> tuple[str, ...]:
    """Return every reason why a schedule file is none; see [Note: rendezvous] and [Note: excerpts]."""
    found: list[str] = []
    if file.is_excerpt:
        found += _repeated_passes(file)
    else:
        stages = file.stage_of_rank
        count = 1 + max(stage for held in stages for stage in held)
        listed = {stage for held in stages for stage in held}
        found += [f"stage {stage} has no passes" for stage in range(count) if stage not in listed]
        found = found or list(
            pass_violations(
                file.rows, stages=stages, num_microbatches=file.num_microbatches, copies=file.copies
            )
        )
    found += _broken_timetable(file)
    ends = _ends(file)
    found += _bad_transfers(file, ends)
    if file.lists_transfers and not file.is_excerpt and not found:
        found += _missing_transfers(file, ends)
    return (*found, *_circular_waits(file, ends))


def _repeated_passes(file: ScheduleFile) -> Iterator[str]:
    seen: set[TaskName] = set()
    for rank, row in enumerate(file.rows):
        for task in (task for slot in row for task in slot):
            if task in seen:
                yield f"{task.code} of rank {rank} stands there twice"
            seen.add(task)


def _broken_timetable(file: ScheduleFile) -> Iterator[str]:
    """Yield slots with two passes, and passes before their inputs; see [Note: timetables]."""
    slots: dict[_Pass, int] = {}
    for rank, row in enumerate(file.entries):
        for entry in row:
            if entry.slot != NONE and len(entry.passes) > 1:
                yield f"rank {rank} runs {entry.code} in slot {entry.slot}, which takes one pass"
            slots.update({(task.kind, task.stage, task.microbatch): entry.slot for task in entry.passes})
    for task, slot in slots.items():
        for need in _inputs(*task):
            if need in slots and NONE not in {slot, slots[need]} and slot <= slots[need]:
                code, other = (TaskName(kind=k, stage=s, microbatch=m).code for k, s, m in (task, need))
                yield f"{code} runs in slot {slot}, but {other}, which it needs, in slot {slots[need]}"


def _inputs(kind: TaskKind, stage: int, microbatch: int) -> Iterator[_Pass]:
    """Yield the passes whose results a pass uses, those of the stage itself and of its neighbour."""
    if kind is TaskKind.F:
        yield TaskKind.F, stage - 1, microbatch
    elif kind is TaskKind.BW:
        yield TaskKind.BI, stage, microbatch
    else:
        yield TaskKind.F, stage, microbatch
        yield TaskKind.B, stage + 1, microbatch
        yield TaskKind.BI, stage + 1, microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Where the two ends of each message stand."""

    sends: dict[_Message, list[Place]] = field(default_factory=dict)
    receives: dict[_Message, list[Place]] = field(default_factory=dict)


def _ends(file: ScheduleFile) -> _Ends:
    ends = _Ends()
    for rank, row in enumerate(file.entries):
        for position, entry in enumerate(row):
            for transfer in entry.transfers:
                side = ends.receives if transfer.receives else ends.sends
                side.setdefault(_message(transfer, rank), []).append((rank, position))
    return ends


def _message(transfer: Transfer, rank: int) -> _Message:
    """Return what both ends of a transfer share."""
    send = transfer.partner(rank) if transfer.receives else transfer
    if transfer.tensor:
        source, target = (transfer.peer, rank) if transfer.receives else (rank, transfer.peer)
        return transfer.tensor, source, target
    return send.task.kind, send.task.stage, send.task.microbatch


def _bad_transfers(file: ScheduleFile, ends: _Ends) -> Iterator[str]:
    """Yield transfers that stand twice, on the wrong rank, or name the wrong peer."""
    owner = {stage: rank for rank, held in enumerate(file.stage_of_rank) for stage in held}
    for side in (ends.sends, ends.receives):
        for places in side.values():
            if len(places) > 1:
                yield f"{_shown(file, places[1])} of rank {places[1][0]} stands there twice"
    for rank, row in enumerate(file.entries):
        for transfer in (move for entry in row for move in entry.transfers if not move.tensor):
            home, other = (owner.get(end.task.stage, NONE) for end in (transfer, transfer.partner(rank)))
            if home not in {NONE, rank}:
                yield f"{transfer.code} stands on rank {rank}, but stage {transfer.task.stage} is on {home}"
            if NONE not in {other, transfer.peer} and other != transfer.peer:
                stage = transfer.partner(rank).task.stage
                named = f"{transfer.code} of rank {rank} names rank {transfer.peer}"
                yield f"{named}, but stage {stage} is on {other}"


def _missing_transfers(file: ScheduleFile, ends: _Ends) -> Iterator[str]:
    """Yield what crosses from rank to rank without a send and a receive, and what has only one of them."""
    for one, other in ((ends.sends, ends.receives), (ends.receives, ends.sends)):
        for message, places in one.items():
            if message not in other:
                yield f"{_shown(file, places[0])} of rank {places[0][0]} has no other end in the file"
    owner = {stage: rank for rank, held in enumerate(file.stage_of_rank) for stage in held}
    order = Copies(num_stages=len(owner), count=file.copies)
    for task in (task for row in file.rows for slot in row for task in slot if task.kind is not TaskKind.BW):
        forward = task.kind is TaskKind.F
        goal = order.goal(task.stage, forward=forward)
        kind = TaskKind.SEND_F if forward else TaskKind.SEND_B
        crosses = goal in owner and owner[goal] != owner[task.stage]
        if crosses and (kind, task.stage, task.microbatch) not in ends.sends:
            yield f"the result of {task.code} is not sent to stage {goal} on rank {owner[goal]}"


def _circular_waits(file: ScheduleFile, ends: _Ends) -> list[str]:
    """Do what the lists say as far as they can go; return the circles in which ranks are stuck."""
    return _Run(file=file, ends=ends).circles()


class _Run:
    """All ranks at once, each at one place of its list."""

    def __init__(self, *, file: ScheduleFile, ends: _Ends) -> None:
        self.file = file
        self.neighbours = _neighbours(ends)
        self.members = _members(self.neighbours)
        self.passes = _places_of_passes(file)
        self.received = {message: places[0] for message, places in ends.receives.items()}
        self.at = [0] * len(file.entries)
        self._go()

    def circles(self) -> list[str]:
        """Return each circle once, told from its lowest rank."""
        found: dict[tuple[int, ...], str] = {}
        for first in (rank for rank in range(len(self.at)) if self._head(rank) is not None):
            path: list[int] = []
            rank = first
            while rank not in path:
                path.append(rank)
                rank = self._blocker(rank)[0]
            circle = path[path.index(rank) :]
            turn = circle.index(min(circle))
            circle = circle[turn:] + circle[:turn]
            found.setdefault(tuple(circle), "; ".join(map(self._told, circle)))
        how = "circular wait with every send a rendezvous" if self.file.lists_transfers else "circular wait"
        return [f"{how}: {text}" for text in found.values()]

    def _go(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.at)):
                while self._head(rank) is not None and self._blocker_or_none(rank) is None:
                    for member, _ in self.members.get((rank, self.at[rank]), [(rank, 0)]):
                        self.at[member] += 1
                    moved = True

    def _head(self, rank: int) -> Entry | None:
        row = self.file.entries[rank]
        return row[self.at[rank]] if self.at[rank] < len(row) else None

    def _done(self, place: Place) -> bool:
        return self.at[place[0]] > place[1]

    def _blocker_or_none(self, rank: int) -> Place | None:
        """Return the place that the rank waits for: an input, or the other end of a transfer."""
        entry = self.file.entries[rank][self.at[rank]]
        here = (rank, self.at[rank])
        for need in self._needs(entry):
            if not self._done(need):
                return need
        for member in self.members.get(here, ()):
            if self.at[member[0]] != member[1]:
                return member
            for need in self._needs(self.file.entries[member[0]][member[1]]):
                if not self._done(need):
                    return need
        return None

    def _blocker(self, rank: int) -> Place:
        found = self._blocker_or_none(rank)
        return (rank, self.at[rank]) if found is None else found

    def _needs(self, entry: Entry) -> Iterator[Place]:
        """Yield where the inputs of an entry stand, as far as the file lists them."""
        for task in entry.passes:
            stage, microbatch = task.stage, task.microbatch
            if task.kind is TaskKind.BW:
                yield from self._listed((TaskKind.BI, stage, microbatch))
                continue
            if task.kind is not TaskKind.F:
                yield from self._listed((TaskKind.F, stage, microbatch))
            yield from self._input(task)
        for task in (move.task for move in entry.transfers if not move.tensor):
            if task.kind is TaskKind.SEND_F:
                yield from self._listed((TaskKind.F, task.stage, task.microbatch))
            elif task.kind is TaskKind.SEND_B:
                yield from self._gradient(task.stage, task.microbatch)

    def _input(self, task: TaskName) -> Iterator[Place]:
        """Yield where the input from another stage stands: its receive if one is listed, else its pass."""
        forward = task.kind is TaskKind.F
        before = task.stage - 1 if forward else task.stage + 1
        message = (TaskKind.SEND_F if forward else TaskKind.SEND_B, before, task.microbatch)
        if message in self.received:
            yield self.received[message]
        elif forward:
            yield from self._listed((TaskKind.F, before, task.microbatch))
        else:
            yield from self._gradient(before, task.microbatch)

    def _gradient(self, stage: int, microbatch: int) -> Iterator[Place]:
        yield from self._listed((TaskKind.B, stage, microbatch))
        yield from self._listed((TaskKind.BI, stage, microbatch))

    def _listed(self, wanted: _Pass) -> Iterator[Place]:
        if wanted in self.passes:
            yield self.passes[wanted]

    def _told(self, rank: int) -> str:
        """Say what a stuck rank waits for and why that does not come."""
        blocker = self._blocker(rank)
        through = "".join(
            f", which ends together with {_shown(self.file, place)} of rank {place[0]}"
            for place in self._path((rank, self.at[rank]), blocker)
        )
        through += "," if through else ""
        behind = _shown(self.file, (blocker[0], self.at[blocker[0]]))
        return (
            f"rank {rank} at {_shown(self.file, (rank, self.at[rank]))}{through} waits for "
            f"{_shown(self.file, blocker)} of rank {blocker[0]}, which stands behind {behind}"
        )

    def _path(self, start: Place, goal: Place) -> list[Place]:
        """Return the groups of transfers between two places that do not meet directly."""
        previous: dict[Place, Place] = {start: start}
        queue = deque([start])
        while queue and goal not in previous:
            place = queue.popleft()
            for near in self.neighbours.get(place, ()):
                if near not in previous:
                    previous[near] = place
                    queue.append(near)
        path: list[Place] = []
        place = previous.get(goal, start)
        while place != start:
            path.append(place)
            place = previous[place]
        return path[::-1]


def _places_of_passes(file: ScheduleFile) -> dict[_Pass, Place]:
    return {
        (task.kind, task.stage, task.microbatch): (rank, position)
        for rank, row in enumerate(file.entries)
        for position, entry in enumerate(row)
        for task in entry.passes
    }


def _neighbours(ends: _Ends) -> dict[Place, list[Place]]:
    """Return for each place the places at the other ends of its transfers."""
    found: dict[Place, list[Place]] = {}
    for message, sends in ends.sends.items():
        for send, receive in zip(sends, ends.receives.get(message, ()), strict=False):
            found.setdefault(send, []).append(receive)
            found.setdefault(receive, []).append(send)
    return found


def _members(neighbours: Mapping[Place, list[Place]]) -> dict[Place, list[Place]]:
    """Return for each place all places that end together with it, itself included."""
    found: dict[Place, list[Place]] = {}
    for first in neighbours:
        if first in found:
            continue
        members = [first]
        found[first] = members
        for place in members:
            for near in neighbours[place]:
                if near not in found:
                    found[near] = members
                    members.append(near)
    return found


def _shown(file: ScheduleFile, place: Place) -> str:
    return file.entries[place[0]][place[1]].code
