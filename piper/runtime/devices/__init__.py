"""Devices that a rank can run on. Importing this loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piper.runtime.devices.device import Device

DEVICES = {
    "cpu": "piper.runtime.devices.cpu:CpuDevice",
    "cuda": "piper.runtime.devices.cuda:CudaDevice",
}


def open_device(name: str, *, index: int = 0, priorities: dict[str, int] | None = None) -> Device:
    """Return the device of this process; `index` and `priorities` as in `CudaDevice`."""
    module, _, cls = DEVICES[name].partition(":")
    kind = getattr(importlib.import_module(module), cls)
    opened: Device = kind() if name == "cpu" else kind(index, priorities or {})
    return opened
