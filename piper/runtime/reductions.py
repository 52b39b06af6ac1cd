"""Sums over ranks: as the backend makes them, or in rank order, bit for bit like one process.

[Note: ordered reductions]
A backend adds in the order of its algorithm (ring, halving), which differs from adding rank after rank
once there are more than two. "ordered" moves the addends unchanged and adds them here, first rank first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Reducer:
    """Sums, always SUM: the mean over samples is in the loss scale.

    Args:
        ordered: add in rank order.
    """

    ordered: bool

    def all_reduce(self, tensor: Tensor, *, group: dist.ProcessGroup, size: int) -> None:
        """Replace a contiguous tensor by its sum over the group; a group of one changes nothing."""
        if size == 1:
            return
        if not self.ordered:
            dist.all_reduce(tensor, group=group)
            return
        flat = tensor.new_zeros(-(-tensor.numel() // size) * size)
        flat[: tensor.numel()] = tensor.reshape(-1)
        shard = self.reduce_scatter(flat, group=group, size=size)
        # To all the same: an all-gather, which gloo's own all_gather makes at half the speed.
        dist.all_to_all_single(flat.view(size, -1), shard.expand(size, -1).contiguous(), group=group)
        tensor.copy_(flat[: tensor.numel()].view_as(tensor))

    def reduce_scatter(self, tensor: Tensor, *, group: dist.ProcessGroup, size: int) -> Tensor:
        """Return this rank's shard of the sum of flat tensors, [numel / size]."""
        shard = tensor.new_empty(tensor.numel() // size)
        if not self.ordered:
            dist.reduce_scatter(shard, list(tensor.chunk(size)), group=group)
            return shard
        parts = tensor.new_empty((size, shard.numel()))
        dist.all_to_all_single(parts, tensor.view(size, -1), group=group)
        return sum_in_order(parts)


def sum_in_order(parts: Tensor) -> Tensor:
    """Return ((parts[0] + parts[1]) + parts[2]) + ... over the leading dimension."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
