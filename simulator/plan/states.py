"""`StateDtypes`: in which numbers a training keeps and moves the state of its parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from cost_models.ops import DTYPE_BYTES, kept_dtype

NO_MASTERS = "none"
MOMENTS = {"adamw": 2, "adamw8bit": 2, "momentum": 1, "sgd": 0}
"""Optimizer -> moments of a parameter."""
EIGHT_BITS = {"adamw8bit": "uint8"}
"""Optimizer -> dtype of its moments unless stated; their fp32 scales of 256 elements (1.6 %) are left out
(Dettmers et al. 2021, arXiv 2110.02861; bitsandbytes)."""
_CUT_PARAMETERS_ZERO = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDtypes:
    """Dtypes of what belongs to a parameter; keys of `DTYPE_BYTES`.

    Args:
        compute: of parameters where they are used.
        gradient: in which gradients are summed over the microbatches.
        reduce: in which gradients travel, unless a directive says otherwise.
        gather: in which parameters travel: after an update, and cut ones before their use.
        master: of the copy that the optimizer updates, where it is not `compute`; or "none": it updates the
            parameters themselves.
        moment: of each moment of the optimizer.
        shard: in which a cut parameter (ZeRO-3) is kept; where that is not `compute`, it is its own master.
    """

    compute: str
    gradient: str
    reduce: str
    gather: str
    master: str
    moment: str
    shard: str

    @classmethod
    def of(cls, compute: str) -> Self:
        """Return the defaults: fp32 sums, moments, and masters of 2-byte parameters (DESIGN 3).

        Under a low precision parameters are bf16.
        """
        compute = kept_dtype(compute)
        return cls(
            compute=compute,
            gradient="fp32",
            reduce="fp32",
            gather=compute,
            master="fp32",
            moment="fp32",
            shard=compute,
        )

    def changed(self, dtypes: dict[str, str]) -> Self:
        """Return these with some changed; gradients travel as they are summed where only that is given."""
        if "gradient" in dtypes:
            dtypes = {"reduce": dtypes["gradient"]} | dtypes
        return replace(self, **dtypes)

    def parameter_bytes(self, zero: int) -> int:
        """Return the bytes of a parameter between its uses, before it is cut."""
        return DTYPE_BYTES[self.shard if zero >= _CUT_PARAMETERS_ZERO else self.compute]

    def master_bytes(self, zero: int) -> int:
        """Return the bytes of a master beside its parameter."""
        own = zero >= _CUT_PARAMETERS_ZERO and self.shard != self.compute
        return 0 if own or self.master in {NO_MASTERS, self.compute} else DTYPE_BYTES[self.master]

    def optimizer_bytes(self, optimizer: str, zero: int) -> int:
        """Return the bytes of optimizer state per parameter, before it is cut: moments, and the master."""
        return MOMENTS[optimizer] * DTYPE_BYTES[self.moment] + self.master_bytes(zero)

    def update_bytes(self, optimizer: str, zero: int) -> int:
        """Return what a fused update reads and writes per parameter.

        It reads the gradient, and reads and writes what it updates and the moments; where that is a master,
        it writes the parameter too.
        """
        master, parameter = self.master_bytes(zero), self.parameter_bytes(zero)
        moments = MOMENTS[optimizer] * DTYPE_BYTES[self.moment]
        return (
            DTYPE_BYTES[self.gradient]
            + 2 * (master or parameter)
            + 2 * moments
            + (parameter if master else 0)
        )
