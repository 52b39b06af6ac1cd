"""`TaskColumns`: tasks added in blocks as arrays, sorted into dispatch order at the end.

Tasks get numbers in the order in which they are added; every reference (waits, buffers) uses these numbers.
`table` sorts by key, then by rank, then by number, and rewrites references to dispatch positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.plan import NONE, IndexLists, TaskTable

Numbers = npt.NDArray[np.int64]

SCALARS = (
    "kind", "stage", "microbatch", "first_segment", "last_segment", "part", "phase", "stream", "work",
    "peer", "edge", "group", "bucket", "size_bytes",
)  # fmt: skip
LISTS = ("waits", "previous_step_waits", "allocates", "reads", "frees")
_TASK_LISTS = ("waits", "previous_step_waits")
_ZERO = ("stream", "size_bytes")


@dataclass(kw_only=True)
class TaskColumns:
    """Tasks of one device under construction."""

    num_tasks: int = 0
    _scalars: dict[str, list[Numbers]] = field(default_factory=lambda: {name: [] for name in SCALARS})
    _keys: list[Numbers] = field(default_factory=list)
    _rows: dict[str, list[Numbers]] = field(default_factory=lambda: {name: [] for name in LISTS})
    _values: dict[str, list[Numbers]] = field(default_factory=lambda: {name: [] for name in LISTS})

    def add(self, fields: Mapping[str, Numbers | int], keys: Numbers) -> Numbers:
        """Add `keys.size` tasks; a field is a number for all or an array that broadcasts; missing: NONE.

        Args:
            fields: column name -> value.
            keys: dispatch keys [..., tasks], any shape.

        Returns the numbers of the tasks, in the shape of `keys`.
        """
        numbers = np.arange(self.num_tasks, self.num_tasks + keys.size, dtype=np.int64).reshape(keys.shape)
        self.num_tasks += keys.size
        for name in SCALARS:
            value = fields.get(name, 0 if name in _ZERO else NONE)
            if isinstance(value, int):
                self._scalars[name].append(np.full(keys.size, value, dtype=np.int64))
            else:
                self._scalars[name].append(np.broadcast_to(value, keys.shape).ravel())
        self._keys.append(keys.ravel())
        return numbers

    def link(self, name: str, tasks: Numbers, values: Numbers) -> None:
        """Add entries to a list column: pairs (task, value) of arrays of one shape."""
        self._rows[name].append(tasks.ravel())
        self._values[name].append(values.ravel())

    def keys(self) -> Numbers:
        """Return the dispatch key of every task so far."""
        return np.concatenate(self._keys) if self._keys else np.zeros(0, dtype=np.int64)

    def scalar(self, name: str) -> Numbers:
        """Return one column so far, by task number."""
        return np.concatenate(self._scalars[name])

    def table(self, keys: Numbers, rank: Numbers) -> TaskTable:
        """Return the tasks in dispatch order: by key, ties by rank, then by number.

        Args:
            keys, rank: int64 [tasks], by number.
        """
        order = np.lexsort((rank, keys))
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        scalars: dict[str, Any] = {
            name: np.concatenate(parts)[order] if parts else np.zeros(0, dtype=np.int64)
            for name, parts in self._scalars.items()
        }
        lists = {name: self._lists(name, position) for name in LISTS}
        columns: dict[str, Any] = scalars | lists
        return TaskTable(**columns)

    def _lists(self, name: str, position: Numbers) -> IndexLists:
        starts = np.zeros(len(position) + 1, dtype=np.int64)
        if not self._rows[name]:
            return IndexLists(starts=starts, values=np.zeros(0, dtype=np.int64))
        rows = position[np.concatenate(self._rows[name])]
        values = np.concatenate(self._values[name])
        if name in _TASK_LISTS:
            values = position[values]
        span = int(values.max(initial=0)) + 1
        pairs = rows * span + values
        pairs.sort()
        rows, values = np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], span)
        np.cumsum(np.bincount(rows, minlength=len(position)), out=starts[1:])
        return IndexLists(starts=starts, values=values)
