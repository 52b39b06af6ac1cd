"""(Plan, price table, cost model) -> `Sharing`: what each row of the table holds, on few links.

[Note: folded links]  All ranks of a device plan do the same at once, so that the load of a flow on a link is
    the sum over all its concrete sets of ranks. Two links that every flow loads alike are full together: one
    of them stands for both.
[Note: links that cannot be full]  A stream drives one flow at a time. A link on which the largest loads of
    all streams together fit is never full, and is left out.
[Note: shared cores]  Where ranks compute on the cores of one host, these are a link on which every
    computation takes one core: it flows as a message without a peer does, and nothing else slows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models.price import CostModel
from cost_models.use import CommunicationUse, Machine
from simulator import rules
from simulator.distinct import distinct_rows
from simulator.matching import Matching
from simulator.plan import NONE, Plan, TaskKind
from simulator.pricing import COLLECTIVE_OF, PriceTable, Question, budgets, transfer_pairs
from simulator.sharing.driving import driving_stream
from simulator.sharing.sharing import Sharing

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def share(
    plan: Plan,
    cost_model: CostModel,
    *,
    questions: list[Question],
    prices: PriceTable,
    price: Ints,
    stream: Ints,
    is_compute: npt.NDArray[np.bool_],
    matching: Matching,
) -> Sharing | None:
    """Return what each row of the price table holds; None if the cost model shares nothing.

    Args:
        questions: what each row but the last is the price of.
        price: int64 [tasks], row of each, or NONE.
        stream: int64 [tasks], over all device plans.
    """
    machine = cost_model.machine(plan.num_ranks)
    if machine is None:
        return None
    if machine.cores is not None:
        is_compute = np.zeros_like(is_compute)  # [Note: shared cores]
    asker = asker_of(plan, cost_model, machine)
    rows = [asker.row(question, float(prices.seconds[number])) for number, question in enumerate(questions)]
    rows.append(Row())
    driver = driving_stream(matching, stream=stream, is_compute=is_compute)
    return sharing_of(
        rows,
        machine,
        row=price,
        driver=driver,
        processors=_processors(plan, rows, price=price, is_compute=is_compute),
        priority=_priorities(plan),
    )


def sharing_of(
    rows: Sequence[Row], machine: Machine, *, row: Ints, driver: Ints, processors: Ints, priority: Ints
) -> Sharing:
    """Return the columns of some rows, the last of which is free.

    Args:
        row: int64 [tasks], row of each, or NONE.
        driver: int64 [tasks], as in `driving_stream`.
        processors, priority: as in `Sharing`.
    """
    starts, links, uses, names = _links(rows, machine, row=row, driver=driver)
    return Sharing(
        latency_ns=np.array([rules.duration_ns(found.latency_s) for found in rows], dtype=np.int64),
        growth=np.array([1.0 / found.busiest if found.busiest else 0.0 for found in rows]),
        link_starts=starts,
        links=links,
        uses=uses,
        link_names=names,
        memory=np.array([found.memory for found in rows]),
        processor_part=np.array([found.processor_part for found in rows]),
        memory_part=np.array([found.memory_part for found in rows]),
        processors=processors,
        priority=priority,
        num_processors=machine.processors,
        by_cores=machine.cores is not None,
    )


@dataclass(kw_only=True, slots=True)
class Row:
    """What one row holds: fields as in `Sharing`, on concrete links (each once, `links` rising)."""

    latency_s: float = 0.0
    busiest: float = 0.0
    processors: int = 0
    memory: float = 0.0
    processor_part: float = 0.0
    memory_part: float = 0.0
    links: Ints | None = None
    uses: Floats | None = None


def asker_of(plan: Plan, cost_model: CostModel, machine: Machine) -> Asker:
    """Return who asks about a plan; `pipelines` are int64 [pipelines, pipeline ranks]."""
    ranks = [plan.mesh.ranks(pp=rank) for rank in range(plan.num_pipeline_ranks)]
    return Asker(
        plan=plan, cost_model=cost_model, machine=machine, pipelines=np.array(ranks, dtype=np.int64).T
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Asker:
    """Asks a cost model what the questions of a plan hold."""

    plan: Plan
    cost_model: CostModel
    machine: Machine
    pipelines: Ints

    def row(self, question: Question, seconds: float, *, sets: Ints | None = None) -> Row:
        """Return what a question holds whose price is `seconds`.

        Args:
            sets: int64 [sets, ranks of each], who does it at once; None: all whom `sets_of` names.
        """
        sets = self.sets_of(question) if sets is None else sets
        if question.work != NONE:
            return self._work(question, seconds, ranks=len(sets))
        return self._communication(self._use(question, sets), seconds)

    def sets_of(self, question: Question) -> Ints:
        """Return all concrete sets of ranks that a question is about, int64 [sets, ranks of each]."""
        plan = self.plan
        if question.group != NONE:
            return np.array(plan.groups[question.group].members, dtype=np.int64)
        if question.source != question.target:
            return np.array(transfer_pairs(plan, question.source, question.target), dtype=np.int64)
        if question.work != NONE:
            return np.zeros((plan.replicas, 1), dtype=np.int64)
        return np.array(plan.mesh.ranks(pp=question.source), dtype=np.int64)[:, None]

    def _work(self, question: Question, seconds: float, *, ranks: int) -> Row:
        if not seconds:
            return Row()
        if self.machine.cores is not None:
            use = ranks / float(self.machine.link_bytes_per_s[self.machine.cores])
            return Row(busiest=use, links=np.array([self.machine.cores]), uses=np.array([use]))
        operations = self.plan.works[question.work].operations
        uses = [(self.cost_model.operation_use(operation), operation.count) for operation in operations]
        processor_s = sum(use.processor_s * count for use, count in uses)
        memory_s = sum(use.memory_s * count for use, count in uses)
        moved = sum(use.memory_bytes * count for use, count in uses)
        return Row(
            memory=min(moved / memory_s / self.machine.memory_bytes_per_s, 1.0) if memory_s else 0.0,
            processor_part=min(processor_s / seconds, 1.0),
            memory_part=min(memory_s / seconds, 1.0),
        )

    def _use(self, question: Question, sets: Ints) -> CommunicationUse:
        size, ranks = question.size_bytes, self.plan.num_ranks
        if question.group != NONE:
            kind = COLLECTIVE_OF[TaskKind(question.kind)]
            return self.cost_model.collective_use(kind, size_bytes=size, members=sets, num_ranks=ranks)
        if question.source != question.target:
            return self.cost_model.transfer_use(
                size_bytes=size, pairs=sets, num_ranks=ranks, communicators=self.pipelines
            )
        to_host = question.kind == TaskKind.OFFLOAD
        return self.cost_model.host_copy_use(
            size_bytes=size, ranks=sets[:, 0], to_host=to_host, num_ranks=ranks
        )

    def _communication(self, use: CommunicationUse, seconds: float) -> Row:
        """Return what a communication holds while its bytes flow."""
        wire_s = seconds - use.latency_s
        if wire_s <= 0:
            return Row(latency_s=seconds, processors=use.processors)
        links, place = np.unique(use.links, return_inverse=True)
        loads = np.bincount(place, weights=use.link_bytes, minlength=len(links))
        uses = loads / wire_s / self.machine.link_bytes_per_s[links]
        loaded = uses > 0
        return Row(
            latency_s=use.latency_s,
            busiest=float(uses.max(initial=0.0)),
            processors=use.processors,
            memory=min(use.memory_bytes / wire_s / self.machine.memory_bytes_per_s, 1.0),
            links=links[loaded],
            uses=uses[loaded],
        )


def _links(
    rows: Sequence[Row], machine: Machine, *, row: Ints, driver: Ints
) -> tuple[Ints, Ints, Floats, tuple[str, ...]]:
    """Return entries by row (starts, links, uses) and the names of links; both notes of this module."""
    none = np.zeros(0)
    counts = [0 if found.links is None else len(found.links) for found in rows]
    of_row = np.repeat(np.arange(len(rows)), counts)
    links = np.concatenate([none if found.links is None else found.links for found in rows]).astype(np.int64)
    uses = np.concatenate([none if found.uses is None else found.uses for found in rows])
    kept = _one_of_each(of_row, links, uses)
    of_row, links, uses = of_row[kept], links[kept], uses[kept]
    kept = np.isin(links, _may_be_full(of_row, links, uses, flows=(row, driver)))
    of_row, uses = of_row[kept], uses[kept]
    concrete, links = np.unique(links[kept], return_inverse=True)
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(np.bincount(of_row, minlength=len(rows)), out=starts[1:])
    names = tuple(machine.describe_link(link) for link in concrete.tolist())
    return starts, links.astype(np.int64), uses, names


def _one_of_each(of_row: Ints, links: Ints, uses: Floats) -> npt.NDArray[np.bool_]:
    """Return which entries to keep, bool: those of the first of all links with equal loads."""
    mixed = _mixed(of_row.astype(np.uint64) ^ _mixed(uses.view(np.uint64)))
    order = np.argsort(links, kind="stable")
    numbers, first = np.unique(links[order], return_index=True)
    if not len(numbers):
        return np.zeros(0, dtype=np.bool_)
    patterns = np.add.reduceat(mixed[order], first)
    _, chosen = np.unique(patterns, return_index=True)
    return np.isin(links, numbers[chosen])


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return well mixed bits (the finaliser of splitmix64: Steele, Lea and Flood, OOPSLA 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _may_be_full(of_row: Ints, links: Ints, uses: Floats, *, flows: tuple[Ints, Ints]) -> Ints:
    """Return the links that flows of several streams, or one alone, can fill."""
    row, driver = flows
    driven = (driver != NONE) & (row != NONE)
    asked = [row[driven], driver[driven]]
    first, _ = distinct_rows(asked)
    pairs = np.stack([column[first] for column in asked])
    order = np.argsort(of_row, kind="stable")
    starts = np.searchsorted(of_row[order], np.arange(int(row.max(initial=0)) + 2))
    counts = np.diff(starts)[pairs[0]]
    entry = order[np.repeat(starts[pairs[0]] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())]
    stream = np.repeat(pairs[1], counts)
    first, place = distinct_rows([links[entry], stream])
    largest = np.zeros(len(first))
    np.maximum.at(largest, place, uses[entry])
    numbers, place = np.unique(links[entry][first], return_inverse=True)
    together = np.bincount(place, weights=largest, minlength=len(numbers))
    return numbers[together > 1.0]


def _processors(plan: Plan, rows: list[Row], *, price: Ints, is_compute: npt.NDArray[np.bool_]) -> Ints:
    """Return what each communication holds; a rule about its stream goes before what is usual."""
    usual = np.array([row.processors for row in rows], dtype=np.int64)[price]
    tables = [device.tasks for device in plan.device_plans]
    collective = np.concatenate([table.group != NONE for table in tables])
    copies = np.concatenate([np.isin(table.kind, (TaskKind.OFFLOAD, TaskKind.RELOAD)) for table in tables])
    sms = np.where(collective, budgets(plan), NONE)
    return np.where(is_compute | copies, 0, np.where(sms == NONE, usual, sms))


def _priorities(plan: Plan) -> Ints:
    """Return the priority of every stream; 0 where nothing is stated."""
    found = []
    for device in plan.device_plans:
        by_stream = {rule.stream: rule.priority or 0 for rule in device.stream_rules}
        found += [by_stream.get(number, 0) for number in range(len(device.streams))]
    return np.array(found, dtype=np.int64)
