"""`Renumbered`: a cost model on which the ranks of a plan lie in another order than they are numbered.

Plans number tp fastest, then cp, dp, pp, so that replicas of a stage are neighbours. The published system
puts each replica's pipeline on neighbours instead, unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cost_models.models.cluster import ClusterCostModel
from cost_models.price import CollectiveKind, Price
from cost_models.use import CommunicationUse

Ints = npt.NDArray[np.int64]


class Renumbered(ClusterCostModel):
    """Prices of a cluster whose device `places[r]` runs rank r.

    Args:
        model: of the cluster and the stack.
        places: device by rank, each once.
    """

    def __init__(self, model: ClusterCostModel, places: Sequence[int]) -> None:
        super().__init__(model.cluster, model.stack)
        self._places = np.array(places, dtype=np.int64)
        self._ranks = np.argsort(self._places)

    def transfer(self, *, size_bytes: int, source_rank: int, target_rank: int) -> Price:
        """Price a transfer between the devices of two ranks."""
        source, target = self._places[[source_rank, target_rank]].tolist()
        return super().transfer(size_bytes=size_bytes, source_rank=source, target_rank=target)

    def collective(self, kind: CollectiveKind, *, size_bytes: int, ranks: Sequence[int]) -> Price:
        """Price a collective of the devices of some ranks."""
        return super().collective(kind, size_bytes=size_bytes, ranks=self._places[list(ranks)].tolist())

    def distinct(self, members: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return one of these sets of ranks for each way in which their devices lie."""
        sets = super().distinct(self._places[np.array(members)].tolist())
        found: list[list[int]] = self._ranks[np.array(sets)].tolist()
        return found

    def transfer_use(
        self, *, size_bytes: int, pairs: Ints, num_ranks: int, communicators: Ints | None = None
    ) -> CommunicationUse:
        """Return what transfers between the devices of ranks hold."""
        return super().transfer_use(
            size_bytes=size_bytes,
            pairs=self._places[pairs],
            num_ranks=num_ranks,
            communicators=None if communicators is None else self._places[communicators],
        )

    def collective_use(
        self, kind: CollectiveKind, *, size_bytes: int, members: Ints, num_ranks: int
    ) -> CommunicationUse:
        """Return what a collective of the devices of ranks holds."""
        return super().collective_use(
            kind, size_bytes=size_bytes, members=self._places[members], num_ranks=num_ranks
        )

    def host_copy_use(
        self, *, size_bytes: int, ranks: Ints, to_host: bool, num_ranks: int
    ) -> CommunicationUse:
        """Return what copies between the devices of ranks and their hosts hold."""
        return super().host_copy_use(
            size_bytes=size_bytes, ranks=self._places[ranks], to_host=to_host, num_ranks=num_ranks
        )


def replica_by_replica(model: ClusterCostModel, *, pp: int, dp: int) -> Renumbered:
    """Return prices where the pipeline ranks of a replica are neighbours: rank pp x dp + d on d x pp + p."""
    return Renumbered(model, [d * pp + p for p in range(pp) for d in range(dp)])
