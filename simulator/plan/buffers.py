"""Buffers of a device plan: what occupies memory, of which class, owned by whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt


class MemoryClass(IntEnum):
    """Classes of memory, as reported by `memory_by_class_bytes`."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    ACTIVATIONS = 3
    BUCKETS = 4
    COMMUNICATION = 5
    WORKSPACE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters of one stage that are reduced, sharded and updated together.

    Args:
        name: unique on its device, e.g. "dense0"; part of task codes.
        stage: the stage that holds the parameters.
        kind: "dense"; "sequence": dense, and every rank of tp has a part of the gradients; "expert"; "tied":
            the parameters are also in another bucket of this device, and this entry only names those whose
            gradients are summed over several stages first.
        parameters: fully qualified names, in the order in which they lie in the flat buffer.
        numel: their elements.
        padded_numel: numel padded to a multiple of 8 x shard_count (numel itself when shard_count is 1).
        shard_count: over how many ranks optimizer state is cut (1: not cut).
        group: index in `Plan.groups` of the ranks that reduce it, or -1 (one replica).
        zero: ZeRO stage, 0 to 3.
    """

    name: str
    stage: int
    kind: str
    parameters: tuple[str, ...]
    numel: int
    padded_numel: int
    shard_count: int
    group: int
    zero: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BufferTable:
    """All buffers of a device, as columns; a buffer's number is its row.

    Args:
        size_bytes: int64 [buffers].
        memory_class: int8 [buffers], `MemoryClass` values.
        persistent: bool [buffers]: alive from before the first step to after the last.
        owner: int64 [buffers], index in `labels`.
        microbatch: int64 [buffers], -1 where it belongs to no microbatch.
        labels: what buffers are, for people; `{}` stands for the microbatch: "stage 2 microbatch {} input".
    """

    size_bytes: npt.NDArray[np.int64]
    memory_class: npt.NDArray[np.int8]
    persistent: npt.NDArray[np.bool_]
    owner: npt.NDArray[np.int64]
    microbatch: npt.NDArray[np.int64]
    labels: tuple[str, ...]

    def owner_of(self, buffer: int) -> str:
        """Return what a buffer is: "stage 2 microbatch 5 activations"."""
        return self.labels[int(self.owner[buffer])].replace("{}", str(int(self.microbatch[buffer])))

    @classmethod
    def of(
        cls,
        *,
        size_bytes: Sequence[int],
        memory_class: Sequence[int],
        persistent: Sequence[bool],
        owners: Sequence[str],
    ) -> BufferTable:
        """Return a table from one entry per buffer; owners are whole texts."""
        numbers = {label: i for i, label in enumerate(dict.fromkeys(owners))}
        return cls(
            size_bytes=np.array(size_bytes, dtype=np.int64),
            memory_class=np.array(memory_class, dtype=np.int8),
            persistent=np.array(persistent, dtype=np.bool_),
            owner=np.array([numbers[owner] for owner in owners], dtype=np.int64),
            microbatch=np.full(len(owners), -1, dtype=np.int64),
            labels=tuple(numbers),
        )

    @property
    def static_bytes(self) -> int:
        """Return the bytes of all persistent buffers."""
        return int(self.size_bytes[self.persistent].sum())
