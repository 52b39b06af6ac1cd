"""`Codes`: the codes of the tasks of device plans, for people, made when somebody looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import overload

from simulator.plan.plan import DevicePlan


class Codes(Sequence[str]):
    """Task codes of device plans, one plan after another; compares like a tuple."""

    def __init__(self, devices: Sequence[DevicePlan]) -> None:
        self._devices = tuple(devices)

    @cached_property
    def _made(self) -> tuple[str, ...]:
        return tuple(code for device in self._devices for code in device.codes())

    def of_device(self, number: int) -> Codes:
        """Return the codes of one device plan."""
        return Codes(self._devices[number : number + 1])

    def __len__(self) -> int:
        return sum(len(device.tasks) for device in self._devices)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self._made[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)

    def __repr__(self) -> str:
        return repr(self._made)
