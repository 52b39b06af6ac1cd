"""From a strategy text to a plan of the toy model and the program that runs it, captured once per session."""

from __future__ import annotations

import random
from functools import cache

from torch import nn

from cost_models.ops import Operation, OpKind
from piper.compiler import compile_graph
from piper.compiler.compile import emit_plan
from piper.directives import PHASES
from piper.graph import CapturedModel, CapturedSegment, PassCost, build_graph
from piper.runtime import OptimizerSettings, RunOutcome, run_local
from piper.runtime.known import KnownReferences
from piper.runtime.program import Program, build_program
from piper.runtime.sources import build
from piper.strategy import complete, load_strategy, resolve
from simulator.plan import ModelFacts, Parameter, Plan, TensorSpec
from tests.graphs import after
from tests.piper.runtime.toy import HIDDEN, SEQ, VOCABULARY, toy
from tests.random_parts import with_random_parts

SHARED = KnownReferences()
"""References of all runs of this test process [Note: known references]."""

NOTHING = PassCost(
    operations=(Operation(kind=OpKind.ELEMENTWISE, name="x", shape=(1,), dtype="fp32", flops=1, bytes=4),),
    workspace_bytes=0,
)


@cache
def program(size: int, options: tuple[tuple[str, object], ...]) -> Program:
    return build_program(toy(**dict(options)), seq_len=SEQ, micro_batch_sizes=(size,), dtype="fp32")


@cache
def captured(size: int, options: tuple[tuple[str, object], ...]) -> CapturedModel:
    """Return what capture would say about the segments; costs are made up, the runtime reads none."""
    module: nn.Module = build(toy(**dict(options)), dtype="fp32", device="meta", seq_len=SEQ)
    parameters = tuple(
        Parameter(name=name, shape=tuple(p.shape), trainable=p.requires_grad)
        for name, p in module.named_parameters()
    )
    codes = program(size, options).segments[size]
    count = sum(parameter.numel for parameter in parameters)
    return CapturedModel(
        facts=ModelFacts(
            name="toy", n_parameters=count, n_active_parameters=count, layers=4, hidden=HIDDEN, heads=2,
            head_dim=12, vocabulary=VOCABULARY,
        ),
        parameters=parameters,
        segments=tuple(
            CapturedSegment(
                name=f"segment{i}", tags=code.tags, parameters=code.parameters, inputs=code.inputs,
                outputs=tuple(
                    TensorSpec(
                        shape=o.shape,
                        dtype=o.dtype,
                        batch_dim=0 if o.shape else None,
                        requires_grad=o.requires_grad,
                    )
                    for o in code.outputs
                ),
                forward=NOTHING, forward_no_grad=NOTHING, backward=NOTHING, saved_bytes=8,
                inputs_saved=tuple(True for _ in code.inputs),
                outputs_saved=tuple(False for _ in code.outputs),
            )
            for i, code in enumerate(codes)
        ),
        buffer_bytes=0, micro_batch=size, seq_len=SEQ, dtype="fp32",
    )  # fmt: skip


def plan_of(
    text: str,
    *,
    global_batch: int = 8,
    micro_batch: int = 1,
    optimizer: str = "sgd",
    clip: float | None = None,
    **options: object,
) -> Plan:
    key = tuple(sorted(options.items()))
    resolved = resolve(
        load_strategy(text), gpus=None, gpus_per_node=8, global_batch=global_batch, micro_batch=micro_batch
    )
    models = [captured(size, key) for size in resolved.captured_sizes]
    stages, directives = complete(resolved, models[0])
    graph = build_graph(
        models,
        stages,
        replica_batch=resolved.replica_batch,
        dtype="fp32",
        optimizer=optimizer,
        clip_grad_norm=clip,
    )
    return compile_graph(graph, directives, strategy=str(resolved.shorthand), notices=resolved.notices)


def parted_plan_of(text: str, *, seed: int, halves: float | None = None, **options: object) -> Plan:
    """Return a plan of `plan_of`'s job whose rows divide stages at random, and order the parts so."""
    key = tuple(sorted(options.items()))
    resolved = resolve(load_strategy(text), gpus=None, gpus_per_node=8, global_batch=6, micro_batch=1)
    models = [captured(size, key) for size in resolved.captured_sizes]
    stages, directives = complete(resolved, models[0])
    graph = build_graph(
        models,
        stages,
        replica_batch=resolved.replica_batch,
        dtype="fp32",
        optimizer="sgd",
        clip_grad_norm=0.1,
    )
    for directive in (d for phase in PHASES for d in directives if isinstance(d, phase)):
        graph = directive.apply(graph)
    graph = with_random_parts(graph, random.Random(seed), halves=halves)
    return emit_plan(after(graph, "check_order"), [], strategy=text)


def program_for(plan: Plan, **options: object) -> Program:
    key = tuple(sorted(options.items()))
    parts = [program(size, key) for size in dict.fromkeys(plan.training.micro_batch_sizes)]
    segments = {size: codes for part in parts for size, codes in part.segments.items()}
    return Program(segments=segments, buffers=parts[0].buffers)


def train(
    plan: Plan,
    *,
    steps: int = 3,
    verify: bool = True,
    settings: OptimizerSettings | None = None,
    model: dict[str, object] | None = None,
    **options: object,
) -> RunOutcome:
    """Run a plan of the toy model on local processes; `model` holds the options of the toy."""
    chosen = model or {}
    return run_local(
        plan,
        toy(**chosen),
        num_ranks=plan.num_ranks,
        steps=steps,
        verify=verify,
        optimizer=settings,
        program=program_for(plan, **chosen),
        **{"timeout_s": 60.0, "references": SHARED, **options},
    )
