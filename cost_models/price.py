"""What a price is, and what a cost model must answer.

A `Price` is seconds with a band and its provenance. The simulator asks a `CostModel` four questions
(operation, transfer, collective, host copy), what each of these holds of the machine meanwhile, which sets of
ranks are alike, and reads a few facts about host and device; it knows no hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, assert_never

from cost_models.ops import Operation

if TYPE_CHECKING:  # arrays are needed only by those who ask for what is shared
    import numpy as np
    import numpy.typing as npt

    from cost_models.use import CommunicationUse, Machine, OperationUse


class Provenance(StrEnum):
    """Where a figure comes from, in falling order of trust."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    FITTED = "fitted"
    DATASHEET = "datasheet"


class CollectiveKind(StrEnum):
    """A collective; the comment says what its `size_bytes` counts (nccl-tests convention)."""

    ALL_REDUCE = "all_reduce"  # the buffer
    ALL_GATHER = "all_gather"  # the whole gathered output
    REDUCE_SCATTER = "reduce_scatter"  # the whole input
    ALL_TO_ALL = "all_to_all"  # the send buffer of one rank
    RING_SHIFT = "ring_shift"  # what one rank sends to the next; the last sends to the first


def bus_factor(kind: CollectiveKind, num_ranks: int) -> float:
    """Return bus bytes over `size_bytes`: what every link of a ring carries (nccl-tests PERFORMANCE.md)."""
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return 2 * (num_ranks - 1) / num_ranks
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_TO_ALL:
            return (num_ranks - 1) / num_ranks
        case CollectiveKind.RING_SHIFT:
            return 1.0
        case _:
            assert_never(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Predicted seconds, the band in which we expect the truth, and where the figure comes from."""

    seconds: float
    low_s: float
    high_s: float
    provenance: Provenance


class CostModel(Protocol):
    """Seconds for everything a plan does on one cluster. All times exclude host launch cost."""

    @property
    def name(self) -> str:
        """Return a short description, shown beside results."""

    @property
    def launch_overhead_s(self) -> float:
        """Return the host time to launch one kernel."""

    @property
    def pass_overhead(self) -> Price:
        """Return the host time of a task that computes, beside its kernels, where calling is running."""

    @property
    def communication_overhead_s(self) -> float:
        """Return the host time to launch a transfer or a collective."""

    @property
    def pass_wait_s(self) -> float:
        """Return the time of a forward or backward of a stage in which the device waits for the host."""

    @property
    def step_wait_s(self) -> float:
        """Return the same, once per step."""

    @property
    def step_error(self) -> float | None:
        """Return |predicted / measured - 1| of step times that 80 % of known runs stay below, or None."""

    @property
    def run_ahead_kernels(self) -> int | None:
        """Return how many kernels of a stream may be launched and not have ended; None: any number."""

    @property
    def blocking(self) -> tuple[str, ...]:
        """Return what the host awaits the end of, once launched: kinds of tasks, as "f" or "all_to_all"."""

    @property
    def awaited(self) -> tuple[str, ...]:
        """Return what the host awaits the end of before it launches a task that waits for it, likewise."""

    @property
    def eager_limit_bytes(self) -> int:
        """Return the largest message that a send hands over without waiting for its receive."""

    @property
    def device_memory_bytes(self) -> int:
        """Return the memory of one device that a process may use."""

    @property
    def context_bytes(self) -> int:
        """Return the device memory that the driver context takes before the first tensor."""

    @property
    def expandable_segments(self) -> bool:
        """Return whether segments of the allocator grow at their end (`PYTORCH_CUDA_ALLOC_CONF`)."""

    def communicator_bytes(self, num_ranks: int) -> int:
        """Return the device memory of one communicator of `num_ranks` ranks on each; 0 for one rank."""

    @property
    def peak_flops_per_s(self) -> dict[str, float]:
        """Return the dense datasheet peak by compute dtype, for MFU."""

    def operation(self, operation: Operation) -> Price:
        """Price one kernel (not `count` of them)."""

    def transfer(self, *, size_bytes: int, source_rank: int, target_rank: int) -> Price:
        """Price a point-to-point transfer, from both ends ready to the last byte."""

    def collective(self, kind: CollectiveKind, *, size_bytes: int, ranks: Sequence[int]) -> Price:
        """Price a collective, from the last arrival to the last byte; one rank costs 0 s."""

    def host_copy(self, *, size_bytes: int) -> Price:
        """Price a copy between a device and its host, in either direction."""

    def distinct(self, members: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return some of these sets of ranks, one for each way in which sets lie on the hardware.

        The sets have one size. Two that lie alike have equal prices in every collective and transfer, so that
        of thousands of replicas a few are priced.
        """

    def machine(self, num_ranks: int) -> Machine | None:
        """Return what the ranks of a job share, or None: nothing is, and no use below is ever asked for."""

    def operation_use(self, operation: Operation) -> OperationUse:
        """Return what bounds one kernel (not `count` of them)."""

    def transfer_use(
        self,
        *,
        size_bytes: int,
        pairs: npt.NDArray[np.int64],
        num_ranks: int,
        communicators: npt.NDArray[np.int64] | None = None,
    ) -> CommunicationUse:
        """Return what transfers that run at once hold.

        Args:
            size_bytes: of each.
            pairs: [n, 2], from rank and to rank.
            num_ranks: of the job.
            communicators: [n, members], of each the ranks among whom such messages go (those of a pipeline);
                None: the pair alone.
        """

    def collective_use(
        self, kind: CollectiveKind, *, size_bytes: int, members: npt.NDArray[np.int64], num_ranks: int
    ) -> CommunicationUse:
        """Return what a collective holds that several sets of ranks run at once; members: [sets, n]."""

    def host_copy_use(
        self, *, size_bytes: int, ranks: npt.NDArray[np.int64], to_host: bool, num_ranks: int
    ) -> CommunicationUse:
        """Return what copies between devices and their host hold; ranks: [n]."""
