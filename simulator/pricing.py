"""Pricing: one row of seconds, band and provenance per distinct work, transfer and collective of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cost_models.errors import CostModelError
from cost_models.price import CollectiveKind, CostModel, Price, Provenance
from simulator import rules
from simulator.errors import PlanError
from simulator.plan import NONE, SEND_KINDS, DevicePlan, Group, Plan, TaskKind, Work

PROVENANCES = tuple(Provenance)
COLLECTIVE_OF = {
    TaskKind.ALL_REDUCE: CollectiveKind.ALL_REDUCE,
    TaskKind.REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
    TaskKind.ALL_GATHER: CollectiveKind.ALL_GATHER,
    TaskKind.ALL_TO_ALL: CollectiveKind.ALL_TO_ALL,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PriceTable:
    """Distinct prices as columns; the last row is free and stands for "nothing to do".

    Args:
        duration_ns: int64 [prices].
        num_kernels: int64 [prices], kernels that the host launches.
        seconds, low_s, high_s: float64 [prices].
        provenance_s: float64 [prices, provenances], seconds by `PROVENANCES`.
    """

    duration_ns: npt.NDArray[np.int64]
    num_kernels: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    low_s: npt.NDArray[np.float64]
    high_s: npt.NDArray[np.float64]
    provenance_s: npt.NDArray[np.float64]


def whole_ns(seconds: float, *, of: str) -> int:
    """Return priced seconds as whole ns; raises PlanError for a time that no simulation can hold."""
    if not rules.within_range(seconds * rules.NS_PER_S):
        raise PlanError(
            where="workload",
            field=f"time of a {of}",
            value=f"{seconds:.3g} s",
            rule=f"must be at most 2^62 ns = {rules.MAX_TIME_NS / rules.NS_PER_S:.3g} s",
            fix="lower the sizes of the job, or check the units of the hardware: prices are in seconds",
        )
    return rules.duration_ns(seconds)


def price_tasks(plan: Plan, cost_model: CostModel) -> tuple[PriceTable, npt.NDArray[np.int64]]:
    """Return the price table, and its row for every task (NONE: nothing to do), device plan by device plan.

    Raises: CostModelError naming the work, message or collective whose price is no finite number >= 0.
    """
    pricer = _Pricer(plan=plan, cost_model=cost_model)
    rows = [pricer.rows_of(device) for device in plan.device_plans]
    return pricer.table(), np.concatenate(rows)


@dataclass(kw_only=True, slots=True)
class _Row:
    seconds: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    provenance_s: list[float] = field(default_factory=lambda: [0.0] * len(PROVENANCES))
    num_kernels: int = 1

    def add(self, price: Price, *, count: int) -> None:
        self.seconds += count * price.seconds
        self.low_s += count * price.low_s
        self.high_s += count * price.high_s
        self.provenance_s[PROVENANCES.index(price.provenance)] += count * price.seconds


@dataclass(kw_only=True, slots=True)
class _Pricer:
    """Prices on demand, each distinct question once."""

    plan: Plan
    cost_model: CostModel
    rows: list[_Row] = field(default_factory=list)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    operations: dict[Hashable, Price] = field(default_factory=dict)
    slowest: dict[Hashable, list[Sequence[int]]] = field(default_factory=dict)

    def rows_of(self, device: DevicePlan) -> npt.NDArray[np.int64]:
        table = device.tasks
        found = np.full(len(table), NONE, dtype=np.int64)
        computing = np.flatnonzero(table.work != NONE)
        distinct, inverse = np.unique(table.work[computing], return_inverse=True)
        found[computing] = np.array([self._work(work) for work in distinct.tolist()], dtype=np.int64)[inverse]
        talking = np.flatnonzero((table.peer != NONE) | (table.group != NONE))
        columns = (table.kind, table.peer, table.group, table.size_bytes)
        questions = zip(*(column[talking].tolist() for column in columns), strict=True)
        here = device.pipeline_rank
        found[talking] = [
            self._talk(TaskKind(kind), here, peer=p, group=g, size=b) for kind, p, g, b in questions
        ]
        return found

    def table(self) -> PriceTable:
        rows = [*self.rows, _Row(num_kernels=0)]
        return PriceTable(
            duration_ns=np.array([whole_ns(row.seconds, of="task") for row in rows], dtype=np.int64),
            num_kernels=np.array([row.num_kernels for row in rows], dtype=np.int64),
            seconds=np.array([row.seconds for row in rows]),
            low_s=np.array([row.low_s for row in rows]),
            high_s=np.array([row.high_s for row in rows]),
            provenance_s=np.array([row.provenance_s for row in rows]),
        )

    def _talk(self, kind: TaskKind, here: int, *, peer: int, group: int, size: int) -> int:
        if kind in COLLECTIVE_OF:
            what = COLLECTIVE_OF[kind]
            return self._number((what, group, size), lambda: self._collective(what, group, size))
        source, target = (here, peer) if kind in SEND_KINDS else (peer, here)
        return self._number((source, target, size), lambda: self._transfer(source, target, size))

    def _number(self, key: Hashable, price: Callable[[], _Row]) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.rows)
            self.rows.append(price())
        return self.numbers[key]

    def _work(self, number: int) -> int:
        return self._number(number, lambda: self._operations(self.plan.works[number]))

    def _operations(self, work: Work) -> _Row:
        row = _Row(num_kernels=work.num_kernels)
        for operation in work.operations:
            if operation not in self.operations:
                price = self.cost_model.operation(operation)
                self.operations[operation] = _valid(price, f"operation {operation.name} of {work.label}")
            row.add(self.operations[operation], count=operation.count)
        return row

    def _transfer(self, source: int, target: int, size: int) -> _Row:
        pairs = zip(self.plan.mesh.ranks(pp=source), self.plan.mesh.ranks(pp=target), strict=True)
        return self._slowest_of(
            ("transfer", source, target),
            pairs,
            lambda pair: self.cost_model.transfer(size_bytes=size, source_rank=pair[0], target_rank=pair[1]),
            what=f"transfer of {size} bytes from pipeline rank {source} to {target}",
        )

    def _collective(self, kind: CollectiveKind, number: int, size: int) -> _Row:
        group: Group = self.plan.groups[number]
        return self._slowest_of(
            ("collective", number),
            group.members,
            lambda ranks: self.cost_model.collective(kind, size_bytes=size, ranks=ranks),
            what=f"{kind.value} of {size} bytes over group {group.name}",
        )

    def _slowest_of(
        self,
        key: Hashable,
        members: Iterable[Sequence[int]],
        ask: Callable[[Sequence[int]], Price],
        *,
        what: str,
    ) -> _Row:
        """Price the slowest of several sets of ranks that do the same thing.

        Replicas that cost the same the first time (the same pattern of nodes) are asked for once
        afterwards, so that thousands of replicas cost one look each, not one per message.
        """
        row = _Row()
        if key not in self.slowest:
            classes: dict[Price, Sequence[int]] = {}
            for ranks in members:
                classes.setdefault(_valid(ask(ranks), what), ranks)
            self.slowest[key] = list(classes.values())
            row.add(max(classes, key=lambda price: price.seconds), count=1)
        else:
            prices = [_valid(ask(ranks), what) for ranks in self.slowest[key]]
            row.add(max(prices, key=lambda price: price.seconds), count=1)
        return row


def _valid(price: Price, what: str) -> Price:
    finite = all(map(math.isfinite, (price.seconds, price.low_s, price.high_s)))
    if not (finite and 0 <= price.low_s <= price.seconds <= price.high_s):
        raise CostModelError(
            where=what,
            field="price",
            value=f"{price.seconds} s, band {price.low_s} to {price.high_s} s",
            rule="must be finite, >= 0 and inside its band",
            fix="correct the hardware, cluster or measurement that this price comes from",
        )
    return price
