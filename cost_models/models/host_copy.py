"""Copies between a device and its host -> prices (formula: `HostLink` in `gpu.py`)."""

from __future__ import annotations

from cost_models.band import band
from cost_models.errors import CostModelError
from cost_models.gpu import Gpu
from cost_models.price import Price


class HostCopy:
    """Prices copies over the link of one device; other devices of the node do not slow it down.

    Args:
        gpu: the device.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def host_copy(self, *, size_bytes: int) -> Price:
        """Price a copy in either direction.

        Raises: CostModelError for a negative size, or a device whose file states no link.
        """
        if not size_bytes >= 0:
            rule, fix = "must be a whole number >= 0", "give the bytes that are copied"
            raise CostModelError(where="host copy", field="size_bytes", value=size_bytes, rule=rule, fix=fix)
        link = self.gpu.host_link
        if link is None:
            raise CostModelError(
                where=self.gpu.name,
                field="host_link",
                value=None,
                rule="is needed to price copies between device and host",
                fix="add the section host_link (bandwidth, efficiency, latency, error, provenance, source)",
            )
        seconds = size_bytes / (link.efficiency * link.bandwidth_bytes_per_s) + link.latency_s
        return band(seconds, error=link.error, provenance=link.provenance)
