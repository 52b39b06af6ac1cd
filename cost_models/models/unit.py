"""`UnitCostModel`: times by name, for schedules without a model, and for tests with exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cost_models.errors import CostModelError, nearest
from cost_models.ops import Operation, OpKind
from cost_models.price import CollectiveKind, Price, Provenance
from cost_models.use import CommunicationUse, OperationUse

if TYPE_CHECKING:  # nothing is shared, so that arrays are hardly ever needed
    import numpy as np
    import numpy.typing as npt

_NO_LIMIT_BYTES = 2**62
"""More than any device has and any message weighs."""


class UnitCostModel:
    """A `CostModel` without hardware: a `FIXED` operation lasts what its name says, all else a constant.

    Args:
        durations_s: seconds by operation name.
        transfer_s: every point-to-point transfer.
        collective_s: every collective of more than one rank.
        host_copy_s: every copy between a device and its host.
        eager_limit_bytes: largest message whose send does not wait for its receive (default: all).
    """

    name = "unit costs"
    launch_overhead_s = 0.0
    communication_overhead_s = 0.0
    pass_wait_s = 0.0
    step_wait_s = 0.0
    step_error = None
    run_ahead_kernels = None
    expandable_segments = False
    blocking: tuple[str, ...] = ()
    awaited: tuple[str, ...] = ()
    device_memory_bytes = _NO_LIMIT_BYTES
    context_bytes = 0

    def communicator_bytes(self, num_ranks: int) -> int:
        """Return 0: memory is not modelled."""
        return 0

    def __init__(
        self,
        durations_s: Mapping[str, float],
        *,
        transfer_s: float = 0.0,
        collective_s: float = 0.0,
        host_copy_s: float = 0.0,
        eager_limit_bytes: int = _NO_LIMIT_BYTES,
    ) -> None:
        for field, value in (
            *durations_s.items(),
            ("transfer_s", transfer_s),
            ("collective_s", collective_s),
            ("host_copy_s", host_copy_s),
        ):
            number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
            if not (number >= 0 and math.isfinite(number)):
                rule = "must be a number >= 0"
                fix = "give a time in seconds"
                raise CostModelError(where="UnitCostModel", field=field, value=value, rule=rule, fix=fix)
        self.eager_limit_bytes = eager_limit_bytes
        self._durations = {name: _exactly(float(value)) for name, value in durations_s.items()}
        self._transfer = _exactly(float(transfer_s))
        self._collective = _exactly(float(collective_s))
        self._host_copy = _exactly(float(host_copy_s))

    @property
    def pass_overhead(self) -> Price:
        """Return 0 s: there is no host."""
        return _exactly(0.0)

    @property
    def peak_flops_per_s(self) -> dict[str, float]:
        """Return no peaks: without hardware there is no MFU."""
        return {}

    def operation(self, operation: Operation) -> Price:
        """Return the time of a `FIXED` operation; CostModelError for other kinds and unknown names."""
        if operation.kind is not OpKind.FIXED or operation.name not in self._durations:
            raise CostModelError(
                where="UnitCostModel",
                field="operation",
                value=f"{operation.kind.value} {operation.name}",
                rule="has no fixed duration",
                fix=f"add its name to durations_s, or use the model of a cluster; "
                f"{nearest(operation.name, self._durations)}",
            )
        return self._durations[operation.name]

    def transfer(self, *, size_bytes: int, source_rank: int, target_rank: int) -> Price:
        """Return the time of every transfer."""
        return self._transfer

    def collective(self, kind: CollectiveKind, *, size_bytes: int, ranks: Sequence[int]) -> Price:
        """Return the time of every collective; one rank costs 0 s."""
        return self._collective if len(ranks) > 1 else _exactly(0.0)

    def host_copy(self, *, size_bytes: int) -> Price:
        """Return the time of every copy between a device and its host."""
        return self._host_copy

    def distinct(self, members: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the first set: all lie alike."""
        return members[:1]

    def machine(self, num_ranks: int) -> None:
        """Return None: nothing is shared."""
        return

    def operation_use(self, operation: Operation) -> OperationUse:
        """Return that nothing bounds an operation; never asked for, as there is no machine."""
        return OperationUse(processor_s=0.0, memory_s=0.0, memory_bytes=0.0)

    def transfer_use(
        self,
        *,
        size_bytes: int,
        pairs: npt.NDArray[np.int64],
        num_ranks: int,
        communicators: npt.NDArray[np.int64] | None = None,
    ) -> CommunicationUse:
        """Return that a transfer holds nothing."""
        return _nothing(self._transfer.seconds)

    def collective_use(
        self, kind: CollectiveKind, *, size_bytes: int, members: npt.NDArray[np.int64], num_ranks: int
    ) -> CommunicationUse:
        """Return that a collective holds nothing."""
        return _nothing(self._collective.seconds if members.shape[1] > 1 else 0.0)

    def host_copy_use(
        self, *, size_bytes: int, ranks: npt.NDArray[np.int64], to_host: bool, num_ranks: int
    ) -> CommunicationUse:
        """Return that a copy between a device and its host holds nothing."""
        return _nothing(self._host_copy.seconds)


def _nothing(seconds: float) -> CommunicationUse:
    import numpy as np  # only for the empty arrays

    return CommunicationUse(
        latency_s=seconds,
        processors=0,
        memory_bytes=0.0,
        links=np.zeros(0, dtype=np.int64),
        link_bytes=np.zeros(0),
    )


def _exactly(seconds: float) -> Price:
    return Price(seconds=seconds, low_s=seconds, high_s=seconds, provenance=Provenance.MEASURED)
