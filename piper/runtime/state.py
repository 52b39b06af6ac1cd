"""What a rank holds between steps: flat parameters, fp32 gradients and optimizer shards, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from piper.runtime.dtypes import DTYPES
from piper.runtime.init import initial_piece
from piper.runtime.ledger import Ledger
from piper.runtime.optimizer import ShardState
from piper.runtime.pieces import local_shapes
from piper.runtime.routes import Routes, held_range, offsets, owned_buckets, shard_range, summed_range
from piper.runtime.settings import RunSettings
from simulator.plan import MemoryClass, Plan


@dataclass(slots=True, kw_only=True)
class FlatBucket:
    """One bucket of this rank; ranges are elements (start, end) of the flat buffer of the whole bucket.

    Args:
        parameters: flat, those of `held`, compute dtype.
        gradients: flat sums (main gradients) in the plan's gradient dtype, those of `summed`.
        places: parameter -> range.
        numel: elements of the whole bucket, padding included.
        held, summed: ranges of `parameters` and `gradients`: all, or the shard.
        shard: range of what this rank updates.
        state: optimizer state of the shard.
        at_home: `parameters` where they wait between uses: on the host, or themselves.
    """

    parameters: Tensor
    gradients: Tensor
    places: dict[str, tuple[int, int]]
    numel: int
    held: tuple[int, int]
    summed: tuple[int, int]
    shard: tuple[int, int]
    state: ShardState
    at_home: Tensor

    def visit(self, flat: Tensor) -> None:
        """Let the parameters be those of a flat tensor with the same values."""
        self.parameters = flat
        if not self.state.owns_master:
            self.state.master = self.shard_parameters()

    def shard_gradient(self) -> Tensor:
        """Return the gradient of the elements that this rank updates, a view."""
        return part_of(self.gradients, has=self.summed, wanted=self.shard)

    def shard_parameters(self) -> Tensor:
        """Return the parameters that this rank updates, a view."""
        return part_of(self.parameters, has=self.held, wanted=self.shard)


def part_of(flat: Tensor, *, has: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """Return the elements `wanted` of a bucket, a view of a flat tensor that has the elements `has`."""
    return flat[wanted[0] - has[0] : wanted[1] - has[0]]


@dataclass(slots=True, kw_only=True)
class RankState:
    """All buckets of a rank, and its parameters by name.

    [Note: parameters that come and go]
    A module's parameter is one leaf for the whole run, a view of its bucket's memory. Where parameters are
    brought before their uses (ZeRO-3, offload), the leaves of a bucket have memory only while a task runs
    that uses them: that of the buffer which the plan lets the task read. What autograd saves of them is
    where it lies in the bucket (`brought_parameters`), so that a graph keeps no gathered parameters alive.

    Args:
        buckets: by index in the device plan; entries that only name tied parameters are left out.
        parameters: name -> leaf in the parameter's shape; frozen ones need no gradient.
        home: trainable parameter -> bucket.
        fetched: buckets whose parameters are brought before their uses.
        shapes: of all parameters.
        shown: bucket -> the flat buffer that its leaves are views of, where it is not the bucket's own.
        run_sums: bucket -> where the running task adds gradients, where it is not the bucket's own.
        reached: parameters with a gradient other than zero in the first step, as far as this rank sums it.
    """

    buckets: dict[int, FlatBucket]
    parameters: dict[str, Tensor]
    home: dict[str, int]
    fetched: frozenset[int]
    shapes: dict[str, tuple[int, ...]]
    shown: dict[int, Tensor] = field(default_factory=dict)
    run_sums: dict[int, Tensor] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)

    @classmethod
    def new(
        cls, routes: Routes, *, rank: int, settings: RunSettings, ledger: Ledger, place: torch.device
    ) -> RankState:
        """Materialise the parameters of the stages of `rank` at `place`, with their initial values."""
        plan, pipeline_rank = routes.plan, routes.pipeline_rank
        shapes = local_shapes(plan)
        fetched = frozenset(routes.brought.values())
        state = cls(buckets={}, parameters={}, home=dict(routes.bucket_of), fetched=fetched, shapes=shapes)
        for index in owned_buckets(plan, pipeline_rank):
            state._add_bucket(plan, rank, index, settings=settings, place=place)
            bucket = state.buckets[index]
            for name, (start, end) in bucket.places.items():
                leaf = bucket.parameters.new_empty(0)
                if index not in fetched:
                    leaf = bucket.parameters[start:end].view(shapes[name])
                state.parameters[name] = leaf.requires_grad_()
        dtype = DTYPES[plan.training.dtype]
        stages = plan.device_plans[pipeline_rank].stages
        for name in _used(plan, stages):
            if name not in state.parameters:
                value = initial_piece(plan, rank, name, seed=settings.seed)
                state.parameters[name] = value.to(place, dtype)
        state._register(ledger, routes)
        return state

    def gradient_of(self, name: str) -> Tensor:
        """Return the flat fp32 gradient to which parts of a trainable parameter are added now, a view."""
        index = self.home[name]
        bucket = self.buckets[index]
        start, end = bucket.places[name]
        return self.run_sums.get(index, bucket.gradients)[start:end]

    def note_reached(self, index: int) -> None:
        """Note which parameters of a bucket have a gradient, in the shard that this rank updates."""
        bucket, gradient = self.buckets[index], self.buckets[index].shard_gradient()
        for name, (start, end) in bucket.places.items():
            low, high = max(start, bucket.shard[0]), min(end, bucket.shard[1])
            if low < high and part_of(gradient, has=bucket.shard, wanted=(low, high)).any():
                self.reached.add(name)

    def show(self, index: int, flat: Tensor) -> None:
        """Let the leaves of a bucket be views of what was brought."""
        self.shown[index] = flat
        for name, (start, end) in self.buckets[index].places.items():
            self.parameters[name].data = flat[start:end].view(self.shapes[name])

    def hide(self) -> None:
        """Take the memory of all shown leaves away."""
        for index, flat in self.shown.items():
            nothing = flat.new_empty(0)
            for name in self.buckets[index].places:
                self.parameters[name].data = nothing
        self.shown.clear()

    @contextmanager
    def imagined(self, names: Iterable[str]) -> Iterator[None]:
        """Show parameters without their values, where they are brought before their uses."""
        for index in {self.home[name] for name in names if name in self.home}:
            if index in self.fetched:
                bucket = self.buckets[index]
                self.show(index, bucket.parameters.new_zeros(bucket.numel))
        yield
        self.hide()

    def brought_parameters(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """Return how to get the memory back of a tensor that lies in what was brought, or None."""
        memory = tensor.untyped_storage().data_ptr()
        for index, flat in self.shown.items():
            if flat.untyped_storage().data_ptr() == memory:
                return partial(self.shown.__getitem__, index)
        return None

    def _add_bucket(
        self, plan: Plan, rank: int, index: int, *, settings: RunSettings, place: torch.device
    ) -> None:
        pipeline_rank = plan.pipeline_rank_of(rank)
        facts = plan.device_plans[pipeline_rank].buckets[index]
        full = torch.zeros(facts.padded_numel)
        places = offsets(plan, pipeline_rank, index)
        for name, (start, end) in places.items():
            full[start:end] = initial_piece(plan, rank, name, seed=settings.seed).flatten()
        full, dtype = full.to(place), DTYPES[plan.training.dtype]
        held, summed, shard = (found(plan, rank, index) for found in (held_range, summed_range, shard_range))
        parameters = full[slice(*held)].to(dtype, copy=held != (0, facts.padded_numel))
        master = full[slice(*shard)].clone()
        owns_master = plan.training.states.master_bytes(facts.zero) > 0
        if not owns_master:
            master = part_of(parameters, has=held, wanted=shard)
        self.buckets[index] = FlatBucket(
            parameters=parameters,
            gradients=full.new_zeros(summed[1] - summed[0], dtype=DTYPES[plan.training.states.gradient]),
            places=places,
            numel=facts.padded_numel,
            held=held,
            summed=summed,
            shard=shard,
            state=ShardState.new(
                settings.optimizer,
                master,
                owns_master=owns_master,
                moment_dtype=DTYPES[plan.training.states.moment],
            ),
            at_home=parameters,
        )

    def _register(self, ledger: Ledger, routes: Routes) -> None:
        for index, bucket in self.buckets.items():
            if index not in routes.parameters_on_host:
                ledger.hold(bucket.parameters, MemoryClass.PARAMETERS)
            ledger.hold(bucket.gradients, MemoryClass.GRADIENTS)
            if index in routes.optimizer_on_host:
                bucket.state.live_on_host()
            else:
                for tensor in bucket.state.tensors:
                    ledger.hold(tensor, MemoryClass.OPTIMIZER)
        for parameter in self.parameters.values():
            if parameter.numel():
                ledger.hold(parameter, MemoryClass.PARAMETERS)


def _used(plan: Plan, stages: tuple[int, ...]) -> tuple[str, ...]:
    names = (name for segment in plan.segments if segment.stage in stages for name in segment.parameters)
    return tuple(dict.fromkeys(names))
