"""Pricing: one row of seconds, band and provenance per distinct work, transfer, collective and host copy.

[Note: fewer processors]  Where processors are shared: as many as a collective usually takes keep its links
    busy, and each moves its part of the bytes. With fewer (rule of its stream), bytes take as much longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cost_models.errors import CostModelError
from cost_models.price import CollectiveKind, CostModel, Price, Provenance
from simulator import rules
from simulator.distinct import distinct_rows
from simulator.errors import PlanError
from simulator.plan import HOST_COPY_KINDS, NONE, RECV_KINDS, SEND_KINDS, Plan, TaskKind

PROVENANCES = tuple(Provenance)
COLLECTIVE_OF = {
    TaskKind.ALL_REDUCE: CollectiveKind.ALL_REDUCE,
    TaskKind.REDUCE_SCATTER: CollectiveKind.REDUCE_SCATTER,
    TaskKind.ALL_GATHER: CollectiveKind.ALL_GATHER,
    TaskKind.ALL_TO_ALL: CollectiveKind.ALL_TO_ALL,
    TaskKind.RING_SHIFT: CollectiveKind.RING_SHIFT,
}

_SENDS = np.array(sorted(SEND_KINDS), dtype=np.int64)
_TRANSFERS = np.array(sorted(SEND_KINDS | RECV_KINDS), dtype=np.int64)
_COLLECTIVES = np.array(sorted(COLLECTIVE_OF), dtype=np.int64)
_COPIES = np.array(sorted(HOST_COPY_KINDS), dtype=np.int64)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a row of the price table is the price of.

    Args:
        work: index in `Plan.works`, or NONE.
        kind: of a transfer (its send), a collective or a host copy; NONE for work.
        size_bytes: as in `Task`.
        source, target: transfers: pipeline ranks. Host copies: both are where the copy is made.
        group: collectives: index in `Plan.groups`.
        sms: collectives: processors that the rule of the stream leaves them, or NONE.
    """

    work: int = NONE
    kind: int = NONE
    size_bytes: int = 0
    source: int = NONE
    target: int = NONE
    group: int = NONE
    sms: int = NONE


def price_tasks(
    plan: Plan, cost_model: CostModel
) -> tuple[PriceTable, npt.NDArray[np.int64], list[Question]]:
    """Return the price table, its row for every task (NONE: nothing to do), and what its rows are.

    The last row is free, and is no question.

    Tasks lie device plan by device plan.
    Raises: CostModelError naming the work, message or collective whose price is no finite number >= 0.
    """
    pricer = _Pricer(plan=plan, cost_model=cost_model)
    rows = pricer.price_all()
    return pricer.table(), rows, pricer.questions


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
    questions: list[Question] = field(default_factory=list)
    operations: dict[Hashable, Price] = field(default_factory=dict)
    sets: dict[Hashable, Sequence[Sequence[int]]] = field(default_factory=dict)

    def price_all(self) -> npt.NDArray[np.int64]:
        """Return the row of every task, device plan by device plan."""
        tables = [device.tasks for device in self.plan.device_plans]

        def column(name: str) -> npt.NDArray[np.int64]:
            return np.concatenate([getattr(table, name) for table in tables])

        kind, size = column("kind"), column("size_bytes")
        here = np.repeat(
            np.array([device.pipeline_rank for device in self.plan.device_plans], dtype=np.int64),
            [len(table) for table in tables],
        )
        sends, peer, group, work = np.isin(kind, _SENDS), column("peer"), column("group"), column("work")
        source, target = np.where(sends, here, peer), np.where(sends, peer, here)
        found = np.full(len(kind), NONE, dtype=np.int64)
        copied = {"kind": kind, "size_bytes": size, "source": here, "target": here}
        for chosen, columns, price in (
            (work != NONE, {"work": work}, self._operations),
            (
                np.isin(kind, _TRANSFERS),
                {"source": source, "target": target, "size_bytes": size},
                self._transfer,
            ),
            (
                np.isin(kind, _COLLECTIVES),
                {"kind": kind, "group": group, "size_bytes": size, "sms": budgets(self.plan)},
                self._collective,
            ),
            (np.isin(kind, _COPIES), copied, self._host_copy),
        ):
            where = np.flatnonzero(chosen)
            asked = [values[where] for values in columns.values()]
            first, number = distinct_rows(asked)
            found[where] = len(self.rows) + number
            rows = zip(*(values[first].tolist() for values in asked), strict=True)
            questions = [Question(**dict(zip(columns, row, strict=True))) for row in rows]
            self.questions += questions
            self.rows += [price(question) for question in questions]
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

    def _operations(self, question: Question) -> _Row:
        work = self.plan.works[question.work]
        row = _Row(num_kernels=work.num_kernels)
        for operation in work.operations:
            if operation not in self.operations:
                price = self.cost_model.operation(operation)
                self.operations[operation] = _valid(price, f"operation {operation.name} of {work.label}")
            row.add(self.operations[operation], count=operation.count)
        if work.operations:
            row.add(_valid(self.cost_model.pass_overhead, f"pass of {work.label}"), count=1)
        return row

    def _transfer(self, question: Question) -> _Row:
        source, target, size = question.source, question.target, question.size_bytes
        return self._slowest_of(
            self._distinct(("transfer", source, target), lambda: transfer_pairs(self.plan, source, target)),
            lambda pair: self.cost_model.transfer(size_bytes=size, source_rank=pair[0], target_rank=pair[1]),
            what=f"transfer of {size} bytes from pipeline rank {source} to {target}",
        )

    def _collective(self, question: Question) -> _Row:
        size, group = question.size_bytes, self.plan.groups[question.group]
        asked = COLLECTIVE_OF[TaskKind(question.kind)]
        return self._slowest_of(
            self._distinct(("collective", question.group), lambda: group.members),
            lambda ranks: self._with_fewer_processors(
                self.cost_model.collective(asked, size_bytes=size, ranks=ranks), question, ranks
            ),
            what=f"{asked.value} of {size} bytes over group {group.name}",
        )

    def _with_fewer_processors(self, price: Price, question: Question, ranks: Sequence[int]) -> Price:
        """Return the price of a collective under the budget of its stream; [Note: fewer processors]."""
        num_ranks = self.plan.num_ranks
        if question.sms == NONE or not price.seconds or self.cost_model.machine(num_ranks) is None:
            return price
        use = self.cost_model.collective_use(
            COLLECTIVE_OF[TaskKind(question.kind)],
            size_bytes=question.size_bytes,
            members=np.array([ranks], dtype=np.int64),
            num_ranks=num_ranks,
        )
        latency_s = min(use.latency_s, price.seconds)
        slower = max(use.processors / question.sms, 1.0)
        scale = (latency_s + (price.seconds - latency_s) * slower) / price.seconds
        return replace(
            price, seconds=price.seconds * scale, low_s=price.low_s * scale, high_s=price.high_s * scale
        )

    def _host_copy(self, question: Question) -> _Row:
        row, size = _Row(), question.size_bytes
        row.add(_valid(self.cost_model.host_copy(size_bytes=size), f"host copy of {size} bytes"), count=1)
        return row

    def _distinct(
        self, key: Hashable, members: Callable[[], Sequence[Sequence[int]]]
    ) -> Sequence[Sequence[int]]:
        """Return the sets of ranks that lie differently, looked for once per group or pair of ranks."""
        if key not in self.sets:
            self.sets[key] = self.cost_model.distinct(members())
        return self.sets[key]

    def _slowest_of(
        self, sets: Sequence[Sequence[int]], ask: Callable[[Sequence[int]], Price], *, what: str
    ) -> _Row:
        """Price the slowest of several sets of ranks that do the same thing."""
        row = _Row()
        row.add(max((_valid(ask(ranks), what) for ranks in sets), key=lambda price: price.seconds), count=1)
        return row


def transfer_pairs(plan: Plan, source: int, target: int) -> list[tuple[int, int]]:
    """Return who sends to whom when pipeline rank `source` sends to `target`: (rank, rank) by replica."""
    mesh = plan.mesh
    return list(zip(mesh.ranks(pp=source), mesh.ranks(pp=target), strict=True))


def budgets(plan: Plan) -> npt.NDArray[np.int64]:
    """Return the processors that the rule of each task's stream states, int64 [tasks], or NONE."""
    stated = []
    for device in plan.device_plans:
        by_stream = {rule.stream: rule.sms for rule in device.stream_rules if rule.sms is not None}
        of_stream = [by_stream.get(number, NONE) for number in range(len(device.streams))]
        stated.append(np.array(of_stream, dtype=np.int64)[device.tasks.stream])
    return np.concatenate(stated)


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
