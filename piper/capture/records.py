"""What is noted while a model runs: values between segments, memory events, segments.

[Note: memory events]
A pass notes every storage that comes to life or dies while it runs. Its workspace is the highest sum of
bytes alive that it allocated, less what is kept at its end; a backward starts with the saved tensors alive.
Gradients of parameters count as workspace of the B that makes them: whoever accumulates them frees them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from math import prod

import torch

from cost_models.ops import Operation
from piper.annotation import Stack
from piper.capture.peak import Moment
from piper.capture.regions import Regions


@dataclass(slots=True, eq=False)
class Value:
    """A tensor that crosses, or may cross, between segments; identity is the object.

    Args:
        producer: segment, or -1 for a model input.
        order: its place among the values of the run, in order of production.
        storage: number of its storage.
        covers: whether it fills its storage.
        requires_grad: known once a segment consumes it.
    """

    producer: int
    order: int
    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    covers: bool
    requires_grad: bool = False


@dataclass(slots=True, eq=False)
class Step:
    """One operator as it ran, with the storages that it reads and writes; None: it launches no kernel."""

    name: str
    operation: Operation | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Keeper:
    """Why a storage is kept for backward: the tensor as it was first kept, and the operators that need it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: list[Step] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class PassRecord:
    """One pass of a segment: operators, and storages that come (+bytes) and go (-bytes), in order."""

    steps: list[Step] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    allocated: dict[int, int] = field(default_factory=dict)

    @property
    def operations(self) -> list[Operation]:
        """Return the kernels in order."""
        return [step.operation for step in self.steps if step.operation is not None]

    def allocate(self, storage: int, nbytes: int) -> None:
        """Note a new storage."""
        self.allocated[storage] = nbytes
        self.events.append((storage, nbytes))

    def free(self, storage: int, nbytes: int) -> None:
        """Note the end of a storage."""
        self.events.append((storage, -nbytes))

    def forget(self, storage: int) -> None:
        """Undo what was noted of a storage."""
        self.allocated.pop(storage, None)

    def keep(self, storage: int) -> None:
        """Let a storage that this pass made live to its end."""
        self.events = [(number, change) for number, change in self.events if number != storage or change > 0]

    def part(self, steps: Iterable[Step], *, made: Container[int], kept: Container[int]) -> PassRecord:
        """Return a part of the pass as a pass of its own.

        Args:
            steps: its operators, in order.
            made: storages that it makes.
            kept: storages that live to its end.
        """
        return PassRecord(
            steps=list(steps),
            events=[(n, change) for n, change in self.events if change > 0 or n not in kept],
            allocated={number: nbytes for number, nbytes in self.allocated.items() if number in made},
        )

    def moments(
        self, *, kept: Iterable[int], alive_before: dict[int, int], cut: Container[int]
    ) -> tuple[Moment, ...]:
        """Return at the begin and after each allocation the bytes beyond what is kept at the end.

        Args:
            kept: storages that live on.
            alive_before: storages with bytes that the pass finds.
            cut: storages that tensor parallelism cuts.
        """
        counted = self.allocated | alive_before
        at_end = {storage: self.allocated[storage] for storage in kept if storage in self.allocated}
        alive = -sum(at_end.values())
        whole = -sum(nbytes for storage, nbytes in at_end.items() if storage not in cut)
        found = [(alive, whole)]
        for storage, change in self.events:
            if storage in counted and (change < 0 or storage in self.allocated):
                alive += change
                whole += 0 if storage in cut else change
                if change > 0:
                    found.append((alive, whole))
        return tuple(found)


@dataclass(slots=True, eq=False)
class SegmentRecord:
    """One segment as it ran.

    Args:
        index: its number in the run.
        stack: its open scopes.
        parameters: names in order of first use.
        inputs: values from other segments, in order of first use.
        saved: storages kept for backward, with bytes.
        keepers: for each of them, why.
        grads_out: storages of gradients that earlier segments take.
        output_grads: storages of the gradients of its outputs, summed over all who take them.
        input_grads: storages of the gradients of inputs that it makes, or completes.
        parameter_grads: storages of gradients of parameters that it makes.
    """

    index: int
    stack: Stack
    forward: PassRecord = field(default_factory=PassRecord)
    backward: PassRecord = field(default_factory=PassRecord)
    parameters: dict[str, None] = field(default_factory=dict)
    inputs: dict[Value, None] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    keepers: dict[int, Keeper] = field(default_factory=dict)
    grads_out: dict[int, None] = field(default_factory=dict)
    output_grads: dict[Value, int] = field(default_factory=dict)
    input_grads: dict[Value, int] = field(default_factory=dict)
    parameter_grads: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class ReplayRecord:
    """A segment that equals one recorded elsewhere, apart from names and wiring.

    Args:
        index, stack, parameters, inputs: as in `SegmentRecord`.
        original: the recorded segment.
        regions: what tensor parallelism cuts in the recorded block.
        original_of: the original's value for each of this run's values that the segment produces.
        block: number of the replayed call, shared by its segments.
        extra_backward: additions of gradients that only this run makes.
    """

    index: int
    stack: Stack
    original: SegmentRecord
    regions: Regions
    parameters: dict[str, None]
    block: int
    inputs: dict[Value, None] = field(default_factory=dict)
    original_of: dict[Value, Value] = field(default_factory=dict)
    extra_backward: list[Operation] = field(default_factory=list)


Record = SegmentRecord | ReplayRecord


class ReplayMismatchError(Exception):
    """A replayed block was used in another way than it was recorded; the caller runs everything instead."""


def kept_inputs(record: SegmentRecord, kept: Container[int]) -> tuple[bool, ...]:
    """Return for each input whether it is among the storages `kept`."""
    return tuple(value.storage in kept for value in record.inputs)


def kept_outputs(outputs: Iterable[Value], kept: Container[int]) -> tuple[bool, ...]:
    """Return for each output whether it is among the storages `kept` (and is a buffer of its own)."""
    return tuple(value.covers and value.storage in kept for value in outputs)


def saved_inside(record: SegmentRecord, outputs: Iterable[Value]) -> dict[int, int]:
    """Return the storages kept for backward that are neither inputs nor outputs."""
    boundary = {value.storage for value in record.inputs}
    boundary |= {value.storage for value in outputs if value.covers}
    return {storage: nbytes for storage, nbytes in record.saved.items() if storage not in boundary}


def rest_of_inputs(record: SegmentRecord) -> dict[int, int]:
    """Return the bytes that a segment keeps of its inputs' buffers beside the inputs themselves.

    An input may be a part of a buffer (values out of one product for queries, keys and values): whoever keeps
    it keeps all of the buffer.
    """
    parts: dict[int, int] = {}
    for value in record.inputs:
        if value.storage in record.saved:
            size = prod(value.shape) * value.dtype.itemsize
            parts[value.storage] = parts.get(value.storage, 0) + size
    return {n: record.saved[n] - size for n, size in parts.items() if record.saved[n] > size}
