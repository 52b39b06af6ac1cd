"""The same training in one process, with plain autograd on the original module (DESIGN 6).

`SameTree` takes the same microbatches and adds in the same order as the plan does; `WholeBatch` takes the
global batch at once. Both know the plan's sizes and orders, and nothing of how ranks execute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from piper.annotation import Trace, tracing
from piper.capture.calling import loss_of
from piper.runtime.cuts import IslandCuts, parameters_of_several_islands, places_of_tags
from piper.runtime.dropout import DropoutKeys, KeyedDropout
from piper.runtime.dtypes import DTYPES
from piper.runtime.init import (
    counted_tokens,
    initial_value,
    inputs_of,
    labels_of,
    replica_of,
    samples_of,
)
from piper.runtime.optimizer import ShardState, clip_scale, sum_of_squares
from piper.runtime.pieces import index_of, piece_of
from piper.runtime.program import Program
from piper.runtime.reductions import sum_in_order
from piper.runtime.routes import Routes, counted_ranges, offsets, owned_buckets
from piper.runtime.settings import RunSettings
from piper.runtime.sources import Source, build
from simulator.plan import NONE, Plan

Holder = tuple[int, str]
"""(pipeline rank, parameter): a tied parameter has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One step of a reference.

    Args:
        losses: (replica, microbatch) -> sum of token losses.
        gradients: of the step, before clipping.
        parameters: after the step.
        grad_norm: None without clipping.
    """

    losses: dict[tuple[int, int], float]
    gradients: dict[Holder, Tensor]
    parameters: dict[Holder, Tensor]
    grad_norm: float | None

    def copied(self) -> Expected:
        """Return one whose tensors no later step changes."""
        return replace(
            self,
            gradients={holder: tensor.clone() for holder, tensor in self.gradients.items()},
            parameters={holder: tensor.clone() for holder, tensor in self.parameters.items()},
        )


class SameTree:
    """One process that adds in the order of the plan [Note: summation tree]; exact in every bit."""

    def __init__(self, plan: Plan, source: Source, *, program: Program, settings: RunSettings) -> None:
        self.plan = plan
        self.settings = settings
        self.module = fresh_module(plan, source, seed=settings.seed)
        self.leaves = _stage_leaves(plan, self.module)
        self.places = places_of_tags(plan, program)
        self.shared = parameters_of_several_islands(plan)
        self.routes = [Routes(plan=plan, pipeline_rank=rank) for rank in range(plan.num_pipeline_ranks)]
        self.homes = _homes(plan)
        self.trained = {key: leaf for key, leaf in self.leaves.items() if leaf.requires_grad}
        self.leaf_of = {
            (home, name): leaf for (stage, name), leaf in self.trained.items() for home in self.homes[stage]
        }
        states = plan.training.states
        own = states.master_bytes(0) > 0
        self.masters = _masters(self.leaf_of, seed=settings.seed, own=own)
        self.gradient_dtype = DTYPES[states.gradient]
        self.optimizers = {
            holder: ShardState.new(settings.optimizer, master, moment_dtype=DTYPES[states.moment])
            for holder, master in self.masters.items()
        }

    def step(self, number: int, batch: Tensor) -> Expected:
        """Train one step on the tokens `batch`, [global_batch, seq_len + 1]."""
        losses: dict[tuple[int, int], float] = {}
        replicas = [
            self._replica(replica, number, batch, losses=losses) for replica in range(self.plan.batch_shares)
        ]
        gradients = {
            holder: self._reduced(holder, [sums[holder] for sums in replicas]) for holder in self.masters
        }
        norm, factor = self._clip(gradients)
        for holder, optimizer in self.optimizers.items():
            optimizer.step(gradients[holder].float() * factor)
        self._write_back()
        parameters = {holder: leaf.detach() for holder, leaf in self.leaf_of.items()}
        return Expected(losses=losses, gradients=gradients, parameters=parameters, grad_norm=norm)

    def start(self) -> dict[str, Tensor]:
        """Return the trained parameters as they are now, by name, fp32."""
        return {name: leaf.detach().float().clone() for (_, name), leaf in self.trained.items()}

    def load(self, parameters: dict[Holder, Tensor]) -> None:
        """Go on from given parameters (native reductions: compare each step from the same start)."""
        for holder, value in parameters.items():
            self.masters[holder].detach().copy_(value)
        self._write_back()

    def _replica(
        self, replica: int, number: int, batch: Tensor, *, losses: dict[tuple[int, int], float]
    ) -> dict[Holder, list[Tensor]]:
        """Return the gradient sums of one replica, run by run; those of tied holders summed."""
        sums = _Accumulator(
            runs=[routes.accumulation_runs for routes in self.routes],
            homes=self.homes,
            shapes={holder: master.shape for holder, master in self.masters.items()},
            dtype=self.gradient_dtype,
        )
        for microbatch in self._microbatch_order():
            samples = samples_of(self.plan, replica=replica, microbatch=microbatch)
            loss, cut = self._loss(number, batch, samples)
            losses[replica, microbatch] = float(loss.detach())
            mean = loss / counted_tokens(batch)
            sums.add(microbatch, self._gradients(mean, cut, microbatch))
        sums.add_forgotten()
        self._sum_tied(sums.sums)
        return sums.sums

    def _gradients(
        self, mean: Tensor, cut: IslandCuts, microbatch: int
    ) -> dict[tuple[int, str], Tensor | None]:
        """Return the gradients of one microbatch; those of several islands summed as the plan does."""
        parts: dict[tuple[int, str, int], Tensor] = {}
        for (stage, name), leaf in self.trained.items():
            views = cut.views_of(leaf) if name in self.shared else {}
            parts |= {(stage, name, first): view for first, view in (views or {NONE: leaf}).items()}
        made = torch.autograd.grad(mean, list(parts.values()), allow_unused=True)
        found = dict(zip(parts, made, strict=True))
        total: dict[tuple[int, str], Tensor | None] = dict.fromkeys(self.trained)
        for stage, name in self.trained:
            order = next((o for r in self.routes if (o := r.part_order.get((stage, microbatch, name)))), ())
            known = [first for _, _, first in (key for key in parts if key[:2] == (stage, name))]
            for first in (*(f for f in order if f in known), *(f for f in known if f not in order)):
                part, before = found[stage, name, first], total[stage, name]
                if part is not None:
                    total[stage, name] = part if before is None else before + part
        return total

    def _loss(self, number: int, batch: Tensor, samples: Sequence[int]) -> tuple[Tensor, IslandCuts]:
        rows = batch[samples[0] : samples[-1] + 1]
        keys = DropoutKeys(seed=self.settings.seed, step=number, samples=samples)
        with tracing() as trace, KeyedDropout(keys), self._cut(trace) as cut:
            loss: Tensor = loss_of(self.module, inputs_of(rows), labels_of(rows))
        return loss, cut

    def _cut(self, trace: Trace) -> IslandCuts:
        names = {id(p): name for name, p in self.module.named_parameters() if name in self.shared}
        return IslandCuts(names, self.leaves, places=self.places, trace=trace)

    def _sum_tied(self, sums: dict[Holder, list[Tensor]]) -> None:
        for name in sorted({name for _, name in sums}):
            holders = sorted(holder for holder in sums if holder[1] == name)
            if len(holders) > 1:
                total = sum_in_order(torch.stack([_added_up(sums[holder]) for holder in holders]))
                for holder in holders:
                    sums[holder] = [total]

    def _reduced(self, holder: Holder, replicas: list[list[Tensor]]) -> Tensor:
        """Return the sum over the runs of all replicas, level by level [Note: summation tree]."""
        home, name = holder
        routes = self.routes[home]
        bucket = routes.bucket_of[name]
        if routes.device.buckets[bucket].kind == "expert":  # their tokens come from all replicas
            return sum_in_order(torch.stack([_added_up(runs) for runs in replicas]))
        for level in routes.levels(bucket):
            if not level.per_run:
                replicas = [[_added_up(runs)] for runs in replicas]
            shares = [dict.fromkeys(replica_of(self.plan, rank) for rank in ranks) for ranks in level.members]
            for numbers in dict.fromkeys(map(tuple, shares)):
                parts = zip(*(replicas[number] for number in numbers), strict=True)
                total = [sum_in_order(torch.stack(part)) for part in parts]
                for number in numbers:
                    replicas[number] = total
        return _added_up(replicas[0])

    def _clip(self, gradients: dict[Holder, Tensor]) -> tuple[float | None, float]:
        limit = self.plan.training.clip_grad_norm
        if limit is None:
            return None, 1.0
        parts = []
        for rank in range(self.plan.num_ranks):
            home = self.plan.pipeline_rank_of(rank)
            part = torch.zeros((), dtype=torch.float64)
            for bucket in owned_buckets(self.plan, home):
                names = offsets(self.plan, home, bucket)
                held = {name: index_of(piece_of(self.plan, rank, name)) for name in names}
                flat = torch.cat([gradients[home, name][held[name]].reshape(-1) for name in names])
                part += sum_of_squares(flat, counted_ranges(self.plan, rank, bucket))
            parts.append(part)
        return clip_scale(float(sum_in_order(torch.stack(parts))), limit)

    def _write_back(self) -> None:
        with torch.no_grad():
            for (stage, name), leaf in self.leaves.items():
                holder = (self.homes[stage][0], name)
                if holder in self.masters:
                    leaf.copy_(self.masters[holder])

    def _microbatch_order(self) -> list[int]:
        """Return all microbatches, in the order in which the first sum needs them."""
        orders = (routes.accumulation_order for routes in self.routes)
        first = next((pairs for order in orders for pairs in order.values()), ())
        every = range(self.plan.training.num_microbatches)
        return list(dict.fromkeys([*(microbatch for _, microbatch in first), *every]))


def _added_up(runs: list[Tensor]) -> Tensor:
    """Return the sum of the runs of a step, in order."""
    return runs[0] if len(runs) == 1 else sum_in_order(torch.stack(runs))


@dataclass(slots=True, kw_only=True)
class _Accumulator:
    """Adds gradients in the order of the plan; one that comes too early waits.

    Args:
        runs: per pipeline rank, parameter -> runs of (stage, microbatch) in order.
        homes: stage -> pipeline ranks; with two, each takes microbatches of its own.
        shapes: of all gradients.
        dtype: of the sums.
        sums: run by run.
    """

    runs: Sequence[dict[str, tuple[tuple[tuple[int, int], ...], ...]]]
    homes: dict[int, tuple[int, ...]]
    shapes: dict[Holder, torch.Size]
    dtype: torch.dtype
    sums: dict[Holder, list[Tensor]] = field(init=False)
    _order: dict[Holder, tuple[tuple[int, tuple[int, int]], ...]] = field(init=False)
    _early: dict[tuple[int, int, str], Tensor | None] = field(default_factory=dict)
    _next: dict[Holder, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums, self._order = {}, {}
        for holder, shape in self.shapes.items():
            runs = self.runs[holder[0]].get(holder[1], ((),))
            self.sums[holder] = [torch.zeros(shape, dtype=self.dtype) for _ in runs]
            self._order[holder] = tuple((number, pair) for number, run in enumerate(runs) for pair in run)

    def add(self, microbatch: int, gradients: dict[tuple[int, str], Tensor | None]) -> None:
        """Take the gradients of one microbatch, by (stage, parameter)."""
        for (stage, name), gradient in gradients.items():
            self._early[stage, microbatch, name] = gradient
        for rank, name in self.sums:
            order = self._order[rank, name]
            at = self._next.get((rank, name), 0)
            while at < len(order) and (*order[at][1], name) in self._early:
                run, pair = order[at]
                gradient = self._early.pop((*pair, name))
                if gradient is not None:
                    self.sums[rank, name][run].add_(gradient.float())
                at += 1
            self._next[rank, name] = at

    def add_forgotten(self) -> None:
        """Add what the plan's order does not mention: the reference counts every microbatch."""
        for (stage, _, name), gradient in sorted(self._early.items(), key=lambda item: item[0]):
            if gradient is not None:
                self.sums[self.homes[stage][0], name][-1].add_(gradient.float())
        self._early.clear()


class WholeBatch:
    """One process on the whole batch, tied weights tied, torch's own clipping."""

    def __init__(self, plan: Plan, source: Source, *, settings: RunSettings) -> None:
        self.plan = plan
        self.settings = settings
        self.module = fresh_module(plan, source, seed=settings.seed)
        self.own = (
            fresh_module(plan, source, seed=settings.seed) if settings.optimizer.name == "sgd" else None
        )

    def gradients(
        self, number: int, batch: Tensor, parameters: dict[str, Tensor]
    ) -> tuple[float, dict[str, Tensor]]:
        """Return the loss and the gradients of a step that starts from given parameters."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if name in parameters:
                    parameter.copy_(parameters[name])
        return self._backward(self.module, number, batch)

    def trajectory(self, number: int, batch: Tensor) -> dict[str, Tensor] | None:
        """Train one step of a run of its own; return its parameters, or None unless with SGD."""
        if self.own is None:
            return None
        self._backward(self.own, number, batch)
        if self.plan.training.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.own.parameters(), self.plan.training.clip_grad_norm, foreach=False)
        for parameter in self.own.parameters():
            if parameter.grad is not None:
                ShardState.new(self.settings.optimizer, parameter.detach()).step(parameter.grad.float())
        return {name: parameter.detach() for name, parameter in self.own.named_parameters()}

    def _backward(self, module: nn.Module, number: int, batch: Tensor) -> tuple[float, dict[str, Tensor]]:
        module.zero_grad()
        keys = DropoutKeys(seed=self.settings.seed, step=number, samples=range(len(batch)))
        with KeyedDropout(keys), _NormsInFp32():
            loss = loss_of(module, inputs_of(batch), labels_of(batch))
        loss = loss / counted_tokens(batch)
        loss.backward()
        found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return float(loss.detach()), found


class _NormsInFp32(TorchFunctionMode):
    """Let layer norms of low precision sum the gradients of their parameters in fp32.

    [Note: sums over a whole batch]
    On CPUs torch adds these gradients token by token in the numbers of the input. In bf16 a sum over 768
    tokens is 10 % off, and it grows with the batch: a run, which adds its microbatches in fp32, would be
    judged by the rounding of the reference.
    """

    def __torch_function__(  # noqa: PLR0917  torch fixes the signature
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = kwargs or {}
        if func is not F.layer_norm or args[0].dtype not in {torch.bfloat16, torch.float16}:
            return func(*args, **call)
        wide: list[Any] = [one.float() if isinstance(one, Tensor) else one for one in args]
        call = {name: one.float() if isinstance(one, Tensor) else one for name, one in call.items()}
        return func(*wide, **call).to(args[0].dtype)


def fresh_module(plan: Plan, source: Source, *, seed: int) -> nn.Module:
    """Build the original module with the run's initial values."""
    facts = plan.training
    module = build(source, dtype=facts.dtype, device="cpu", seq_len=facts.seq_len)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), seed=seed))
    return module


def _homes(plan: Plan) -> dict[int, tuple[int, ...]]:
    """Return stage -> the pipeline ranks that have it."""
    homes: dict[int, tuple[int, ...]] = {}
    for device in plan.device_plans:
        for stage in device.stages:
            homes[stage] = (*homes.get(stage, ()), device.pipeline_rank)
    return homes


def _masters(leaf_of: dict[Holder, Tensor], *, seed: int, own: bool) -> dict[Holder, Tensor]:
    """Return what the optimizer changes: fp32 masters, or the memory of a leaf, for its first holder."""
    found: dict[Holder, Tensor] = {}
    taken: set[int] = set()
    for holder, leaf in sorted(leaf_of.items(), key=lambda item: item[0]):
        if own:
            found[holder] = initial_value(holder[1], tuple(leaf.shape), seed=seed)
        else:
            found[holder] = leaf.detach().clone() if id(leaf) in taken else leaf.detach()
            taken.add(id(leaf))
    return found


def _stage_leaves(plan: Plan, module: nn.Module) -> dict[tuple[int, str], Tensor]:
    """Return (stage, parameter) -> a leaf of its own per stage; the first stage has the module's own."""
    own = dict(module.named_parameters())
    found: dict[tuple[int, str], Tensor] = {}
    seen: set[str] = set()
    for segment in plan.segments:
        for name in segment.parameters:
            key = (segment.stage, name)
            if key not in found:
                copy = own[name].detach().clone().requires_grad_(own[name].requires_grad)
                found[key] = copy if name in seen else own[name]
                seen.add(name)
    return found
