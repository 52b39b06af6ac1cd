"""Find out what of each backward can wait for BW, before the first step [Note: rehearsal]."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from piper.runtime.borders import Value
from piper.runtime.context import RankContext
from piper.runtime.dtypes import DTYPES
from piper.runtime.halves import Halves, Rehearsal
from piper.runtime.handlers.compute import Place, call_island, trained_parameters
from piper.runtime.init import batch_of_step
from piper.runtime.ledger import Ledger
from piper.runtime.pool import Pool
from piper.runtime.routes import Island
from piper.runtime.step import StepState
from simulator.plan import TaskKind


def rehearse(context: RankContext) -> dict[tuple[int, int, bool], Halves]:
    """Return the halves of every backward that the plan splits; keys as in `RankContext`."""
    found: dict[tuple[int, int, bool], Halves] = {}
    batch, device = batch_of_step(context.plan, seed=context.settings.seed, step=0), context.device
    for task in context.routes.tasks:
        for island in context.routes.islands_back(task) if task.kind is TaskKind.BI else ():
            key = (island.first, context.micro_batch(task.microbatch))
            if (*key, True) in found:
                continue
            for watched in (True, False):
                step = StepState.new(
                    context.routes, number=0, batch=batch, ledger=Ledger(), pool=Pool(device), device=device
                )
                step.alone = True
                with context.state.imagined(island.parameters):
                    place = Place(context, step, task.microbatch)
                    found[*key, watched] = _halves(place, island, watched=watched)
    return found


def _halves(place: Place, island: Island, *, watched: bool) -> Halves:
    """Run an island forward and backward, on tensors of which only the shapes matter.

    `watched`: with hooks on what autograd saves, from which it takes some tensors by a further operator.
    """
    context, rehearsal = place.context, Rehearsal()

    def watch(tensor: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(rehearsal.want)  # type: ignore[no-untyped-call]

    leaves = {value[:2]: _leaf(place, island, value) for value in island.inputs}
    _give_all_rows_to_one_expert(place, island, leaves)
    hooks = place.step.ledger.saved(context.state.brought_parameters) if watched else nullcontext()
    with torch.enable_grad(), hooks:
        made = call_island(place, island, leaves, watch=watch)
    for rows in place.step.rows.get(place.microbatch, {}).values():
        rows.agree(rows.local.unsqueeze(0))
    outputs = [tensor for tensor in made.values() if tensor.requires_grad]
    inputs = [leaf for leaf in leaves.values() if leaf.requires_grad]
    wanted = [*inputs, *trained_parameters(context, island).values()]
    if not (outputs and wanted):
        return ()
    seeds = [torch.zeros_like(tensor) for tensor in outputs]
    with rehearsal:
        found = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
        for gradient in found[: len(inputs)]:
            if gradient is not None:
                rehearsal.want(gradient)
    return rehearsal.halves()


def _give_all_rows_to_one_expert(place: Place, island: Island, leaves: dict[Value, Tensor]) -> None:
    borders = place.context.routes.borders
    behind = [value for value in island.inputs if len(value) > 2]  # noqa: PLR2004
    ends = [value for value in behind if borders.is_ends(value[2], value)]
    for value in ends:
        rows = next(leaf for other, leaf in leaves.items() if other != value[:2])
        leaves[value[:2]].fill_(rows.shape[0])


def _leaf(place: Place, island: Island, value: Value) -> Tensor:
    if value[0] < 0:
        return place.context.model_input(place.step, (place.microbatch, island.first), value[1])
    dtype = DTYPES[place.context.plan.segments[value[0]].outputs[value[1]].dtype]
    shape, here = place.context.shape(value, place.microbatch), place.context.device.place
    tensor = torch.zeros(shape, dtype=dtype, device=here)
    return tensor.requires_grad_(place.context.routes.requires_grad(value))
