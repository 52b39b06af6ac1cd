"""What a rank holds between steps: flat parameters, fp32 gradients and optimizer shards, bucket by bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from piper.runtime.dtypes import DTYPES
from piper.runtime.init import initial_piece
from piper.runtime.ledger import Ledger
from piper.runtime.optimizer import ShardState
from piper.runtime.pieces import local_shapes
from piper.runtime.routes import offsets, owned_buckets, shard_range
from piper.runtime.settings import RunSettings
from simulator.plan import MemoryClass, Plan


@dataclass(slots=True, kw_only=True)
class FlatBucket:
    """One bucket of this rank.

    Args:
        parameters: flat [padded_numel], compute dtype; the modules' parameters are views of it.
        gradients: flat [padded_numel] fp32 sums (main gradients).
        places: parameter -> (start, end) in both.
        shard: (start, end) of what this rank updates.
        state: optimizer state of the shard.
    """

    parameters: Tensor
    gradients: Tensor
    places: dict[str, tuple[int, int]]
    shard: tuple[int, int]
    state: ShardState

    def shard_gradient(self) -> Tensor:
        """Return the gradient of the elements that this rank updates, a view."""
        start, end = self.shard
        return self.gradients[start:end]

    def gradient_of(self, name: str) -> Tensor:
        """Return the flat gradient of a parameter, a view."""
        start, end = self.places[name]
        return self.gradients[start:end]


@dataclass(slots=True, kw_only=True)
class RankState:
    """All buckets of a rank, and its parameters by name (leaves that share the buckets' memory).

    Args:
        buckets: by index in the device plan; entries that only name tied parameters are left out.
        parameters: name -> leaf in the parameter's shape; frozen ones need no gradient.
        home: trainable parameter -> bucket.
    """

    buckets: dict[int, FlatBucket]
    parameters: dict[str, Tensor]
    home: dict[str, int]

    @classmethod
    def new(cls, plan: Plan, *, rank: int, settings: RunSettings, ledger: Ledger) -> RankState:
        """Materialise the parameters of the stages of `rank`, with their initial values."""
        pipeline_rank = plan.pipeline_rank_of(rank)
        shapes = local_shapes(plan)
        state = cls(buckets={}, parameters={}, home={})
        for index in owned_buckets(plan, pipeline_rank):
            state._add_bucket(plan, rank, index, settings=settings)
            bucket = state.buckets[index]
            for name, (start, end) in bucket.places.items():
                leaf = bucket.parameters[start:end].view(shapes[name])
                state.parameters[name] = leaf.requires_grad_()
                state.home[name] = index
        dtype = DTYPES[plan.training.dtype]
        stages = plan.device_plans[pipeline_rank].stages
        for name in _used(plan, stages):
            if name not in state.parameters:
                state.parameters[name] = initial_piece(plan, rank, name, seed=settings.seed).to(dtype)
        state._register(ledger)
        return state

    def gradient_of(self, name: str) -> Tensor:
        """Return the flat fp32 main gradient of a trainable parameter, a view."""
        return self.buckets[self.home[name]].gradient_of(name)

    def _add_bucket(self, plan: Plan, rank: int, index: int, *, settings: RunSettings) -> None:
        pipeline_rank = plan.pipeline_rank_of(rank)
        facts = plan.device_plans[pipeline_rank].buckets[index]
        full = torch.zeros(facts.padded_numel)
        places = offsets(plan, pipeline_rank, index)
        for name, (start, end) in places.items():
            full[start:end] = initial_piece(plan, rank, name, seed=settings.seed).flatten()
        dtype = DTYPES[plan.training.dtype]
        parameters = full if dtype == torch.float32 else full.to(dtype)
        start, end = shard_range(plan, rank, index)
        master = full[start:end] if dtype == torch.float32 else full[start:end].clone()
        self.buckets[index] = FlatBucket(
            parameters=parameters,
            gradients=torch.zeros(facts.padded_numel),
            places=places,
            shard=(start, end),
            state=ShardState.new(settings.optimizer, master),
        )

    def _register(self, ledger: Ledger) -> None:
        for bucket in self.buckets.values():
            ledger.hold(bucket.parameters, MemoryClass.PARAMETERS)
            ledger.hold(bucket.gradients, MemoryClass.GRADIENTS)
            for tensor in (bucket.state.master, *bucket.state.moments):
                ledger.hold(tensor, MemoryClass.OPTIMIZER)
        for parameter in self.parameters.values():
            ledger.hold(parameter, MemoryClass.PARAMETERS)


def _used(plan: Plan, stages: tuple[int, ...]) -> tuple[str, ...]:
    names = (name for segment in plan.segments if segment.stage in stages for name in segment.parameters)
    return tuple(dict.fromkeys(names))
