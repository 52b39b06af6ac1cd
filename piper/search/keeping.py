"""What keeping the states of training costs: bytes on a rank, and time at the ends of a step.

[Note: ends of a step]
Between two norm barriers a rank updates its parameters, gathers those of its first stage, runs the passes,
and reduces the gradients of the stage whose backward is last. Buckets may hide a reduction behind the last
backward, so that a bound leaves it out; reductions of every microbatch (ZeRO-2, 3) and gathers of cut
parameters keep a stream busy, which a step is no shorter than.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cost_models.ops import DTYPE_BYTES
from cost_models.price import CollectiveKind
from simulator.plan import StateDtypes

if TYPE_CHECKING:
    from piper.search.network import Network

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_OPTIMIZER, _GRADIENTS, _PARAMETERS = 1, 2, 3
"""ZeRO levels."""
_MOVE_OPTIMIZER = frozenset({"optimizer", "params"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replicas:
    """Over how many ranks the states of n layouts may be cut, int64 [n].

    Args:
        tp: ranks between two neighbouring replicas.
        replicas: dp x cp.
        experts: ranks that hold the same experts.
        apart: ranks between two of these.
        shards: over which dense state is cut at ZeRO-1 and more.
    """

    tp: Ints
    replicas: Ints
    experts: Ints
    apart: Ints
    shards: Ints

    def cut(self, zero: int) -> tuple[Ints, Ints]:
        """Return over how many ranks dense and expert state is cut."""
        if not zero:
            return np.ones_like(self.shards), np.ones_like(self.shards)
        return self.shards, np.gcd(self.shards, self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRules:
    """Bytes of states, and whether gathers overlap.

    Args:
        states: dtypes.
        optimizer: of the job.
        gathers_overlap: whether a forward waits for updated parameters bucket by bucket.
    """

    states: StateDtypes
    optimizer: str
    gathers_overlap: bool = False

    def static_bytes(
        self, dense: Floats, expert: Floats, *, replicas: Replicas, zero: int, offload: str
    ) -> Floats:
        """Return the bytes of parameters, gradients and optimizer state; `dense`, `expert`: [n, ranks]."""
        cuts = replicas.cut(zero)
        found = np.zeros_like(dense)
        for numel, shards in zip((dense, expert), cuts, strict=True):
            whole = np.ones_like(shards)
            for level, each, away in (
                (_PARAMETERS, self.states.parameter_bytes(zero), offload == "params"),
                (_GRADIENTS, DTYPE_BYTES[self.states.gradient], False),
                (_OPTIMIZER, self.states.optimizer_bytes(self.optimizer, zero), offload in _MOVE_OPTIMIZER),
            ):  # fmt: skip
                if not away:
                    found += numel * each / (shards if zero >= level else whole)[:, None]
        return found

    def update_share(self, replicas: Replicas, *, zero: int) -> Floats:
        """Return which part of an uncut update a rank makes, float64 [n]."""
        dense, expert = replicas.cut(zero)
        return np.asarray(1.0 / np.maximum(dense, expert))

    def reduce_ns(
        self,
        network: Network,
        dense: Floats,
        expert: Floats,
        *,
        replicas: Replicas,
        zero: int,
        floor: bool,
        pieces: Floats | float = 1.0,
    ) -> Floats:
        """Return the time to reduce the gradients of so many elements, in so many pieces, float64 [n]."""
        size = DTYPE_BYTES[self.states.reduce]
        cuts = replicas.cut(zero)
        found = np.zeros(len(dense))
        for numel, shards, ranks, apart in (
            (dense, cuts[0], replicas.replicas, replicas.tp),
            (expert, cuts[1], replicas.experts, replicas.apart),
        ):
            if zero:
                cut = network.collective_ns(
                    CollectiveKind.REDUCE_SCATTER, numel * size, ranks=shards, stride=apart, floor=floor,
                    pieces=pieces,
                )  # fmt: skip
                rest = network.collective_ns(
                    CollectiveKind.ALL_REDUCE,
                    numel * size / shards,
                    ranks=ranks // shards,
                    stride=apart * shards,
                    floor=floor,
                )
                found += np.where(numel > 0, cut + rest, 0.0)
            else:
                whole = network.collective_ns(
                    CollectiveKind.ALL_REDUCE, numel * size, ranks=ranks, stride=apart, floor=floor
                )
                found += np.where(numel > 0, whole, 0.0)
        return found

    def gather_ns(
        self,
        network: Network,
        dense: Floats,
        expert: Floats,
        *,
        replicas: Replicas,
        zero: int,
        floor: bool,
        pieces: Floats | float = 1.0,
    ) -> Floats:
        """Return the time to gather so many parameters in so many pieces, [n]; 0 where nothing is cut."""
        found = np.zeros(len(dense))
        if not zero:
            return found
        size = DTYPE_BYTES[self.states.gather]
        dense_shards, expert_shards = replicas.cut(zero)
        for numel, shards, apart in (
            (dense, dense_shards, replicas.tp),
            (expert, expert_shards, replicas.apart),
        ):
            whole = network.collective_ns(
                CollectiveKind.ALL_GATHER, numel * size, ranks=shards, stride=apart, floor=floor,
                pieces=pieces,
            )  # fmt: skip
            found += np.where(numel > 0, whole, 0.0)
        return found
