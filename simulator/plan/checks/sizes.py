"""Buffers are large enough for what tasks put there, as far as a plan says what that is.

[Note: stated sizes]
* A receive, and what it allocates and reads; a send, a copy to or from the host and a collective, and what
  they allocate and read: the message must fit in there together. (A ring shift passes many pieces through
  its buffers, so that it is not asked.)
* All persistent parameters of a device hold its buckets and its frozen parameters.
* All persistent optimizer state holds the moments and masters of the buckets that stay on the device, where
  the optimizer is one of `MOMENTS`.
* All persistent gradients hold the input of a reduction of each bucket (from ZeRO 2 on: this rank's share).
* Everything else has a size that only capture knows, but what equal tasks of microbatches of one size
  allocate in all is the same, however it is divided (equal: kind, stage, segments, number of buffers, and
  microbatches with the same tasks on this device). Buckets do not count: which of the tasks that follow each
  other with one bucket allocates it, depends on the order.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from cost_models.ops import DTYPE_BYTES, kept_dtype
from simulator.plan.buffers import Bucket, MemoryClass
from simulator.plan.checks.contributions import TIED, levels_of
from simulator.plan.checks.facts import DeviceFacts, Facts, Indices
from simulator.plan.checks.violation import Violation
from simulator.plan.plan import IndexLists
from simulator.plan.states import MOMENTS
from simulator.plan.task import COLLECTIVE_KINDS, HOST_COPY_KINDS, NONE, RECV_KINDS, SEND_KINDS, TaskKind

Mixed = npt.NDArray[np.uint64]

_MOVING = np.array(
    sorted((SEND_KINDS | RECV_KINDS | HOST_COPY_KINDS | COLLECTIVE_KINDS) - {TaskKind.RING_SHIFT}),
    dtype=np.int64,
)
_EQUAL_COLUMNS = ("kind", "stage", "first_segment", "last_segment", "part", "phase", "edge", "bucket")
_CUT_GRADIENTS_ZERO = 2
_CUT_ZERO = 3
"""From ZeRO 3 on parameters are cut over ranks between their uses."""


def check_sizes(facts: Facts) -> list[Violation]:
    """Find buffers that are smaller than what their tasks put there."""
    found: list[Violation] = []
    for device in facts.devices:
        found += _messages(device)
        found += _parameters(facts, device)
        found += _optimizer(facts, device)
        found += _gradients(device)
        found += _odd(facts, device)
    return found


def _messages(device: DeviceFacts) -> Iterator[Violation]:
    """Yield tasks that move more bytes than their buffers hold."""
    table, buffers = device.plan.tasks, device.plan.buffers
    taken = np.maximum(_sums(table.reads, buffers.size_bytes), _sums(table.frees, buffers.size_bytes))
    named = _sums(table.allocates, buffers.size_bytes) + taken
    temporary = (~buffers.persistent).astype(np.int64)
    has_own = _sums(table.allocates, temporary) + _sums(table.reads, temporary) > 0
    transfer = np.isin(table.kind, list(SEND_KINDS | RECV_KINDS))
    stated = has_own | (transfer & (not buffers.persistent.all()))
    short = np.isin(table.kind, _MOVING) & stated & (named < table.size_bytes)
    for task in np.flatnonzero(short).tolist():
        name = device.name(task)
        message = (
            f"{name} moves {table.size_bytes[task]} bytes, but its buffers have {named[task]}"
            f"{_owners(device, task)}"
        )
        yield Violation(rule="buffer-too-small", message=message, tasks=(name,))


def _owners(device: DeviceFacts, task: int) -> str:
    numbers = dict.fromkeys((*device.plan.tasks.allocates.row(task), *device.plan.tasks.reads.row(task)))
    names = [device.plan.buffers.owner_of(number) for number in numbers]
    return f" ({', '.join(names)})" if names else ""


def _sums(lists: IndexLists, amounts: Indices) -> Indices:
    """Return by task the sum of an amount over the buffers that it lists."""
    totals = np.zeros(len(lists.values) + 1, dtype=np.int64)
    np.cumsum(amounts[lists.values], out=totals[1:])
    return np.asarray(totals[lists.starts[1:]] - totals[lists.starts[:-1]])


def _parameters(facts: Facts, device: DeviceFacts) -> Iterator[Violation]:
    """Yield devices whose parameter buffers cannot hold their parameters."""
    training = facts.plan.training
    table = device.plan.tasks
    reloaded = set(table.bucket[table.kind == TaskKind.RELOAD].tolist())
    buckets = [
        bucket
        for number, bucket in enumerate(device.plan.buckets)
        if bucket.kind != TIED and number not in reloaded
    ]
    needed = DTYPE_BYTES[kept_dtype(training.dtype)] * _frozen_numel(facts, device) + sum(
        _resident_numel(bucket) * training.states.parameter_bytes(bucket.zero) for bucket in buckets
    )
    held = _persistent_bytes(device, MemoryClass.PARAMETERS)
    if held < needed:
        message = (
            f"rank {device.rank} has {needed} bytes of parameters, but its parameter buffers have {held}"
        )
        yield Violation(rule="buffer-too-small", message=message, stages=device.plan.stages)


def _optimizer(facts: Facts, device: DeviceFacts) -> Iterator[Violation]:
    """Yield devices whose optimizer buffers cannot hold the state of their buckets."""
    training, table = facts.plan.training, device.plan.tasks
    away = set(table.bucket[np.isin(table.kind, sorted(HOST_COPY_KINDS))].tolist())
    if training.optimizer not in MOMENTS:
        return
    needed = sum(
        bucket.padded_numel
        // bucket.shard_count
        * training.states.optimizer_bytes(training.optimizer, bucket.zero)
        for number, bucket in enumerate(device.plan.buckets)
        if bucket.kind != TIED and number not in away
    )
    held = _persistent_bytes(device, MemoryClass.OPTIMIZER)
    if held < needed:
        message = (
            f"rank {device.rank} has {needed} bytes of optimizer state, but its optimizer buffers have {held}"
        )
        yield Violation(rule="buffer-too-small", message=message, stages=device.plan.stages)


def _resident_numel(bucket: Bucket) -> int:
    shards = bucket.shard_count if bucket.zero >= _CUT_ZERO else 1
    return bucket.padded_numel // shards


def _frozen_numel(facts: Facts, device: DeviceFacts) -> int:
    """Return the frozen parameters of a device; 0 where they are cut over ranks, so that we cannot tell."""
    mesh = device.plan.mesh or facts.plan.mesh
    if mesh.size("tp") * mesh.size("ep") * mesh.size("etp") > 1:
        return 0
    segments = facts.passes[device.rank].segments.tolist()
    used = {name for segment in segments for name in facts.plan.segments[segment].parameters}
    return sum(one.numel for one in facts.plan.parameters if one.name in used and not one.trainable)


def _persistent_bytes(device: DeviceFacts, *classes: MemoryClass) -> int:
    buffers = device.plan.buffers
    chosen = buffers.persistent & np.isin(buffers.memory_class, [int(one) for one in classes])
    return int(buffers.size_bytes[chosen].sum())


def _gradients(device: DeviceFacts) -> Iterator[Violation]:
    """Yield devices whose gradient buffers cannot hold what their reductions take, or add up."""
    table = device.plan.tasks
    firsts = {
        int(levels[0][0]): bucket.shard_count if bucket.zero >= _CUT_GRADIENTS_ZERO else 1
        for number, bucket in enumerate(device.plan.buckets)
        if bucket.kind != TIED and (levels := levels_of(device, number))
    }
    needed = sum(int(table.size_bytes[task]) // shards for task, shards in firsts.items())
    held = _persistent_bytes(device, MemoryClass.GRADIENTS, MemoryClass.BUCKETS)
    if held < needed:
        names = device.names(list(firsts))
        message = (
            f"rank {device.rank} reduces {needed} bytes of gradients ({', '.join(names)}), "
            f"but its gradient buffers have {held}"
        )
        yield Violation(rule="buffer-too-small", message=message, tasks=names)


def _odd(facts: Facts, device: DeviceFacts) -> Iterator[Violation]:
    """Yield tasks that allocate other sizes than equal tasks of other microbatches."""
    table, lists = device.plan.tasks, device.plan.tasks.allocates
    own = (device.plan.buffers.memory_class != MemoryClass.BUCKETS).astype(np.int64)
    counts = _sums(lists, own)
    tasks = np.flatnonzero((table.microbatch != NONE) & (counts > 0))
    alike = _microbatch_classes(facts, device)[table.microbatch[tasks]]
    key = _mixed([getattr(table, name)[tasks] for name in _EQUAL_COLUMNS] + [counts[tasks], alike])
    content = _sums(lists, device.plan.buffers.size_bytes * own)[tasks]
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    mixed_groups = np.unique(group[content != content[first[group]]])
    for number in mixed_groups.tolist():
        yield from _minority(device, tasks[group == number], content[group == number])


def _minority(device: DeviceFacts, tasks: Indices, content: Indices) -> Iterator[Violation]:
    """Yield the tasks of a group whose allocations are not the usual ones."""
    kinds, kind_of, counts = np.unique(content, return_inverse=True, return_counts=True)
    usual = int(np.argmax(counts))
    example = int(tasks[kind_of == usual][0])
    for kind in range(len(kinds)):
        if kind == usual:
            continue
        odd = int(tasks[kind_of == kind][0])
        names = device.names((odd, example))
        message = (
            f"{names[0]} allocates {_allocated(device, odd)} bytes, but {device.codes[example]}, which does "
            f"the same for another microbatch of that size, {_allocated(device, example)}"
        )
        yield Violation(rule="buffer-size", message=message, tasks=names)


def _allocated(device: DeviceFacts, task: int) -> str:
    sizes = device.plan.buffers.size_bytes
    return " + ".join(str(int(sizes[buffer])) for buffer in device.plan.tasks.allocates.row(task))


def _microbatch_classes(facts: Facts, device: DeviceFacts) -> Indices:
    """Return by microbatch a number that is equal for those of one size with the same tasks.

    Collectives of buckets do not count: they may serve several microbatches, of which they name one.
    """
    table = device.plan.tasks
    stages = len(facts.homes) + 1
    rows = np.flatnonzero((table.microbatch != NONE) & (table.bucket == NONE))
    kinds = table.kind[rows] * stages + table.stage[rows] + 1
    mixing = _mixing(len(TaskKind) * stages)
    count = facts.plan.training.num_microbatches
    tasks_of = np.zeros(count, dtype=np.uint64)
    np.add.at(tasks_of, table.microbatch[rows], mixing[kinds])
    sizes = np.array(facts.plan.training.micro_batch_sizes, dtype=np.uint64)
    return np.unique(np.stack([sizes, tasks_of]), axis=1, return_inverse=True)[1].ravel()


def _mixed(columns: list[Indices]) -> Mixed:
    """Return one number per row that differs, but for chance (2^-64), where any column differs."""
    weights = _mixing(len(columns))
    total = np.zeros(len(columns[0]), dtype=np.uint64)
    for weight, column in zip(weights, columns, strict=True):
        total += weight * (column + 2).astype(np.uint64)
    return total


def _mixing(count: int) -> Mixed:
    """Return odd multipliers without pattern, always the same ones.

    Source: the output function of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
    generators").
    """
    number = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (number ^ (number >> np.uint64(31))) | np.uint64(1)
