"""`compile_graph`: apply directives by phase, run the passes, emit one device plan per pipeline rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from piper.compiler.cuts import cuts_of
from piper.compiler.device_plan import emit
from piper.compiler.emission import Emission
from piper.compiler.local import LocalModel
from piper.compiler.templates import DeviceTemplates
from piper.compiler.works import WorkTable
from piper.directives import PHASES, Order, Place
from piper.errors import StrategyError
from piper.graph import Graph, dump, topological_order, verify
from piper.graph.directive import Directive
from piper.graph.graph import Rewrite, Rows
from piper.passes import PASSES
from piper.passes.check_order import CheckOrder
from simulator.plan import Cuts, Plan, Segment, TaskKind, TrainingFacts


def compile_graph(
    graph: Graph,
    directives: Sequence[Directive],
    *,
    strategy: str,
    notices: Sequence[str] = (),
    on_pass: Callable[[str, str], None] | None = None,
    verified: bool = True,
) -> Plan:
    """Return the plan of a captured and cut model under directives.

    Args:
        graph: from `build_graph`.
        directives: complete (mesh, place of every stage, split, order with rows, ...).
        strategy: canonical shorthand, for people.
        notices: what resolving the strategy assumed.
        on_pass: called with (name, text of the graph) after every directive and pass.
        verified: check our invariants after every rewrite (a search compiles thousands of times without).
    Raises: StrategyError where a directive does not fit the model.
    """
    return rewritten(
        graph, directives, strategy=strategy, notices=notices, on_pass=on_pass, verified=verified
    ).plan()


def rewritten(
    graph: Graph,
    directives: Sequence[Directive],
    *,
    strategy: str,
    notices: Sequence[str] = (),
    on_pass: Callable[[str, str], None] | None = None,
    verified: bool = True,
) -> CompiledGraph:
    """Return what `compile_graph` emits its plan from: for several orders of one job."""
    steps: list[tuple[str, Rewrite]] = [
        (d.op, d) for phase in PHASES for d in directives if isinstance(d, phase)
    ]
    steps += [(name, kind()) for name, kind in PASSES.items()]
    for name, rewrite in steps:
        before, graph = graph, rewrite.apply(graph)
        if verified and not _same_shape(before, graph):
            verify(graph, after=name)
        if on_pass is not None:
            on_pass(name, dump(graph))
    return CompiledGraph(graph=graph, directives=tuple(directives), strategy=strategy, notices=tuple(notices))


def _same_shape(before: Graph, after: Graph) -> bool:
    """Return whether a rewrite changed no edge and no uid, so that what was verified still holds."""
    unchanged = before.edges is after.edges and len(before.nodes) == len(after.nodes)
    return unchanged and all(
        old is new or old.uid == new.uid for old, new in zip(before.nodes, after.nodes, strict=True)
    )


def emit_plan(graph: Graph, directives: Sequence[Directive], *, strategy: str) -> Plan:
    """Return the plan of a graph after all passes; arguments as in `compile_graph`."""
    return CompiledGraph(graph=graph, directives=tuple(directives), strategy=strategy).plan()


@dataclass(frozen=True, kw_only=True)
class CompiledGraph:
    """A graph after all passes, from which plans of any order are emitted.

    What tasks compute, keep and send does not depend on the order; it is found once.

    Args:
        graph: after all passes.
        directives: that made it.
        strategy: canonical shorthand, for people.
        notices: what resolving the strategy assumed.
    """

    graph: Graph
    directives: tuple[Directive, ...]
    strategy: str
    notices: tuple[str, ...] = ()

    def reordered(self, rows: Rows, *, schedule: str, directives: Sequence[Directive]) -> Plan:
        """Return the plan with other rows.

        Raises: StrategyError for rows that are not complete, or that split backwards of stages whose
            backwards were whole, or change where stages live: those need a compilation.
        """
        return self._reordered(replace(self.graph, rows=rows, schedule=schedule), directives)

    def with_batch(
        self, sizes: tuple[int, ...], *, directives: Sequence[Directive], notices: Sequence[str] = ()
    ) -> Plan:
        """Return the plan with other numbers of equal microbatches, whose order a schedule states.

        Args:
            sizes: sequences of each microbatch of a replica, each as large as some were.
            directives: all of the strategy, with the order for so many microbatches.
            notices: what resolving the strategy assumed.
        Raises: StrategyError as `reordered`.
        """
        graph = replace(self.graph, micro_batch_sizes=sizes, replica_batch=sum(sizes))
        for order in (d for d in directives if isinstance(d, Order)):
            graph = order.apply(graph)
        return replace(self._reordered(graph, directives), notices=tuple(notices))

    def _reordered(self, graph: Graph, directives: Sequence[Directive]) -> Plan:
        graph = CheckOrder().apply(graph)
        halves = {n.stage for n in graph.nodes if n.kind is TaskKind.BI}
        for task in (task for row in graph.rows for slot in row for task in slot):
            if task.kind is TaskKind.BI and task.stage not in halves:
                raise StrategyError(
                    where="order", field="task", value=task.code, rule="splits a backward that was whole",
                    fix="compile the strategy with this order",
                )  # fmt: skip
        return self._emitted(graph, directives)

    def plan(self) -> Plan:
        """Return the plan with the rows of the graph."""
        return self._emitted(self.graph, self.directives)

    @cached_property
    def _works(self) -> WorkTable:
        return WorkTable(self.graph)

    @cached_property
    def _cuts(self) -> Cuts:
        return cuts_of(self.graph)

    @cached_property
    def _place(self) -> dict[str, int]:
        return {uid: number for number, uid in enumerate(topological_order(self.graph))}

    @cached_property
    def _templates(self) -> tuple[DeviceTemplates, ...]:
        graph = self.graph
        numbers = {group.name: i for i, group in enumerate(graph.groups)}
        return tuple(
            DeviceTemplates(
                graph=graph,
                pipeline_rank=rank,
                works=self._works,
                locals_=self._locals(rank),
                groups=numbers,
                place=self._place,
            )
            for rank in range(len(graph.rows))
        )

    def _locals(self, pipeline_rank: int) -> dict[int, LocalModel]:
        """Return what a rank holds, by microbatch size; pipeline ranks with one mesh share it."""
        graph, stage = self.graph, self.graph.stages_of_rank(pipeline_rank)[0]
        sizes = tuple(graph.axis_size(axis, stage=stage) for axis in ("tp", "cp", "dp"))
        if sizes not in self._locals_of:
            models = {model.micro_batch: model for model in graph.models}
            self._locals_of[sizes] = {
                size: LocalModel(graph=graph, model=models[graph.local_batch(size, stage=stage)], stage=stage)
                for size in dict.fromkeys(graph.micro_batch_sizes)
            }
        return self._locals_of[sizes]

    @cached_property
    def _locals_of(self) -> dict[tuple[int, ...], dict[int, LocalModel]]:
        return {}

    def _emitted(self, graph: Graph, directives: Sequence[Directive]) -> Plan:
        local_groups = frozenset(g.name for g in graph.groups if len(g.pipeline_ranks) == 1)
        emissions = [
            Emission(templates=templates, row=row, sizes=graph.micro_batch_sizes, local_groups=local_groups)
            for templates, row in zip(self._templates, graph.rows, strict=True)
        ]
        device_plans = emit(emissions)
        model, listed = graph.model, _in_plan_order(directives)
        return Plan(
            strategy=self.strategy,
            directives=tuple(entry for entry, _ in listed),
            schedule=graph.schedule,
            model=model.facts,
            training=TrainingFacts(
                seq_len=model.seq_len,
                global_batch=graph.replica_batch * graph.placed_mesh.size("dp"),
                micro_batch_sizes=graph.micro_batch_sizes,
                dtype=graph.dtype,
                optimizer=graph.optimizer,
                clip_grad_norm=graph.clip_grad_norm,
                states=graph.state_dtypes,
            ),
            mesh=graph.placed_mesh,
            parameters=model.parameters,
            segments=_segments(graph),
            edges=graph.crossings,
            works=tuple(self._works.works),
            groups=graph.groups,
            device_plans=device_plans,
            notices=self.notices,
            directive_places=tuple(where for _, where in listed),
            cuts=self._cuts,
        )


def _segments(graph: Graph) -> tuple[Segment, ...]:
    return tuple(
        Segment(
            name=segment.name,
            tags=tuple(sorted((dict(segment.tags) | {"PP": stage}).items())),
            stage=stage,
            parameters=segment.parameters,
            inputs=segment.inputs,
            outputs=segment.outputs,
        )
        for segment, stage in zip(graph.model.segments, graph.stage_of_segment, strict=True)
    )


def _in_plan_order(directives: Sequence[Directive]) -> list[tuple[dict[str, Any], str]]:
    """Return the file form of directives and where they stand, in an order that is not that of the file.

    Only places keep theirs: a later one overrides an earlier one.
    """
    listed = [(directive, directive.to_json()) for directive in directives]

    def rank(pair: tuple[Directive, dict[str, Any]]) -> tuple[int, str]:
        directive, entry = pair
        phase = next(i for i, kind in enumerate(PHASES) if isinstance(directive, kind))
        return phase, "" if isinstance(directive, Place) else json.dumps(entry, sort_keys=True)

    return [(entry, directive.where) for directive, entry in sorted(listed, key=rank)]
