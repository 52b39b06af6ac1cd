"""F, R, B, BI and BW: run segments, and run autograd backward through one island at a time.

[Note: autograd is cut at islands]
An island's inputs are detached leaves, its outputs go on detached; B seeds the outputs with the sum of
their consumers' gradients (zeros where there is none) and hands on the gradients of the leaves.

[Note: leaves without memory]
Where one graph would do for two islands of a stage, what passes from one to the other lives no longer than
in that graph: while F needs it, or as long as autograd has saved it. Its leaf keeps a shape, no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from piper.runtime.borders import Value, made_again
from piper.runtime.code import SegmentCode
from piper.runtime.context import RankContext
from piper.runtime.halves import Deferring, LateWork
from piper.runtime.keeping import Keeping
from piper.runtime.ledger import nowhere
from piper.runtime.routes import Island
from piper.runtime.step import Entry, OpenEnd, OpenGraph, StepState
from simulator.plan import MemoryClass, Task, TaskKind


class Place(NamedTuple):
    """Where an island runs: on which rank, in which step, for which microbatch."""

    context: RankContext
    step: StepState
    microbatch: int
    again: bool = False


def forward(context: RankContext, step: StepState, task: Task) -> None:
    """Run the islands of an F; keep graphs only of those that no R task runs again."""
    for island in context.routes.islands_of(task):
        place = Place(context, step, task.microbatch)
        outputs = _run(place, island, names=island.inputs, keep=island.backward and not island.recomputed)
        for value, tensor in outputs.items():
            step.put(task.microbatch, value, tensor.detach())
            if value == context.routes.loss and context.places.counts_loss:
                step.keep_loss(task.microbatch, tensor.detach())


def recompute(context: RankContext, step: StepState, task: Task) -> None:
    """Run islands again, this time keeping their graphs."""
    for island in context.routes.islands_of(task):
        place = Place(context, step, task.microbatch, again=True)
        outputs = _run(place, island, names=island.inputs_again, keep=True)
        for value, tensor in outputs.items():
            step.put(task.microbatch, made_again(value), tensor.detach())
    inside = context.routes.island_at(task, task.first_segment)
    if task.first_segment in inside.remade:
        _make_inside_again(Place(context, step, task.microbatch, again=True), inside, task)


def _make_inside_again(place: Place, island: Island, task: Task) -> None:
    """Run segments of an island again whose insides F threw away [Note: what goes away]."""
    keeping = place.step.graphs[place.microbatch, island.first].keeping
    codes = place.context.program.segments[place.context.micro_batch(place.microbatch)]
    for number in range(task.first_segment, task.last_segment + 1):
        if keeping is not None:
            keeping.run_again(number, codes[number].run, _arguments(place, codes[number], number))
    _close_rings(place, range(task.first_segment, task.last_segment + 1), TaskKind.R)


def backward(context: RankContext, step: StepState, task: Task) -> None:
    """Compute the gradients of the inputs and parameters of islands, the last one first."""
    for island in context.routes.islands_back(task):
        _backward(Place(context, step, task.microbatch), island)


def _backward(place: Place, island: Island) -> None:
    graph = place.step.graphs.pop((place.microbatch, island.first))
    seeds = _seeds(place, graph)
    parameters = trained_parameters(place.context, island)
    wanted = [*(entry.leaf for entry in graph.inputs.values()), *parameters.values()]
    with _accumulating(place, island, parameters):
        if wanted and seeds:
            torch.autograd.backward([end.edge for end in graph.outputs.values()], seeds, inputs=wanted)
    _hand_on(place, island, graph, gradients=[entry.leaf.grad for entry in graph.inputs.values()])


def backward_inputs(context: RankContext, step: StepState, task: Task) -> None:
    """Compute the gradients of the inputs of islands; leave the rest to BW [Note: split backward]."""
    for island in context.routes.islands_back(task):
        _backward_inputs(Place(context, step, task.microbatch), island)


def _backward_inputs(place: Place, island: Island) -> None:
    context, step, microbatch, _ = place
    graph = step.graphs.pop((microbatch, island.first))
    seeds = _seeds(place, graph)
    parameters = trained_parameters(context, island)
    wanted = [*(entry.leaf for entry in graph.inputs.values()), *parameters.values()]
    state = context.state
    elsewhere = state.brought_parameters if state.fetched else nowhere
    work = LateWork(ledger=context.ledger, elsewhere=elsewhere)
    found: list[Tensor | None] = [None] * len(wanted)
    if wanted and seeds:
        edges = [end.edge for end in graph.outputs.values()]
        halves = context.halves[island.first, context.micro_batch(microbatch), graph.watched]
        with Deferring(halves, work) as deferring:
            found = list(torch.autograd.grad(edges, wanted, seeds, allow_unused=True))
        deferring.check_complete()
    work.keep(dict(zip(parameters, found[len(graph.inputs) :], strict=True)))
    step.late[microbatch, island.first] = work
    _hand_on(place, island, graph, gradients=found[: len(graph.inputs)])


def backward_weights(context: RankContext, step: StepState, task: Task) -> None:
    """Compute the gradients of parameters that BI left."""
    place = Place(context, step, task.microbatch)
    for island in context.routes.islands_back(task):
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
    for (value, entry), gradient in zip(graph.inputs.items(), gradients, strict=True):
        known = entry.gradient(gradient)
        if known is None:
            shape, here = place.context.shape(value, place.microbatch), place.context.device.place
            known = torch.zeros(shape, dtype=entry.dtype, device=here)
        place.step.add_gradient(place.microbatch, value, ((island.stage, island.first), known))
    _close_rings(place, range(island.first, island.last + 1), TaskKind.B)
    last_reads = place.context.routes.last_reads_again.get((island.stage, island.first), ())
    place.step.forget_gathered(place.microbatch, last_reads)


def loss_gradient(place: Place) -> Tensor:
    """Return d(step loss) / d(sum of token losses of a microbatch): 1 / counted tokens of the batch."""
    return torch.ones((), device=place.context.device.place) / place.step.tokens


def _run(place: Place, island: Island, *, names: tuple[Value, ...], keep: bool) -> dict[Value, Tensor]:
    """Run an island on the tensors of these names; with `keep`, leave its graph for B."""
    taken = [_taken(place, island, value) for value in names]
    if keep:
        outputs = _run_with_graph(place, island, names=names, taken=taken)
    else:
        inputs = {value[:2]: tensor for value, (tensor, _) in _pairs(names, taken)}
        outputs = call_island(place, island, inputs)
        for _, key in taken:
            place.context.ledger.release(key)
    return outputs


def _run_with_graph(
    place: Place, island: Island, *, names: tuple[Value, ...], taken: list[tuple[Tensor, int]]
) -> dict[Value, Tensor]:
    routes, ledger = place.context.routes, place.context.ledger
    light = {value for value in names if value in routes.gathered_again or routes.is_passed_on(island, value)}
    entries = {
        value: Entry.of(tensor, light=value in light)
        for value, (tensor, _) in _pairs(names, taken)
        if routes.requires_grad(value)
    }
    deferred = {
        tensor.untyped_storage().data_ptr(): partial(place.step.fetch_gathered, place.microbatch, value)
        for value, (tensor, _) in _pairs(names, taken)
        if value in routes.gathered_again
    }

    def elsewhere(tensor: Tensor) -> Callable[[], Tensor] | None:
        found = deferred.get(tensor.untyped_storage().data_ptr())
        return found or place.context.state.brought_parameters(tensor)

    held = []
    away = island.remade or (island.stage, place.microbatch, island.first) in routes.on_host
    remade = {number: routes.remade_kinds[number] for number in island.remade}
    keeping = Keeping(ledger=ledger, elsewhere=elsewhere, remade=remade) if away else None
    watched = bool(away or deferred or place.context.state.fetched or ledger.is_counting)
    with torch.enable_grad(), ledger.saved(elsewhere) if watched else nullcontext():
        inputs = {
            value[:2]: entries[value].enter(tensor) if value in entries else tensor
            for value, (tensor, _) in _pairs(names, taken)
        }
        outputs = call_island(place, island, inputs, keeping=keeping)
    for value, (_, key) in _pairs(names, taken):
        if value in entries and value not in light:
            held.append(key)
        else:
            ledger.release(key)
    of_gradient = dict(zip(names, island.gradients, strict=True))
    place.step.graphs[place.microbatch, island.first] = OpenGraph(
        inputs={of_gradient[value]: entry for value, entry in entries.items()},
        outputs={value: _open_end(out) for value, out in outputs.items() if out.requires_grad},
        held=tuple(held),
        keeping=keeping,
        watched=watched,
    )
    return outputs


def _pairs(
    names: tuple[Value, ...], taken: list[tuple[Tensor, int]]
) -> Iterator[tuple[Value, tuple[Tensor, int]]]:
    return zip(names, taken, strict=True)


def _taken(place: Place, island: Island, value: Value) -> tuple[Tensor, int]:
    """Return an input of an island, cut from what made it, and the ledger key that holds it."""
    if value[0] < 0:
        where = (place.microbatch, island.first)
        copy = place.context.model_input(place.step, where, value[1])
        return copy, place.context.ledger.hold(copy, MemoryClass.ACTIVATIONS)
    if place.context.routes.borders.is_beside(value):
        place.step.await_value(place.microbatch, value)
    tensor, key = place.step.take(place.microbatch, value, stage=island.stage)
    return tensor.detach(), key


def call_island(
    place: Place,
    island: Island,
    inputs: dict[Value, Tensor],
    *,
    watch: Callable[[Tensor], object] | None = None,
    keeping: Keeping | None = None,
) -> dict[Value, Tensor]:
    """Return the outputs of an island, given its inputs; `watch` sees each tensor that a segment returns."""
    context = place.context
    codes = context.program.segments[context.micro_batch(place.microbatch)]
    tensors = dict(inputs)
    for number in range(island.first, island.last + 1):
        code = codes[number]
        given = [tensors[value] for value in code.inputs], _arguments(place, code, number)
        made = code.run(*given[0], *given[1]) if keeping is None else keeping.run(number, code.run, given)
        tensors |= {(number, i): tensor for i, tensor in enumerate(made)}
        if watch is not None:
            for tensor in made:
                watch(tensor)
    _close_rings(place, range(island.first, island.last + 1), TaskKind.R if place.again else TaskKind.F)
    return {value: tensors[value] for value in island.outputs}


def _close_rings(place: Place, inside: range, phase: TaskKind) -> None:
    """Let the shifts around the attention of some segments end."""
    for segment in place.context.places.rings.intersection(inside):
        place.context.ring(place.step, place.microbatch, segment, phase=phase).close()


def _arguments(place: Place, code: SegmentCode, number: int) -> list[object]:
    """Return what a segment takes besides the tensors of others."""
    context = place.context
    arguments: list[object] = [context.state.parameters[name] for name in code.parameters]
    arguments += [context.program.buffers[name] for name in code.buffers]
    if code.keyed:
        arguments.append(context.here(place.step, (place.microbatch, number), again=place.again))
    return arguments


def _open_end(result: Tensor) -> OpenEnd:
    return OpenEnd(edge=get_gradient_edge(result), shape=result.shape, dtype=result.dtype)


def _seed(place: Place, value: Value, end: OpenEnd) -> Tensor:
    if value == place.context.routes.loss:
        return loss_gradient(place).to(end.dtype)
    if place.context.routes.borders.leaves_beside(value):
        place.step.await_gradients(place.microbatch, value)
    total = place.step.take_gradient(place.microbatch, value)
    if total is None:
        total = torch.zeros(end.shape, dtype=end.dtype, device=place.context.device.place)
    return total


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
