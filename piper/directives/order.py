"""`order`: in which order a pipeline rank runs its forwards and backwards. Optional: 1F1B is the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from cost_models.errors import check_invariant
from piper.errors import StrategyError
from piper.graph.directive import Directive, not_yet, refuse_unknown_keys
from piper.graph.filters import Filter
from piper.graph.graph import Graph, Rows
from simulator.plan import TaskKind, TaskName


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(Directive):
    """Order the compute tasks: by a named schedule for all ranks, or slot by slot for one rank.

    rewrite: F(mb 0), F(mb 1), B(mb 0), B(mb 1) in any order  ->  F(mb 0) ~> B(mb 0) ~> F(mb 1) ~> B(mb 1)

    Args:
        schedule: name of a schedule, e.g. "1f1b"; `rows` is its expansion (filled in by `piper.strategy`).
        filters: instead, the slots of one pipeline rank; each slot is a list of filters that name one
            stage (PP), one microbatch (MB) and one pass (PASS); tasks in one slot may overlap.
        rows: per pipeline rank its slots.
    """

    op: ClassVar[str] = "order"
    keys: ClassVar[tuple[str, ...]] = ("schedule", "filters")

    schedule: str | None = None
    filters: tuple[tuple[Filter, ...], ...] = ()
    rows: Rows = ()

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "order", "schedule": "1f1b"}` or `{"op": "order", "filters": [[{...}], ...]}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        if ("schedule" in entry) is ("filters" in entry):
            raise StrategyError(
                where=where, field="order.schedule", value=entry.get("schedule"),
                rule="or filters must be given, not both", fix='write {"op": "order", "schedule": "1f1b"}',
            )  # fmt: skip
        if "schedule" in entry:
            if not isinstance(entry["schedule"], str) or not entry["schedule"].strip():
                raise StrategyError(
                    where=where,
                    field="order.schedule",
                    value=entry["schedule"],
                    rule="must be a schedule's name",
                    fix="`piper schedules` lists them",
                )
            return cls(schedule=entry["schedule"], where=where)
        slots = entry["filters"]
        if (
            not isinstance(slots, list)
            or not all(isinstance(slot, list) and slot for slot in slots)
            or not slots
        ):
            raise StrategyError(
                where=where,
                field="order.filters",
                value=slots,
                rule="must be a list of non-empty lists of filters",
                fix='write [[{"PP": 0, "MB": 0, "PASS": "F"}], ...]',
            )
        return cls(
            filters=tuple(
                tuple(Filter.parse(f, where=where, field=f"order.filters[{i}]") for f in slot)
                for i, slot in enumerate(slots)
            ),
            where=where,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the file form."""
        if self.schedule is not None:
            return {"op": self.op, "schedule": self.schedule}
        slots = [[_name_json(_task(f, where=self.where)) for f in slot] for slot in self.filters]
        return {"op": self.op, "filters": slots}

    def apply(self, graph: Graph) -> Graph:
        """Set the rows of all ranks, or of the rank whose stages the filters name."""
        if self.schedule is not None:
            check_invariant(bool(self.rows), f"schedule {self.schedule} was not expanded")
            self._refuse_split_backward(self.rows, "schedule", self.schedule)
            return replace(graph, rows=_without_missing_backwards(self.rows, graph), schedule=self.schedule)
        row = tuple(tuple(_task(f, where=self.where) for f in slot) for slot in self.filters)
        self._refuse_split_backward((row,), "order.filters", "BI, BW")
        homes = sorted({self._home(graph, task) for slot in row for task in slot})
        if len(homes) != 1:
            raise StrategyError(
                where=self.where, field="order.filters", value=f"pipeline ranks {homes}",
                rule="crosses device placement", fix="write one order directive per pipeline rank",
            )  # fmt: skip
        rows = list(graph.rows or ((),) * graph.num_pipeline_ranks)
        if rows[homes[0]]:
            raise StrategyError(
                where=self.where, field="order.filters", value=f"pipeline rank {homes[0]}",
                rule="already has an order", fix="write one order directive per pipeline rank",
            )  # fmt: skip
        rows[homes[0]] = row
        return replace(graph, rows=tuple(rows), schedule="custom")

    def _refuse_split_backward(self, rows: Rows, name: str, value: str) -> None:
        split = {TaskKind.BI, TaskKind.BW}
        if any(task.kind in split for row in rows for slot in row for task in slot):
            raise not_yet(
                self.where, name, value,
                instead="use a schedule with fused backwards (B), such as 1f1b; "
                "`piper schedules` draws those that split them",
            )  # fmt: skip

    def _home(self, graph: Graph, task: TaskName) -> int:
        home = graph.pipeline_rank_of_stage.get(task.stage)
        if home is None or task.microbatch >= len(graph.micro_batch_sizes):
            raise StrategyError(
                where=self.where, field="order.filters", value=task.code, rule="is no task of this strategy",
                fix=f"there are {graph.num_stages} stages and {len(graph.micro_batch_sizes)} microbatches",
            )  # fmt: skip
        return home


def _without_missing_backwards(rows: Rows, graph: Graph) -> Rows:
    """Leave out the backwards of stages that have none: nothing in or before them is trained."""
    backward = {node.stage for node in graph.nodes if node.kind is TaskKind.B}
    kept = (
        (tuple(task for task in slot if task.kind is TaskKind.F or task.stage in backward) for slot in row)
        for row in rows
    )
    return tuple(tuple(slot for slot in row if slot) for row in kept)


def _task(which: Filter, *, where: str) -> TaskName:
    stage, microbatch = which.exact("PP"), which.exact("MB")
    passes = which.passes or frozenset()
    if stage is None or microbatch is None or len(passes) != 1 or set(which.tag_names) != {"PP", "MB"}:
        raise StrategyError(
            where=where, field="order.filters", value=which.source,
            rule="must name one PP, one MB and one PASS",
            fix='write {"PP": 0, "MB": 0, "PASS": "F"}',
        )  # fmt: skip
    return TaskName(kind=TaskKind[next(iter(passes))], stage=stage, microbatch=microbatch)


def _name_json(task: TaskName) -> dict[str, Any]:
    return {"PP": task.stage, "MB": task.microbatch, "PASS": task.kind.name}
