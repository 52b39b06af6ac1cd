"""`TaskKind` and `Task`: one entry of a device's dispatch list, and its code such as `2F0`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from simulator.errors import PlanError


class TaskKind(IntEnum):
    """What a task does. The value is its number in plan files; names are the letters of `Task.code`."""

    F = 0
    B = 1
    BI = 2
    BW = 3
    R = 4  # recompute a discarded forward
    SEND_F = 5  # an activation, downstream
    RECV_F = 6
    SEND_B = 7  # a gradient, upstream
    RECV_B = 8
    ALL_REDUCE = 9
    REDUCE_SCATTER = 10
    ALL_GATHER = 11
    ALL_TO_ALL = 12
    NORM = 13  # sum of squares of this rank's gradients
    UPDATE = 14
    RING_SHIFT = 15  # each member of a group sends to the next
    OFFLOAD = 16  # device -> host
    RELOAD = 17  # host -> device


COMPUTE_KINDS = frozenset(
    {TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.BW, TaskKind.R, TaskKind.NORM, TaskKind.UPDATE}
)
SEND_KINDS = frozenset({TaskKind.SEND_F, TaskKind.SEND_B})
RECV_KINDS = frozenset({TaskKind.RECV_F, TaskKind.RECV_B})
COLLECTIVE_KINDS = frozenset(
    {
        TaskKind.ALL_REDUCE,
        TaskKind.REDUCE_SCATTER,
        TaskKind.ALL_GATHER,
        TaskKind.ALL_TO_ALL,
        TaskKind.RING_SHIFT,
    }
)
HOST_COPY_KINDS = frozenset({TaskKind.OFFLOAD, TaskKind.RELOAD})
MATCHING_SEND = {TaskKind.RECV_F: TaskKind.SEND_F, TaskKind.RECV_B: TaskKind.SEND_B}

NONE = -1
"""The value of an integer field that does not apply to a task."""

_CODE = re.compile(
    r"(?P<stage>\d*)(?P<kind>[A-Z]+(?:_[A-Z]+)*)(?::(?P<phase>F|BI|BW|B|R))?(?P<microbatch>\d*)"
    r"(?:/(?P<part>\d+))?(?:@(?P<bucket>[a-z0-9]+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a device plan; `TaskTable` keeps the same fields as columns.

    Args:
        kind: what it does.
        stage: stage whose work this is, or NONE (whole device).
        microbatch: its microbatch, or NONE (once per step).
        first_segment, last_segment: compute: the run of model segments it covers, both included.
        part: compute: the first segment when the task covers only a part of its stage, else NONE.
            Transfers: the index of the edge in `Plan.edges` where the stage has several, else NONE.
            Exchanges and copies of a microbatch: the first segment of their region, or behind it the one
            after it; regrouping of what was received: as for transfers. Collectives of a bucket: the first
            segment of the task that they serve.
        phase: collectives and copies of a microbatch: what they serve (F, B, BI, BW or R); copies of
            parameters (not of optimizer state) around an update: F; else NONE.
        stream: index in `DevicePlan.streams`.
        work: index in `Plan.works` of what is computed, or NONE.
        peer: transfers: the pipeline rank at the other end.
        edge: transfers: index in `Plan.edges`.
        group: collectives: index in `Plan.groups`.
        bucket: index in `DevicePlan.buckets`, or NONE (NONE in an all-reduce: the gradient norm).
        size_bytes: bytes moved (transfer: the message; collective: as in `CollectiveKind`).
        waits: tasks of the same device (dispatch positions) that must have completed.
        previous_step_waits: the same, for tasks of the step before.
        allocates: buffers that come to life when it starts.
        reads: buffers that must be alive while it runs.
        frees: buffers that die when it completes.
    """

    kind: TaskKind
    stage: int = NONE
    microbatch: int = NONE
    first_segment: int = NONE
    last_segment: int = NONE
    part: int = NONE
    phase: int = NONE
    stream: int = 0
    work: int = NONE
    peer: int = NONE
    edge: int = NONE
    group: int = NONE
    bucket: int = NONE
    size_bytes: int = 0
    waits: tuple[int, ...] = ()
    previous_step_waits: tuple[int, ...] = ()
    allocates: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskName:
    """The identity of a task as text: stage, kind, phase, microbatch, part and bucket.

    `2F0` stage 2, forward, microbatch 0 · `2B0/5` only the part that begins at segment 5 ·
    `1REDUCE_SCATTER@dense0` a bucket's collective · `ALL_REDUCE@norm` the gradient norm ·
    `0ALL_GATHER:F3/5` the all-gather before segment 5 in the forward of microbatch 3.
    """

    kind: TaskKind
    stage: int = NONE
    microbatch: int = NONE
    part: int = NONE
    bucket: str = ""
    phase: int = NONE

    @property
    def code(self) -> str:
        """Return the text form; `TaskName.parse` is its inverse."""
        stage = "" if self.stage == NONE else str(self.stage)
        microbatch = "" if self.microbatch == NONE else str(self.microbatch)
        part = "" if self.part == NONE else f"/{self.part}"
        bucket = f"@{self.bucket}" if self.bucket else ""
        phase = "" if self.phase == NONE else f":{TaskKind(self.phase).name}"
        return f"{stage}{self.kind.name}{phase}{microbatch}{part}{bucket}"

    @classmethod
    def parse(cls, code: str) -> TaskName:
        """Read a code; raises `PlanError` for anything that `code` does not write."""
        match = _CODE.fullmatch(code)
        if match is None or match["kind"] not in TaskKind.__members__:
            raise PlanError(
                where="task code",
                field="code",
                value=code,
                rule="must be stage, kind, microbatch",
                fix=f"write for example 2F0 or 1SEND_B3; kinds: {', '.join(TaskKind.__members__)}",
            )
        return cls(
            kind=TaskKind[match["kind"]],
            stage=int(match["stage"] or NONE),
            microbatch=int(match["microbatch"] or NONE),
            part=int(match["part"] or NONE),
            bucket=match["bucket"] or "",
            phase=TaskKind[match["phase"]] if match["phase"] else NONE,
        )
