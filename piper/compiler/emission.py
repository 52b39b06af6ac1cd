"""`Emission`: the plan of one pipeline rank under construction; the emitting functions add to it in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from piper.compiler.columns import Numbers, TaskColumns
from piper.compiler.layout import Layout, RowNames, lay_out
from piper.compiler.liveness import Buffer
from piper.compiler.receives import Transfers
from piper.compiler.templates import DeviceTemplates
from piper.graph import Graph, Node
from simulator.plan import COLLECTIVE_KINDS, NONE, Bucket, BufferTable, TaskKind, TaskName


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instances:
    """The tasks of one template: int64 [tasks] each.

    Args:
        tasks: their numbers.
        compute: the compute numbers that they are, follow or serve.
        microbatches: theirs (NONE: once per step).
    """

    tasks: Numbers
    compute: Numbers
    microbatches: Numbers


@dataclass(kw_only=True)
class Emission:
    """Tasks and buffers of one device; used once.

    Args:
        templates: of the device.
        row: its slots.
        sizes: sequences of each microbatch of a replica.
        local_groups: names of rank groups whose members are all on one pipeline rank.
        ahead: copies to the device, and the compute numbers before which they are dispatched.
    """

    templates: DeviceTemplates
    row: Sequence[Sequence[TaskName]]
    sizes: tuple[int, ...]
    local_groups: frozenset[str]

    columns: TaskColumns = field(default_factory=TaskColumns)
    instances: dict[str, list[Instances]] = field(default_factory=dict)
    sent: dict[tuple[TaskKind, int], list[Transfers]] = field(default_factory=dict)
    received: dict[tuple[TaskKind, int], list[Transfers]] = field(default_factory=dict)
    ahead: list[tuple[Numbers, Numbers]] = field(default_factory=list)
    num_buffers: int = 0
    _labels: dict[str, int] = field(default_factory=dict)
    _buffers: list[Numbers] = field(default_factory=list)

    @property
    def graph(self) -> Graph:
        """Return the graph after all passes; its rows and microbatches may be others."""
        return self.templates.graph

    @property
    def pipeline_rank(self) -> int:
        """Return whose plan it is."""
        return self.templates.pipeline_rank

    @cached_property
    def layout(self) -> Layout:
        """Return where each block of the row stands."""
        num_compute = {key: len(self.templates.maker.compute(key)) for key in self.names.keys}
        return lay_out(self.names, num_compute, num_microbatches=len(self.sizes))

    @cached_property
    def names(self) -> RowNames:
        """Return the tasks of the row as columns."""
        return RowNames.of(self.row)

    @cached_property
    def compute_task(self) -> Numbers:
        """Return the task of every compute number, int64 [compute tasks]; filled while tasks are added."""
        return np.full(self.layout.num_compute, NONE, dtype=np.int64)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets of this device."""
        return self.graph.buckets[self.pipeline_rank]

    @cached_property
    def bucket_number(self) -> Mapping[str, int]:
        """Return the position of each bucket by name."""
        return {bucket.name: i for i, bucket in enumerate(self.buckets)}

    def stream(self, node: Node) -> int:
        """Return the number of a node's stream."""
        return self.templates.streams[node.stream]

    def group(self, node: Node) -> int:
        """Return the number of a collective's rank group, or NONE."""
        return self.templates.groups[node.group] if node.kind in COLLECTIVE_KINDS else NONE

    def register(self, uid: str, *, tasks: Numbers, compute: Numbers, microbatches: Numbers) -> None:
        """Remember tasks of a template."""
        found = Instances(tasks=tasks, compute=compute, microbatches=microbatches)
        self.instances.setdefault(uid, []).append(found)

    def add_buffers(
        self, buffers: Sequence[Buffer], *, microbatches: Numbers, persistent: bool = False
    ) -> Numbers:
        """Add each buffer once per microbatch and return their numbers, int64 [buffers, microbatches]."""
        labels = [self._labels.setdefault(b.label, len(self._labels)) for b in buffers]
        rows = [(b.size_bytes, int(b.memory_class), persistent) for b in buffers]
        columns = np.empty((5, len(buffers), len(microbatches)), dtype=np.int64)
        columns[:3] = np.array(rows, dtype=np.int64).reshape(-1, 3).T[:, :, None]
        columns[3] = np.array(labels, dtype=np.int64)[:, None]
        columns[4] = microbatches
        self._buffers.append(columns.reshape(5, -1))
        first, self.num_buffers = self.num_buffers, self.num_buffers + columns[0].size
        return np.arange(first, self.num_buffers, dtype=np.int64).reshape(columns[0].shape)

    def buffer_table(self) -> BufferTable:
        """Return all buffers as columns."""
        size, memory_class, persistent, owner, microbatch = np.concatenate(self._buffers, axis=1)
        return BufferTable(
            size_bytes=size,
            memory_class=memory_class.astype(np.int8),
            persistent=persistent.astype(np.bool_),
            owner=owner,
            microbatch=microbatch,
            labels=tuple(self._labels),
        )
