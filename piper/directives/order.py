"""`order`: in which order a pipeline rank runs its forwards and backwards. Optional: 1F1B is the default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from cost_models.errors import check_invariant
from piper.errors import StrategyError
from piper.graph.directive import Directive, read_whole_number, refuse_unknown_keys
from piper.graph.filters import Filter
from piper.graph.graph import Graph, Rows
from piper.graph.tasks import row_of_filters
from simulator.plan import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(Directive):
    """Order the compute tasks: by a named schedule for all ranks, or slot by slot for one rank.

    rewrite: F(mb 0), F(mb 1), B(mb 0), B(mb 1) in any order  ->  F(mb 0) ~> B(mb 0) ~> F(mb 1) ~> B(mb 1)

    Args:
        schedule: name of a schedule, e.g. "1f1b"; `rows` is its expansion (filled in by `piper.strategy`).
        vp: of a named schedule: stages per pipeline rank; None: as placed.
        filters: instead, the slots of one pipeline rank ([Note: slots] in `piper.graph.tasks`): tasks of
            whole stages or of parts of them; what no slot names is filled in by the default policy.
        dimension: the tag that names a microbatch (`dim_name` of split, filled in by `piper.strategy`).
        rows: per pipeline rank its slots.
    """

    op: ClassVar[str] = "order"
    keys: ClassVar[tuple[str, ...]] = ("schedule", "vp", "filters")

    schedule: str | None = None
    vp: int | None = None
    filters: tuple[tuple[Filter, ...], ...] = ()
    dimension: str = "MB"
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
        vp = (
            read_whole_number(entry["vp"], where=where, name="order.vp")
            if entry.get("vp") is not None
            else None
        )
        if "schedule" in entry:
            return cls(schedule=_schedule(entry["schedule"], where=where), vp=vp, where=where)
        if vp is not None:
            raise StrategyError(
                where=where, field="order.vp", value=vp, rule="is about a named schedule",
                fix="leave it out: place says where stages are",
            )  # fmt: skip
        return cls(filters=_slots(entry["filters"], where=where), where=where)

    def to_json(self) -> dict[str, Any]:
        """Return the file form."""
        if self.schedule is not None:
            vp = {} if self.vp is None else {"vp": self.vp}
            return {"op": self.op, "schedule": self.schedule, **vp}
        return {"op": self.op, "filters": [[which.to_json() for which in slot] for slot in self.filters]}

    def apply(self, graph: Graph) -> Graph:
        """Set the rows of all ranks, or of the rank whose stages the filters name."""
        if self.schedule is not None:
            check_invariant(bool(self.rows), f"schedule {self.schedule} was not expanded")
            rows = _without_missing_backwards(self.rows, graph)
            return replace(graph, rows=rows, row_lines=(self.where,) * len(rows), schedule=self.schedule)
        row = row_of_filters(graph, self.filters, where=self.where, dimension=self.dimension)
        home = graph.pipeline_rank_of_stage[row.slots[0][0].stage]
        ranks = graph.num_pipeline_ranks
        listed, lines = list(graph.rows or ((),) * ranks), list(graph.row_lines or ("",) * ranks)
        if lines[home]:
            raise StrategyError(
                where=self.where, field="order.filters", value=f"pipeline rank {home}",
                rule=f"already has the order at {lines[home]}",
                fix="write one order directive per pipeline rank",
            )  # fmt: skip
        listed[home], lines[home] = row.slots, self.where
        return replace(
            graph,
            rows=tuple(listed),
            row_lines=tuple(lines),
            row_borders=tuple(sorted({*graph.row_borders, *row.borders})),
            schedule="custom",
        )


def _schedule(value: object, *, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise StrategyError(
            where=where, field="order.schedule", value=value, rule="must be a schedule's name",
            fix="`piper schedules` lists them",
        )  # fmt: skip
    return value


def _slots(value: object, *, where: str) -> tuple[tuple[Filter, ...], ...]:
    if not isinstance(value, list) or not all(isinstance(slot, list) and slot for slot in value) or not value:
        raise StrategyError(
            where=where, field="order.filters", value=value,
            rule="must be a list of non-empty lists of filters",
            fix='write [[{"PP": 0, "MB": 0, "PASS": "F"}], ...]',
        )  # fmt: skip
    return tuple(
        tuple(Filter.parse(which, where=where, field=f"order.filters[{i}]") for which in slot)
        for i, slot in enumerate(value)
    )


def _without_missing_backwards(rows: Rows, graph: Graph) -> Rows:
    """Leave out the backwards of stages that have none: nothing in or before them is trained."""
    backward = {node.stage for node in graph.nodes if node.kind in (TaskKind.B, TaskKind.BI)}
    if len(backward) == graph.num_stages:
        return rows
    kept = (
        (tuple(task for task in slot if task.kind is TaskKind.F or task.stage in backward) for slot in row)
        for row in rows
    )
    return tuple(tuple(slot for slot in row if slot) for row in kept)
