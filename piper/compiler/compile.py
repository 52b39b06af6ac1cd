"""`compile_graph`: apply directives by phase, run the passes, emit one device plan per pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from piper.compiler.available import require_compilable
from piper.compiler.device_plan import emit
from piper.compiler.emission import Emission
from piper.compiler.local import LocalModel
from piper.compiler.templates import DeviceTemplates
from piper.compiler.works import WorkTable
from piper.directives import PHASES
from piper.graph import Graph, dump, topological_order, verify
from piper.graph.directive import Directive
from piper.graph.graph import Rewrite
from piper.passes import PASSES
from simulator.plan import Plan, Segment, TrainingFacts


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
    steps: list[tuple[str, Rewrite]] = [
        (d.op, d) for phase in PHASES for d in directives if isinstance(d, phase)
    ]
    steps += [(name, kind()) for name, kind in PASSES.items()]
    for name, rewrite in steps:
        if name == next(iter(PASSES)):
            require_compilable(graph)
        graph = rewrite.apply(graph)
        if verified:
            verify(graph, after=name)
        if on_pass is not None:
            on_pass(name, dump(graph))
    return emit_plan(graph, directives, strategy=strategy, notices=notices)


def emit_plan(
    graph: Graph, directives: Sequence[Directive], *, strategy: str, notices: Sequence[str] = ()
) -> Plan:
    """Return the plan of a graph after all passes; arguments as in `compile_graph`."""
    groups = graph.groups
    numbers = {group.name: i for i, group in enumerate(groups)}
    works, order = WorkTable(graph), topological_order(graph)
    local_groups = frozenset(g.name for g in groups if len(g.pipeline_ranks) == 1)
    locals_ = {model.micro_batch: LocalModel(graph=graph, model=model) for model in graph.models}
    emissions = [
        Emission(
            templates=DeviceTemplates(
                graph=graph, pipeline_rank=rank, works=works, locals_=locals_, groups=numbers
            ),
            row=row,
            local_groups=local_groups,
        )
        for rank, row in enumerate(graph.rows)
    ]
    device_plans = emit(emissions, order)
    model = graph.model
    return Plan(
        strategy=strategy,
        directives=tuple(directive.to_json() for directive in directives),
        schedule=graph.schedule,
        model=model.facts,
        training=TrainingFacts(
            seq_len=model.seq_len,
            global_batch=graph.replica_batch * graph.placed_mesh.size("dp"),
            micro_batch_sizes=graph.micro_batch_sizes,
            dtype=graph.dtype,
            optimizer=graph.optimizer,
            clip_grad_norm=graph.clip_grad_norm,
        ),
        mesh=graph.placed_mesh,
        parameters=model.parameters,
        segments=tuple(
            Segment(
                name=segment.name,
                tags=tuple(sorted((dict(segment.tags) | {"PP": stage}).items())),
                stage=stage,
                parameters=segment.parameters,
                inputs=segment.inputs,
                outputs=segment.outputs,
            )
            for segment, stage in zip(model.segments, graph.stage_of_segment, strict=True)
        ),
        edges=graph.crossings,
        works=tuple(works.works),
        groups=groups,
        device_plans=device_plans,
        notices=tuple(notices),
        directive_places=tuple(directive.where for directive in directives),
    )
