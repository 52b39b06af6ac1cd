"""Let plain autograd add in the order of the plan: by stages and islands [Note: summation tree].

A tensor that enters a stage, and then each of its islands, is known there by a view of its own; so is a
parameter that several islands use. What is inside is then summed before anything from outside is added, and
later stages and islands come first, because autograd runs the views made last first. A tensor that an
island changes in place is from then on one that it made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from piper.annotation import Trace, tags_of
from piper.runtime.program import Program
from piper.runtime.routes import Routes
from piper.runtime.trace import replace_leaves, tensors_in
from simulator.plan import NONE, Plan

Tags = tuple[tuple[str, int], ...]


class Place(NamedTuple):
    """An island: its stage and first segment; `NONE` for the stage as a whole."""

    stage: int
    first: int


def places_of_tags(plan: Plan, program: Program) -> dict[Tags, Place]:
    """Return the island of each annotation."""
    codes = program.segments[plan.training.micro_batch_sizes[0]]
    places = _places(plan)
    return {code.tags: places[number] for number, code in enumerate(codes)}


def parameters_of_several_islands(plan: Plan) -> frozenset[str]:
    """Return the parameters that more than one island uses."""
    places = _places(plan)
    used = {
        (name, places[number]) for number, segment in enumerate(plan.segments) for name in segment.parameters
    }
    counts = Counter(name for name, _ in used)
    return frozenset(name for name, count in counts.items() if count > 1)


def _places(plan: Plan) -> dict[int, Place]:
    """Return the island of each segment."""
    islands = [
        island
        for device in plan.device_plans
        for (_, microbatch), found in Routes(plan=plan, pipeline_rank=device.pipeline_rank).islands.items()
        for island in found
        if microbatch == 0
    ]
    return {
        number: Place(island.stage, island.first)
        for island in islands
        for number in range(island.first, island.last + 1)
    }


class IslandCuts(TorchFunctionMode):
    """Watches one forward pass.

    Args:
        names: id -> name of the module's parameters that several islands use.
        leaves: (stage, parameter) -> the leaf that takes its gradient there.
        places: island of each annotation.
        trace: of the annotations that are open.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        leaves: Mapping[tuple[int, str], Tensor],
        *,
        places: Mapping[Tags, Place],
        trace: Trace,
    ) -> None:
        super().__init__()
        self._names = names
        self._leaves = leaves
        self._places = places
        self._trace = trace
        self._here = Place(0, 0)
        self._home: dict[int, Place] = {}
        self._views: dict[tuple[int, Place], Tensor] = {}
        self._viewed: dict[int, Tensor] = {}
        self._changed: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []  # a dead tensor's id may come again

    def __torch_function__(  # noqa: PLR0917  torch fixes the signature
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func` with the island's own views of what comes from outside."""
        self._here = self._places.get(tags_of(self._trace.here), self._here)
        given = replace_leaves((args, kwargs or {}), self._own)
        versions = [(tensor, tensor._version) for tensor in tensors_in(given)]
        result = func(*given[0], **given[1])
        for tensor, version in versions:
            if tensor._version != version and id(tensor) in self._viewed:
                self._take_over(tensor)
        for tensor in tensors_in(result):
            self._alive.append(tensor)
            self._home.setdefault(id(tensor), self._here)
        return result

    def views_of(self, leaf: Tensor) -> dict[int, Tensor]:
        """Return first segment of an island -> its own view of a parameter that several islands use."""
        return {place.first: view for (of, place), view in self._views.items() if of == id(leaf)}

    def _own(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = self._names.get(id(leaf))
        if name is not None:
            return self._view(self._leaves[self._here.stage, name], self._here)
        leaf = self._changed.get(id(leaf), leaf)
        home = self._home.get(id(leaf), self._here)
        if home == self._here or not leaf.requires_grad:
            return leaf
        entered = leaf if home.stage == self._here.stage else self._view(leaf, Place(self._here.stage, NONE))
        return self._view(entered, self._here)

    def _take_over(self, view: Tensor) -> None:
        """Let the island have made what it changed in place through its view."""
        changed = [view]
        while id(changed[-1]) in self._viewed:
            changed.append(self._viewed[id(changed[-1])])
        self._changed |= {id(tensor): changed[-1] for tensor in changed[:-1]}
        self._home[id(changed[-1])] = self._here

    def _view(self, tensor: Tensor, place: Place) -> Tensor:
        key = (id(tensor), place)
        if key not in self._views:
            with torch.enable_grad():
                self._views[key] = tensor.view_as(tensor)
            self._alive.append(tensor)
            self._home[id(self._views[key])] = self._here
            self._viewed[id(self._views[key])] = tensor
        return self._views[key]
