"""`ClusterCostModel`: roofline, links and collectives of a cluster under a stack, remembered per question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cost_models.band import band
from cost_models.catalogue import Stack, load_cluster, load_stack
from cost_models.models.collectives import Collectives
from cost_models.models.host_copy import HostCopy
from cost_models.models.roofline import Roofline
from cost_models.ops import Operation
from cost_models.price import CollectiveKind, Price
from cost_models.shapes import MeasuredRoofline
from cost_models.topology import Cluster
from cost_models.use import CommunicationUse, Machine, OperationUse

if TYPE_CHECKING:  # pricing alone does without arrays
    import numpy as np
    import numpy.typing as npt

    from cost_models.loads import Loads

_PAIR = 2


class ClusterCostModel:
    """A `CostModel`: answers for devices of `cluster` driven by the framework `stack`.

    Equal questions are answered from memory, so that thousands of equal operations cost one pricing.
    """

    def __init__(self, cluster: Cluster, stack: Stack) -> None:
        self.cluster = cluster
        self.stack = stack
        roofline = Roofline(cluster.gpu, attention_kernel=stack.attention_kernel, slowdowns=stack.slowdowns)
        self._roofline = MeasuredRoofline(roofline)
        self.collectives = Collectives(
            cluster, slowdown=stack.slowdowns["collective"], skew_s=stack.collective_skew_s
        )
        self._host_copy = HostCopy(cluster.gpu)
        self._operations: dict[Operation, Price] = {}
        self._groups: dict[tuple[CollectiveKind, int, tuple[int, ...]], Price] = {}
        self._transfers: dict[tuple[int, int, int], Price] = {}
        self._loads: dict[int, Loads] = {}

    @property
    def name(self) -> str:
        """Return a short description, shown beside results."""
        return f"{self.cluster.name} ({self.cluster.gpu.name}), stack {self.stack.name}"

    @property
    def launch_overhead_s(self) -> float:
        """Return the host time to launch one kernel; 0 where calling is running (CPU)."""
        if not self.cluster.gpu.asynchronous:
            return 0.0
        host = self.cluster.host
        return host.launch_s if host.stack == self.stack.name else self.stack.launch_overhead_s

    @property
    def pass_overhead(self) -> Price:
        """Return the host time of a task that computes; 0 where the host runs ahead."""
        return self._host_cost(self.cluster.host.pass_s)

    @property
    def communication_overhead_s(self) -> float:
        """Return the host time to launch a transfer or a collective; 0 where calling is running (CPU)."""
        return self.stack.communication_overhead_s if self.cluster.gpu.asynchronous else 0.0

    @property
    def pass_wait_s(self) -> float:
        """Return the time of a forward or backward of a stage in which the device waits for the host."""
        return self.stack.pass_wait_s

    @property
    def step_wait_s(self) -> float:
        """Return the same, once per step."""
        return self.stack.step_wait_s

    @property
    def step_error(self) -> float | None:
        """Return |predicted / measured - 1| of step times that 80 % of known runs stay below, or None."""
        return self.stack.step_error

    @property
    def run_ahead_kernels(self) -> int | None:
        """Return how many kernels of a stream may be launched and not have ended; None: any number."""
        return self.stack.run_ahead_kernels

    @property
    def blocking(self) -> tuple[str, ...]:
        """Return what the host awaits the end of, once launched: names of kinds of tasks."""
        return self.stack.blocking

    @property
    def awaited(self) -> tuple[str, ...]:
        """Return what the host awaits the end of before it launches a task that waits for it."""
        return self.stack.awaited

    @property
    def eager_limit_bytes(self) -> int:
        """Return the largest message that a send hands over without waiting for its receive."""
        return self.cluster.eager_limit_bytes

    @property
    def device_memory_bytes(self) -> int:
        """Return the memory of one device that a process may use, context included."""
        return self.cluster.gpu.usable_bytes

    @property
    def context_bytes(self) -> int:
        """Return the device memory that the driver context takes before the first tensor."""
        return self.cluster.gpu.context_bytes

    @property
    def expandable_segments(self) -> bool:
        """Return whether segments of the allocator grow at their end (`PYTORCH_CUDA_ALLOC_CONF`)."""
        return self.stack.expandable_segments

    def communicator_bytes(self, num_ranks: int) -> int:
        """Return the device memory of one communicator of `num_ranks` ranks on each of them."""
        sizes = self.cluster.communicators
        return 0 if num_ranks == 1 else sizes.pair_bytes if num_ranks == _PAIR else sizes.group_bytes

    @property
    def peak_flops_per_s(self) -> dict[str, float]:
        """Return the dense datasheet peak by compute dtype, for MFU."""
        return dict(self.cluster.gpu.peak_flops_per_s)

    def operation(self, operation: Operation) -> Price:
        """Price one kernel (not `count` of them)."""
        price = self._operations.get(operation)
        if price is None:
            price = self._with_host(self._roofline.operation(replace(operation, count=1)), operation)
            self._operations[operation] = price
        return price

    def transfer(self, *, size_bytes: int, source_rank: int, target_rank: int) -> Price:
        """Price a point-to-point transfer, from both ends ready to the last byte."""
        key = (size_bytes, source_rank, target_rank)
        price = self._transfers.get(key)
        if price is None:
            price = self.collectives.transfer(
                size_bytes=size_bytes, source_rank=source_rank, target_rank=target_rank
            )
            price = _sum(price, self._host_cost(self.cluster.host.message_s))
            self._transfers[key] = price
        return price

    def collective(self, kind: CollectiveKind, *, size_bytes: int, ranks: Sequence[int]) -> Price:
        """Price a collective, from the last arrival to the last byte; one rank costs 0 s."""
        key = (kind, size_bytes, tuple(ranks))
        price = self._groups.get(key)
        if price is None:
            price = self.collectives.collective(kind, size_bytes=size_bytes, ranks=ranks)
            self._groups[key] = price
        return price

    def host_copy(self, *, size_bytes: int) -> Price:
        """Price a copy between a device and its host, in either direction."""
        return self._host_copy.host_copy(size_bytes=size_bytes)

    def distinct(self, members: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return one of these sets of ranks for each way in which sets lie on the cluster."""
        return self.cluster.distinct(members)

    def machine(self, num_ranks: int) -> Machine | None:
        """Return what the ranks of a job share.

        None if the stack says that nothing is, and on a CPU whose cores are not counted.
        """
        shared = self.cluster.gpu.asynchronous or self.cluster.host.cores is not None
        if not (self.stack.contention and shared):
            return None
        return self._loads_of(num_ranks).links.machine()

    def operation_use(self, operation: Operation) -> OperationUse:
        """Return what bounds one kernel (not `count` of them)."""
        return self._roofline.operation_use(replace(operation, count=1))

    def transfer_use(
        self,
        *,
        size_bytes: int,
        pairs: npt.NDArray[np.int64],
        num_ranks: int,
        communicators: npt.NDArray[np.int64] | None = None,
    ) -> CommunicationUse:
        """Return what transfers that run at once hold, see `CostModel`."""
        loads = self._loads_of(num_ranks)
        return loads.transfer(size_bytes=size_bytes, pairs=pairs, communicators=communicators)

    def collective_use(
        self, kind: CollectiveKind, *, size_bytes: int, members: npt.NDArray[np.int64], num_ranks: int
    ) -> CommunicationUse:
        """Return what a collective holds that several sets of ranks run at once; members: [sets, n]."""
        return self._loads_of(num_ranks).collective(kind, size_bytes=size_bytes, members=members)

    def host_copy_use(
        self, *, size_bytes: int, ranks: npt.NDArray[np.int64], to_host: bool, num_ranks: int
    ) -> CommunicationUse:
        """Return what copies between devices and their host hold; ranks: [n]."""
        return self._loads_of(num_ranks).host_copy(size_bytes=size_bytes, ranks=ranks, to_host=to_host)

    def _with_host(self, price: Price, operation: Operation) -> Price:
        """Add what calling the kernel costs; [Note: measured host costs]."""
        host = self.cluster.host
        called = host.launch_s if operation.direction == "fwd" else host.gradient_launch_s
        return _sum(price, self._host_cost(called))

    def _host_cost(self, seconds: float) -> Price:
        host = self.cluster.host
        counted = not self.cluster.gpu.asynchronous and host.stack == self.stack.name
        return band(seconds if counted else 0.0, error=host.error, provenance=host.provenance)

    def _loads_of(self, num_ranks: int) -> Loads:
        from cost_models.loads import Loads  # loads numpy

        if num_ranks not in self._loads:
            self._loads[num_ranks] = Loads(self.collectives, num_ranks=num_ranks)
        return self._loads[num_ranks]


def _sum(price: Price, other: Price) -> Price:
    """Return the sum of two prices, with the provenance of the first."""
    return replace(
        price,
        seconds=price.seconds + other.seconds,
        low_s=price.low_s + other.low_s,
        high_s=price.high_s + other.high_s,
    )


def cluster_cost_model(cluster: Cluster | str, *, stack: Stack | str = "piper") -> ClusterCostModel:
    """Return the cost model of a cluster and a stack, given as objects, names or files.

    Raises: CostModelError as `load_cluster` and `load_stack`.
    """
    return ClusterCostModel(
        load_cluster(cluster) if isinstance(cluster, str) else cluster,
        load_stack(stack) if isinstance(stack, str) else stack,
    )
