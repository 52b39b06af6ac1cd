"""What the ranks of an unfolded run share: each rank's own flows on the links that they cross.

[Note: contention between ranks]  With one unit for every rank, each set of ranks that meets, each message and
    each copy is a flow of its own, and loads the links of its own ranks only. Its price is that of the folded
    run, in which all its like go at once: so a flow whose like are late gets no faster than planned, but
    whatever else comes in its way slows it, and it slows that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cost_models.errors import check_invariant
from cost_models.price import CostModel
from simulator.distinct import distinct_rows
from simulator.jitter.unfold import Unfolding, computes
from simulator.plan import NONE, Plan
from simulator.pricing import Question, price_tasks
from simulator.sharing import Sharing
from simulator.sharing.demands import Asker, Row, asker_of, sharing_of
from simulator.sharing.driving import driving_stream
from simulator.workload import Workload

Ints = npt.NDArray[np.int64]


def alone(plan: Plan, workload: Workload) -> Workload:
    """Return the workload in which nothing slows anything else."""
    if workload.sharing is None:
        return workload
    work = computes(plan)
    return replace(workload, sharing=None, is_compute=work, is_host_copy=workload.is_host_copy & ~work)


def shared_between_ranks(
    plan: Plan, cost_model: CostModel, unfolding: Unfolding
) -> tuple[Sharing, Ints] | None:
    """Return what the flows of every rank hold, and which row of it each unfolded task holds (or NONE).

    Args:
        unfolding: with one unit for every rank.
    Returns: None if nothing is shared.
    """
    folded, sharing = unfolding.folded, unfolding.folded.sharing
    machine = cost_model.machine(plan.num_ranks)
    if sharing is None or machine is None:
        return None
    check_invariant(unfolding.units.num_units == plan.num_ranks, "ranks that share links are told apart")
    price, place = folded.price[unfolding.source], _places(plan, unfolding, by_cores=sharing.by_cores)
    first, number = distinct_rows([price, place])
    rows = _Rows(unfolding, asker_of(plan, cost_model, machine), price_tasks(plan, cost_model)[2])
    found = [*(rows.row(task) for task in first.tolist()), Row()]
    row = np.where(price == NONE, NONE, number)
    compute = computes(plan)[unfolding.source] & (not sharing.by_cores)
    return (
        sharing_of(
            found,
            machine,
            row=row,
            driver=driving_stream(unfolding, stream=unfolding.stream, is_compute=compute),
            processors=sharing.processors[unfolding.source],
            priority=sharing.priority[unfolding.stream_source],
        ),
        row,
    )


def _places(plan: Plan, unfolding: Unfolding, *, by_cores: bool) -> Ints:
    """Return where each task's flow is, int64 [tasks]: its set, its sender or its rank; 0: anywhere."""
    received = (unfolding.met != NONE) & ~unfolding.is_send
    here = np.where(received, unfolding.met, unfolding.unit)
    place = np.where(unfolding.set != NONE, unfolding.set, here)
    anywhere = computes(plan)[unfolding.source] & (not by_cores)
    found: Ints = np.where(anywhere, 0, place)
    return found


@dataclass(frozen=True, slots=True)
class _Rows:
    """Asks what the flow of one unfolded task holds, on the links of its own ranks."""

    unfolding: Unfolding
    asker: Asker
    questions: Sequence[Question]

    def row(self, task: int) -> Row:
        folded, source = self.unfolding.folded, int(self.unfolding.source[task])
        price = int(folded.price[source])
        if price == NONE:
            return Row()
        ranks = np.array([self._ranks(task)], dtype=np.int64)
        return self.asker.row(self.questions[price], float(folded.prices.seconds[price]), sets=ranks)

    def _ranks(self, task: int) -> Sequence[int]:
        """Return who takes part, in the order that the question asks for."""
        unfolding = self.unfolding
        first, met = unfolding.units.first_rank, int(unfolding.met[task])
        here = int(first[unfolding.unit[task]])
        if unfolding.set[task] != NONE:
            group = int(unfolding.group[unfolding.source[task]])
            return self.asker.plan.groups[group].members[
                int(unfolding.set[task] - unfolding.units.set_starts[group])
            ]
        if met == NONE:
            return [here]
        there = int(first[met])
        return [here, there] if unfolding.is_send[task] else [there, here]
