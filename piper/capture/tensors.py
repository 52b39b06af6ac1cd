"""`TensorBook`: which storages live, and which tensor stands for which value.

[Note: crossing tensors]
A tensor is known by storage, offset, shape and strides. The segment whose operator first returns such a
tensor produced it (a view made inside a segment is its own); a segment that takes one produced elsewhere
has an input, straight from the producer, however many segments lie between. A segment may make a view that
looks exactly like an older tensor with the same storage; inside the segment that view is its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.capture.records import Value

Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True)
class Storage:
    """A living storage: its number (never used again), its bytes, and a reference that does not keep it."""

    number: int
    nbytes: int
    alive: weakref.ref[torch.UntypedStorage]


def address_of(tensor: Tensor) -> int:
    """Return what two tensors share if they share storage, as long as it lives."""
    return int(tensor.untyped_storage()._cdata)


def layout_key(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return offset, shape and strides."""
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


class TensorBook:
    """Numbers storages and values.

    Args:
        on_gone: called with number and bytes when a storage dies.
    """

    def __init__(self, on_gone: Callable[[int, int], None]) -> None:
        self._on_gone = on_gone
        self._storages: dict[int, Storage] = {}
        self._next_storage = 0
        self._next_order = 0
        self._values: dict[Key, Value] = {}
        self._writer: dict[int, Value] = {}

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the tensor's storage has a number."""
        return address_of(tensor) in self._storages

    def storage_of(self, tensor: Tensor) -> Storage:
        """Return the storage of a tensor, numbering a new one."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._storages.get(address)
        if known is not None:
            return known
        number, nbytes = self._next_storage, storage.nbytes()
        self._next_storage += 1

        def gone(_: object) -> None:
            del self._storages[address]
            self._on_gone(number, nbytes)

        made = self._storages[address] = Storage(number, nbytes, weakref.ref(storage, gone))
        return made

    @property
    def storages_taken(self) -> int:
        """Return how many storages have a number."""
        return self._next_storage

    @property
    def orders_taken(self) -> int:
        """Return how many places in the order of production are taken."""
        return self._next_order

    def take_orders(self, count: int) -> int:
        """Reserve places in the order of production and return the first."""
        first = self._next_order
        self._next_order += count
        return first

    def value_of(self, tensor: Tensor) -> Value | None:
        """Return the value that a tensor stands for, if any."""
        return self._values.get(self._key(tensor))

    def last_written(self, tensor: Tensor) -> Value | None:
        """Return the value that last filled the storage of a tensor."""
        return self._writer.get(self.storage_of(tensor).number)

    def produce(self, tensor: Tensor, *, producer: int, order: int | None = None) -> Value:
        """Let a tensor be a new value; `order`: its place, default the next."""
        storage = self.storage_of(tensor)
        nbytes = tensor.numel() * tensor.element_size()
        value = Value(
            producer=producer,
            order=self.take_orders(1) if order is None else order,
            storage=storage.number,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            covers=nbytes == storage.nbytes,
        )
        self._values[self._key(tensor)] = value
        self._writer.setdefault(value.storage, value)
        return value

    def overwrite(self, tensor: Tensor, *, producer: int) -> Value:
        """Let a tensor that was written in place be a new value; older views of it are forgotten."""
        number = self.storage_of(tensor).number
        for key in [key for key in self._values if key[0] == number]:
            del self._values[key]
        value = self._writer[number] = self.produce(tensor, producer=producer)
        return value

    def _key(self, tensor: Tensor) -> Key:
        return self.storage_of(tensor).number, *layout_key(tensor)
