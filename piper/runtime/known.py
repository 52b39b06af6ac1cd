"""Both references of a run, as it goes or known before; those known are kept by all that they depend on.

[Note: known references]
The reference of a verified run depends on the model, the job and the order of additions, not on how ranks
execute them, so many strategies have the same one. Whoever starts many runs (tests) keeps a
`KnownReferences`; it computes before the ranks are forked, which inherit the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from piper.runtime.cuts import places_of_tags
from piper.runtime.init import batch_of_step
from piper.runtime.program import Program
from piper.runtime.reference import Expected, SameTree, WholeBatch
from piper.runtime.routes import Routes, counted_ranges, offsets, owned_buckets
from piper.runtime.settings import RunSettings
from piper.runtime.sources import Source
from simulator.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStep:
    """Both references of one step.

    Args:
        start: parameters before it.
        same: same microbatches, same order.
        whole: loss and gradients of the whole batch, from the parameters that `same` started from.
        trajectory: parameters of the whole-batch run, or None unless with SGD.
    """

    start: dict[str, Tensor]
    same: Expected
    whole: tuple[float, dict[str, Tensor]]
    trajectory: dict[str, Tensor] | None


class References:
    """Both references of a run: what is known of them is not computed again.

    Args:
        known: all steps, or none: each is computed when it is asked for.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        *,
        program: Program,
        settings: RunSettings,
        known: tuple[KnownStep, ...] = (),
    ) -> None:
        self._known = known
        self._same = partial(SameTree, plan, source, program=program, settings=settings)
        self._whole = partial(WholeBatch, plan, source, settings=settings)

    @cached_property
    def same(self) -> SameTree:
        """Return the reference that adds in the order of the plan."""
        return self._same()

    @cached_property
    def whole(self) -> WholeBatch:
        """Return the reference that takes the whole batch."""
        return self._whole()

    def start(self) -> dict[str, Tensor]:
        """Return the trained parameters before the first step, by name, fp32."""
        return self._known[0].start if self._known else self.same.start()

    def same_tree(self, number: int, batch: Tensor) -> Expected:
        """Return a step of the first; steps are asked for in turn."""
        return self._known[number].same if self._known else self.same.step(number, batch)

    def whole_batch(
        self, number: int, batch: Tensor, start: dict[str, Tensor]
    ) -> tuple[float, dict[str, Tensor]]:
        """Return loss and gradients of the second, from given parameters."""
        if self._known and _equal(self._known[number].start, start):
            return self._known[number].whole
        return self.whole.gradients(number, batch, start)

    def trajectory(self, number: int, batch: Tensor) -> dict[str, Tensor] | None:
        """Return the parameters of a run of the second, or None unless with SGD."""
        return self._known[number].trajectory if self._known else self.whole.trajectory(number, batch)

    def load(self, parameters: dict[str, Tensor]) -> None:
        """Let the first go on from given parameters, unless its steps are known."""
        if self._known:
            return
        self.same.load({holder: parameters[holder[1]] for holder in self.same.masters})


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@dataclass(kw_only=True)
class KnownReferences:
    """Keeps the last `most` references [Note: known references].

    Args:
        most: how many; the one computed first is dropped first.
    """

    most: int = 32
    _steps: dict[Hashable, tuple[KnownStep, ...]] = field(default_factory=dict)

    def of(
        self, plan: Plan, source: Source, *, program: Program, settings: RunSettings
    ) -> tuple[KnownStep, ...]:
        """Return all steps of a run's references, computed unless they are known."""
        wanted = (settings.steps, settings.seed, settings.optimizer, settings.padding)
        key = (_source_key(source), _digest(plan, program), wanted)
        if key not in self._steps:
            self._steps[key] = _computed(plan, source, program=program, settings=settings)
            if len(self._steps) > self.most:
                del self._steps[next(iter(self._steps))]
        return self._steps[key]


def _computed(
    plan: Plan, source: Source, *, program: Program, settings: RunSettings
) -> tuple[KnownStep, ...]:
    same = SameTree(plan, source, program=program, settings=settings)
    whole = WholeBatch(plan, source, settings=settings)
    found: list[KnownStep] = []
    start = same.start()
    for number in range(settings.steps):
        batch = batch_of_step(plan, seed=settings.seed, step=number, padding=settings.padding)
        expected = same.step(number, batch).copied()
        loss, gradients = whole.gradients(number, batch, start)
        trajectory = whole.trajectory(number, batch)
        found.append(
            KnownStep(
                start=start,
                same=expected,
                whole=(loss, _copied(gradients)),
                trajectory=None if trajectory is None else _copied(trajectory),
            )
        )
        start = same.start()
    return tuple(found)


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _source_key(source: Source) -> Hashable:
    """Return what a model is known by: its shape, or the function that builds it."""
    if isinstance(source, partial):
        return (source.func, source.args, tuple(sorted(source.keywords.items())))
    fingerprint = None if callable(source) else source.fingerprint() or source.factory
    return source if fingerprint is None else str(fingerprint)


def _digest(plan: Plan, program: Program) -> str:
    """Return a text that differs wherever a plan's references do: sizes, order of additions, norm."""
    facts: list[object] = [plan.training, plan.parameters, plan.mesh, plan.replicas]
    facts += [sorted(places_of_tags(plan, program).items())]
    for rank in range(plan.num_pipeline_ranks):
        routes = Routes(plan=plan, pipeline_rank=rank)
        facts += [routes.device.stages, sorted(routes.accumulation_runs.items())]
        facts += [sorted((use, parts) for use, parts in routes.part_order.items() if len(parts) > 1)]
        facts += [
            (sorted(offsets(plan, rank, bucket)), routes.levels(bucket))
            for bucket in owned_buckets(plan, rank)
        ]
    for rank in range(plan.num_ranks):
        home = plan.pipeline_rank_of(rank)
        facts += [counted_ranges(plan, rank, bucket) for bucket in owned_buckets(plan, home)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
