"""F, R, B, BI and BW: run segments, and run autograd backward through one island at a time.

[Note: autograd is cut at islands]
An island's inputs are detached leaves, its outputs go on detached; B seeds the outputs with the sum of
their consumers' gradients (zeros where there is none) and hands on the gradients of the leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from piper.errors import RunFailedError
from piper.runtime.context import RankContext
from piper.runtime.halves import Deferring, LateWork
from piper.runtime.routes import Island, Value
from piper.runtime.step import OpenEnd, OpenGraph, StepState
from simulator.plan import MemoryClass, Task


class Place(NamedTuple):
    """Where an island runs: on which rank, in which step, for which microbatch."""

    context: RankContext
    step: StepState
    microbatch: int


def forward(context: RankContext, step: StepState, task: Task) -> None:
    """Run all islands of a stage; keep graphs only of those that no R task runs again."""
    for island in context.routes.islands[task.stage, task.microbatch]:
        place = Place(context, step, task.microbatch)
        outputs = _run(place, island, keep=island.backward and not island.recomputed)
        for value, tensor in outputs.items():
            step.put(task.microbatch, value, tensor.detach())
            if value == context.routes.loss:
                step.losses[task.microbatch] = _finite(tensor.detach(), step, task.microbatch)


def recompute(context: RankContext, step: StepState, task: Task) -> None:
    """Run an island again, this time keeping its graph."""
    _run(Place(context, step, task.microbatch), context.routes.island(task), keep=True)


def backward(context: RankContext, step: StepState, task: Task) -> None:
    """Compute the gradients of an island's inputs and parameters."""
    island = context.routes.island(task)
    place = Place(context, step, task.microbatch)
    graph = step.graphs.pop((task.microbatch, island.first))
    seeds = _seeds(place, graph)
    parameters = trained_parameters(context, island)
    wanted = [*graph.inputs.values(), *parameters.values()]
    with _accumulating(place, island, parameters):
        if wanted and seeds:
            torch.autograd.backward([end.edge for end in graph.outputs.values()], seeds, inputs=wanted)
    _hand_on(place, island, graph, gradients=[leaf.grad for leaf in graph.inputs.values()])


def backward_inputs(context: RankContext, step: StepState, task: Task) -> None:
    """Compute the gradients of an island's inputs; leave the rest to BW [Note: split backward]."""
    island = context.routes.island(task)
    place = Place(context, step, task.microbatch)
    graph = step.graphs.pop((task.microbatch, island.first))
    seeds = _seeds(place, graph)
    parameters = trained_parameters(context, island)
    wanted = [*graph.inputs.values(), *parameters.values()]
    work = LateWork(ledger=context.ledger)
    found: list[Tensor | None] = [None] * len(wanted)
    if wanted and seeds:
        edges = [end.edge for end in graph.outputs.values()]
        with Deferring(context.halves[island.first, context.micro_batch(task.microbatch)], work) as deferring:
            found = list(torch.autograd.grad(edges, wanted, seeds, allow_unused=True))
        deferring.check_complete()
    work.keep(dict(zip(parameters, found[len(graph.inputs) :], strict=True)))
    step.late[task.microbatch, island.first] = work
    _hand_on(place, island, graph, gradients=found[: len(graph.inputs)])


def backward_weights(context: RankContext, step: StepState, task: Task) -> None:
    """Compute the gradients of parameters that BI left."""
    place = Place(context, step, task.microbatch)
    for island in context.routes.islands_of(task):
        for name, gradient in step.late.pop((task.microbatch, island.first)).finish():
            _accumulate(place, (island.stage, name), gradient)


def trained_parameters(context: RankContext, island: Island) -> dict[str, Tensor]:
    """Return the parameters of an island that take gradients, by name."""
    return {n: context.state.parameters[n] for n in island.parameters if n in context.state.home}


def _seeds(place: Place, graph: OpenGraph) -> list[Tensor]:
    return [_seed(place, value, end) for value, end in graph.outputs.items()]


def _hand_on(place: Place, island: Island, graph: OpenGraph, *, gradients: list[Tensor | None]) -> None:
    """Give the gradients of an island's inputs to whoever made these; zeros where there is none."""
    for key in graph.held:
        place.context.ledger.release(key)
    for (value, leaf), gradient in zip(graph.inputs.items(), gradients, strict=True):
        known = torch.zeros_like(leaf) if gradient is None else gradient
        place.step.add_gradient(place.microbatch, value, ((island.stage, island.first), known))


def loss_gradient(context: RankContext) -> Tensor:
    """Return d(step loss) / d(sum of token losses of a microbatch): 1 / tokens of the global batch."""
    return torch.ones(()) / context.plan.training.tokens_per_step


def _run(place: Place, island: Island, *, keep: bool) -> dict[Value, Tensor]:
    """Run an island; with `keep`, leave its graph for B."""
    leaves: dict[Value, Tensor] = {}
    held: dict[Value, int] = {}
    for value in island.inputs:
        leaves[value], held[value] = _leaf(place, value)
    if keep:
        outputs = _call_with_graph(place, island, leaves)
        inputs = {value: leaf for value, leaf in leaves.items() if leaf.requires_grad}
        place.step.graphs[place.microbatch, island.first] = OpenGraph(
            inputs=inputs,
            outputs={value: _open_end(out) for value, out in outputs.items() if out.requires_grad},
            held=tuple(held.pop(value) for value in inputs),
        )
    else:
        outputs = call_island(place, island, leaves)
    for key in held.values():
        place.context.ledger.release(key)
    return outputs


def _leaf(place: Place, value: Value) -> tuple[Tensor, int]:
    """Return an input of an island, cut from what made it, and the ledger key that holds it."""
    segment, number = value
    if segment < 0:
        copy = place.context.model_input(place.step, place.microbatch, number)
        return copy, place.context.ledger.hold(copy, MemoryClass.ACTIVATIONS)
    tensor, key = place.step.take(place.microbatch, value)
    return tensor.detach(), key


def _call_with_graph(place: Place, island: Island, leaves: dict[Value, Tensor]) -> dict[Value, Tensor]:
    for value, leaf in leaves.items():
        leaf.requires_grad_(place.context.routes.requires_grad(value))
    with torch.enable_grad(), place.context.ledger.saved():
        return call_island(place, island, leaves)


def call_island(
    place: Place,
    island: Island,
    leaves: dict[Value, Tensor],
    *,
    watch: Callable[[Tensor], object] | None = None,
) -> dict[Value, Tensor]:
    """Return the outputs of an island, given its inputs; `watch` sees each tensor that a segment returns."""
    context = place.context
    codes = context.program.segments[context.micro_batch(place.microbatch)]
    tensors = dict(leaves)
    for number in range(island.first, island.last + 1):
        code = codes[number]
        arguments: list[object] = [tensors[value] for value in code.inputs]
        arguments += [context.state.parameters[name] for name in code.parameters]
        arguments += [context.program.buffers[name] for name in code.buffers]
        if code.keyed:
            arguments.append(context.keys(place.step, place.microbatch))
        made = code.run(*arguments)
        tensors |= {(number, i): tensor for i, tensor in enumerate(made)}
        if watch is not None:
            for tensor in made:
                watch(tensor)
    return {value: tensors[value] for value in island.outputs}


def _open_end(result: Tensor) -> OpenEnd:
    return OpenEnd(edge=get_gradient_edge(result), shape=result.shape, dtype=result.dtype)


def _seed(place: Place, value: Value, end: OpenEnd) -> Tensor:
    if value == place.context.routes.loss:
        return loss_gradient(place.context).to(end.dtype)
    total = place.step.take_gradient(place.microbatch, value)
    return torch.zeros(end.shape, dtype=end.dtype) if total is None else total


@contextmanager
def _accumulating(place: Place, island: Island, parameters: dict[str, Tensor]) -> Iterator[None]:
    """Add every parameter gradient to the main gradients as soon as it is complete, and free it.

    [Note: gradients of parameters live briefly]
    A backward that returned all parameter gradients of an island at its end would hold a second copy of
    the island's parameters; the plan counts those of one segment.
    """
    left = dict.fromkeys(parameters)

    def add(name: str, parameter: Tensor) -> None:
        del left[name]
        gradient, parameter.grad = parameter.grad, None
        _accumulate(place, (island.stage, name), gradient)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(add, name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for name in left:
        _accumulate(place, (island.stage, name), None)


def _accumulate(place: Place, use: tuple[int, str], gradient: Tensor | None) -> None:
    """Sum the parts of one microbatch, then add them to the fp32 sum of the step [Note: summation tree]."""
    stage, name = use
    step, key = place.step, (stage, place.microbatch, name)
    total = step.take_part(key)
    if gradient is not None:
        total = gradient if total is None else total + gradient
    step.uses_left[key] -= 1
    if total is None:
        return
    if step.uses_left[key]:
        step.keep_part(key, total)
    else:
        place.context.state.gradient_of(name).add_(total.reshape(-1))


def _finite(loss: Tensor, step: StepState, microbatch: int) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise RunFailedError(f"the loss of microbatch {microbatch} in step {step.number} is {value}")
    return value
