"""From a strategy text to a plan of a hand-made model, for compiler tests."""

from __future__ import annotations

from collections.abc import Callable

from piper.compiler import compile_graph
from piper.graph import CapturedModel, build_graph
from piper.strategy import Strategy, complete, load_strategy, resolve
from simulator.plan import Plan
from tests.models import captured


def compiled(
    text: str,
    *,
    layers: int = 4,
    tied: bool = False,
    gpus: int | None = None,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    clip: float | None = 1.0,
    on_pass: Callable[[str, str], None] | None = None,
    model: Callable[[int], CapturedModel] | None = None,
) -> Plan:
    """Compile the toy model of `tests.models`, or what `model` makes of a size, under a strategy."""
    strategy: Strategy = load_strategy(text)
    resolved = resolve(
        strategy, gpus=gpus, gpus_per_node=8, global_batch=global_batch, micro_batch=micro_batch
    )
    models = [
        model(size) if model else captured(layers=layers, tied=tied, micro_batch=size, dtype=dtype)
        for size in resolved.captured_sizes
    ]
    stages, directives = complete(resolved, models[0])
    graph = build_graph(
        models,
        stages,
        replica_batch=resolved.replica_batch,
        dtype=dtype,
        optimizer=optimizer,
        clip_grad_norm=clip,
    )
    return compile_graph(
        graph, directives, strategy=str(resolved.shorthand), notices=resolved.notices, on_pass=on_pass
    )
