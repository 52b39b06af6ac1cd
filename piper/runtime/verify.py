"""Compare every step with one process (DESIGN 6): rank 0 holds the references, the others report.

[Note: two references]
(a) same microbatches, same summation order: bitwise equal with ordered reductions and whole tensors, else
within tolerances.
(b) the whole batch at once: loss, gradients of a step from the same parameters, and parameters of an SGD
run within tolerances (AdamW turns rounding of near-zero gradients into full steps: not judged).
[Note: cut arithmetic]
Where tensors, sequences or experts are cut, sums inside one matmul (over the inputs of a row-parallel layer,
over the tokens of a weight's gradient) are made of parts, which rounds otherwise than one sum; so nothing
is bitwise, and each step is compared from the same parameters.

Relative error = max|a - b| / max|b| per tensor, b the reference; the worst tensor counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.runtime.context import RankContext
from piper.runtime.init import batch_of_step, counted_tokens
from piper.runtime.known import References
from piper.runtime.outcome import Verification
from piper.runtime.pieces import Piece, index_of, local_numel, piece_of
from piper.runtime.reference import Expected
from piper.runtime.routes import held_range, offsets, owned_buckets, shard_range
from piper.runtime.settings import RunSettings
from piper.runtime.state import part_of
from piper.runtime.step import StepState
from simulator.plan import Plan

TOLERANCES: dict[str, dict[str, float]] = {
    "fp32": {"loss": 1e-6, "gradients": 1e-5, "parameters": 1e-5},
    "bf16": {"loss": 1e-2, "gradients": 5e-2},
    "fp16": {"loss": 1e-2, "gradients": 5e-2},
}
"""By compute dtype (DESIGN 6); what is not listed is reported and not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one rank has after a step.

    Args:
        rank: whose.
        losses: microbatch -> sum of token losses (only with the last stage).
        gradients: bucket -> gradient of its shard, before clipping.
        parameters: bucket -> those of its parameters that it holds, fp32.
    """

    rank: int
    losses: dict[int, float]
    gradients: dict[int, Tensor]
    parameters: dict[int, Tensor]


def gather_evidence(context: RankContext, step: StepState) -> list[Evidence] | None:
    """Send this rank's evidence to rank 0, which gets everybody's; the others get None."""
    plan, control = context.plan, context.groups.control
    buckets = context.state.buckets
    pieces = [part for i in buckets for part in (step.evidence[i], buckets[i].parameters.float())]
    losses: list[Any] | None = [None] * plan.num_ranks if context.rank == 0 else None
    dist.gather_object(step.losses, losses, dst=0, group=control)
    flat = torch.cat([torch.empty(0), *pieces])
    if losses is None:
        if pieces:  # a rank without trained parameters has nothing to show
            dist.send(flat, dst=0, group=control)
        return None
    own = _unpack(plan, 0, flat, losses=losses[0])
    return [own, *(_receive(context, rank, losses[rank]) for rank in range(1, plan.num_ranks))]


def _receive(context: RankContext, rank: int, losses: dict[int, float]) -> Evidence:
    flat = torch.empty(sum(length for _, pair in _layout(context.plan, rank) for length in pair))
    if flat.numel():
        dist.recv(flat, src=rank, group=context.groups.control)
    return _unpack(context.plan, rank, flat, losses=losses)


def _layout(plan: Plan, rank: int) -> list[tuple[int, tuple[int, int]]]:
    """Return (bucket, (elements of its gradient shard, of the parameters it holds)) in sending order."""
    home = plan.pipeline_rank_of(rank)
    found = []
    for bucket in owned_buckets(plan, home):
        start, end = shard_range(plan, rank, bucket)
        first, last = held_range(plan, rank, bucket)
        found.append((bucket, (end - start, last - first)))
    return found


def _unpack(plan: Plan, rank: int, flat: Tensor, *, losses: dict[int, float]) -> Evidence:
    gradients, parameters = {}, {}
    at = 0
    for bucket, (shard, held) in _layout(plan, rank):
        gradients[bucket] = flat[at : at + shard]
        parameters[bucket] = flat[at + shard : at + shard + held]
        at += shard + held
    return Evidence(rank=rank, losses=losses, gradients=gradients, parameters=parameters)


Part = tuple[str, tuple[int, int], Tensor]
"""Parameter, elements (start, end) of the piece that a rank holds of it, their values."""


@dataclass(slots=True)
class _Worst:
    """The largest error seen of each kind, and what was not bitwise equal."""

    errors: dict[str, float] = field(
        default_factory=lambda: {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}
    )
    differing: list[str] = field(default_factory=list)

    def compare(self, kind: str, found: Tensor, expected: Tensor, *, scale: Tensor, what: str) -> None:
        """Take a piece of a tensor; `scale` is the whole reference tensor."""
        if found.shape == expected.shape and torch.equal(found, expected):
            return
        self.differing.append(what)
        self.errors[kind] = max(self.errors[kind], relative_error(found, expected, scale=scale))


def relative_error(found: Tensor, expected: Tensor, *, scale: Tensor) -> float:
    """Return max|a - b| / max|b|, or max|a| where b is zero; inf for NaN."""
    largest = float(scale.abs().max())
    error = float((found.double() - expected.double()).abs().max()) / (largest or 1.0)
    return error if math.isfinite(error) else math.inf


class Verifier:
    """Holds evidence against both references, on rank 0, and keeps the worst errors."""

    def __init__(self, plan: Plan, references: References, *, settings: RunSettings) -> None:
        self.plan = plan
        self.settings = settings
        self.references = references
        self.same_worst = _Worst()
        self.whole_worst = _Worst()
        self.start = references.start()

    def compare(self, number: int, evidence: list[Evidence]) -> None:
        """Compare one step with both references."""
        settings = self.settings
        batch = batch_of_step(self.plan, seed=settings.seed, step=number, padding=settings.padding)
        self._compare_same_tree(number, batch, evidence)
        self._compare_whole_batch(number, batch, evidence)
        self.start = self._parameters(evidence)
        if not self._exact:
            self.references.load(self.start)

    def verification(self) -> Verification:
        """Return the verdict over all steps so far."""
        sgd = self.settings.optimizer.name == "sgd"
        same, whole = self.same_worst.errors, self.whole_worst.errors
        holds = not self.same_worst.differing if self._exact else self._within(same)
        return Verification(
            verified=holds and self._within(whole),
            same_tree=dict(same),
            whole_batch={**whole, "parameters": whole["parameters"] if sgd else None},
            differing=tuple(self.same_worst.differing),
        )

    @property
    def _exact(self) -> bool:
        """Return whether (a) must hold bit for bit [Note: cut arithmetic]."""
        return self.settings.reductions == "ordered" and not self.plan.cuts.regions

    def _within(self, errors: dict[str, float]) -> bool:
        limits = dict(TOLERANCES[self.plan.training.dtype])
        if self.settings.optimizer.name != "sgd":
            limits.pop("parameters", None)
        return all(errors[kind] <= limit for kind, limit in limits.items())

    def _compare_same_tree(self, number: int, batch: Tensor, evidence: list[Evidence]) -> None:
        expected = self.references.same_tree(number, batch)
        worst = self.same_worst
        found = self._losses(evidence)
        for key, loss in sorted(expected.losses.items()):
            ours = torch.tensor(found.get(key, math.nan), dtype=torch.float64)
            theirs = torch.tensor(loss, dtype=torch.float64)
            what = f"step {number} loss of replica {key[0]} microbatch {key[1]}"
            worst.compare("loss", ours, theirs, scale=theirs, what=what)
        for one in evidence:
            self._compare_rank(number, one, expected)

    def _compare_rank(self, number: int, one: Evidence, expected: Expected) -> None:
        home = self.plan.pipeline_rank_of(one.rank)
        for kind, pieces, reference in (
            ("gradient", self._gradient_parts(one), expected.gradients),
            ("parameter", self._parameter_parts(one), expected.parameters),
        ):
            for name, (low, high), part in pieces:
                whole = reference[home, name].float()
                held = whole[index_of(piece_of(self.plan, one.rank, name))].reshape(-1)
                what = f"step {number} {kind} {'of ' if kind == 'gradient' else ''}{name} on rank {one.rank}"
                self.same_worst.compare(f"{kind}s", part, held[low:high], scale=whole, what=what)

    def _compare_whole_batch(self, number: int, batch: Tensor, evidence: list[Evidence]) -> None:
        worst = self.whole_worst
        loss, gradients = self.references.whole_batch(number, batch, self.start)
        theirs = torch.tensor(loss, dtype=torch.float64)
        ours = torch.tensor(sum(self._losses(evidence).values()) / counted_tokens(batch), dtype=torch.float64)
        worst.compare("loss", ours, theirs, scale=theirs, what=f"step {number} loss")
        found = self._gradients(evidence)
        for name, gradient in gradients.items():
            if name in found:
                flat = gradient.reshape(-1).float()
                worst.compare(
                    "gradients", found[name], flat, scale=flat, what=f"step {number} gradient of {name}"
                )
        trajectory = self.references.trajectory(number, batch)
        if trajectory is not None:
            for name, parameter in self._parameters(evidence).items():
                flat = trajectory[name].reshape(-1).float()
                ours = parameter.reshape(-1)
                worst.compare("parameters", ours, flat, scale=flat, what=f"step {number} parameter {name}")

    def _losses(self, evidence: list[Evidence]) -> dict[tuple[int, int], float]:
        """Return (replica, microbatch) -> sum of token losses, over the ranks that share its sequences."""
        found: dict[tuple[int, int], float] = {}
        for one in evidence:
            for microbatch, loss in sorted(one.losses.items()):
                key = (self.plan.mesh.coordinate(one.rank, "dp"), microbatch)
                found[key] = found.get(key, 0.0) + loss
        return found

    def _gradients(self, evidence: list[Evidence]) -> dict[str, Tensor]:
        """Return whole gradients by name, flat."""
        found = self._whole((one.rank, part) for one in evidence for part in self._gradient_parts(one))
        return {name: whole.reshape(-1) for name, whole in found.items()}

    def _parameters(self, evidence: list[Evidence]) -> dict[str, Tensor]:
        """Return parameters by name, in their shapes; replicas are compared elsewhere."""
        return self._whole((one.rank, part) for one in evidence for part in self._parameter_parts(one))

    def _whole(self, parts: Iterable[tuple[int, Part]]) -> dict[str, Tensor]:
        """Return tensors by name, put together from the parts that ranks have of their pieces."""
        shapes = {parameter.name: parameter.shape for parameter in self.plan.parameters}
        sizes = local_numel(self.plan)
        pieces: dict[tuple[str, Piece], Tensor] = {}
        for rank, (name, (low, high), values) in parts:
            key = (name, piece_of(self.plan, rank, name))
            pieces.setdefault(key, torch.zeros(sizes[name]))[low:high] = values
        found: dict[str, Tensor] = {}
        for (name, held), flat in pieces.items():
            whole = found.setdefault(name, torch.zeros(shapes[name]))
            whole[index_of(held)] = flat.view(whole[index_of(held)].shape)
        return found

    def _gradient_parts(self, one: Evidence) -> Iterator[Part]:
        for bucket, flat in one.gradients.items():
            yield from self._parts(one.rank, bucket, flat, has=shard_range(self.plan, one.rank, bucket))

    def _parameter_parts(self, one: Evidence) -> Iterator[Part]:
        for bucket, flat in one.parameters.items():
            yield from self._parts(one.rank, bucket, flat, has=held_range(self.plan, one.rank, bucket))

    def _parts(self, rank: int, bucket: int, flat: Tensor, *, has: tuple[int, int]) -> Iterator[Part]:
        """Yield what a flat tensor with the elements `has` of a bucket has of each parameter."""
        home = self.plan.pipeline_rank_of(rank)
        for name, (start, end) in offsets(self.plan, home, bucket).items():
            low, high = max(start, has[0]), min(end, has[1])
            if low < high:
                yield name, (low - start, high - start), part_of(flat, has=has, wanted=(low, high))
