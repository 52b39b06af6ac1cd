"""What lives inside one step of one rank: boundary tensors, their gradients, open autograd graphs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from cost_models.errors import check_invariant
from piper.errors import RunFailedError
from piper.runtime.borders import Value
from piper.runtime.devices.device import Device
from piper.runtime.halves import LateWork
from piper.runtime.here import CutRows
from piper.runtime.init import counted_tokens
from piper.runtime.keeping import Keeping, OnHost
from piper.runtime.ledger import Ledger
from piper.runtime.pool import Pool
from piper.runtime.ring import Ring
from piper.runtime.routes import Copy, Routes
from simulator.plan import NONE, MemoryClass, TaskKind

_LOOK_S = 0.2
"""How often what waits for a tensor looks whether it should give up."""

Order = tuple[int, int]
"""(stage, first segment) of the consumer that a gradient comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnd:
    """Where a gradient enters an island; the result itself lives no longer than its readers need it.

    Args:
        edge: of the autograd graph.
        shape, dtype: of the result, and so of its gradient.
    """

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True)
class Entry:
    """Where an input enters an island.

    [Note: gathered again]
    What is gathered once more for B must not be held until then, and what one island of a stage passes on to
    another no longer than one graph would hold it: such an input hangs on an empty leaf, and its gradient is
    kept where it comes by.

    Args:
        leaf: what autograd runs back to: the input itself, or an empty tensor.
        dtype: of the input.
        passed: gradients that came by.
    """

    leaf: Tensor
    dtype: torch.dtype
    passed: list[Tensor] | None

    @classmethod
    def of(cls, tensor: Tensor, *, light: bool) -> Entry:
        """Return the entry of a detached tensor."""
        leaf = torch.zeros((), device=tensor.device) if light else tensor
        return cls(leaf=leaf.requires_grad_(), dtype=tensor.dtype, passed=[] if light else None)

    def enter(self, tensor: Tensor) -> Tensor:
        """Return what the island computes with."""
        if self.passed is None:
            return self.leaf
        entered: Tensor = _Passing.apply(self.leaf, tensor, self.passed)  # type: ignore[no-untyped-call]
        return entered

    def gradient(self, of_leaf: Tensor | None) -> Tensor | None:
        """Return the gradient after B, or None where the input had no influence."""
        if self.passed is None:
            return of_leaf
        return self.passed[0] if self.passed else None


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor, passed: list[Tensor]) -> Tensor:  # noqa: PLR0917
        ctx.passed, ctx.nothing = passed, torch.zeros((), device=leaf.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.passed.append(gradients[0])
        return ctx.nothing, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the rows of one microbatch travel to their experts.

    Args:
        sent, received: rows to and from each rank of the group.
        by_expert: order in which experts take what was received, [received rows].
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    by_expert: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGraph:
    """An island between its forward and its B.

    Args:
        inputs: those that need a gradient, by the name that it will have.
        outputs: results that need one.
        held: ledger keys of the leaves, which live until their gradient is there.
        keeping: what autograd keeps, where some of it goes away meanwhile.
        watched: whether hooks watch what autograd keeps.
    """

    inputs: dict[Value, Entry]
    outputs: dict[Value, OpenEnd]
    held: tuple[int, ...]
    watched: bool
    keeping: Keeping | None = None


@dataclass(slots=True, kw_only=True)
class StepState:
    """One step in flight; streams share it, so containers are guarded by a lock.

    Args:
        number: which step.
        batch: tokens of all replicas, [global_batch, seq_len + 1].
        tokens: how many of them the loss counts.
        routes: of this pipeline rank.
        ledger: of this rank.
        reads_left: copy of a boundary tensor -> reads still to come; at 0 the tensor is let go.
        uses_left: (stage, microbatch, parameter) -> gradient parts still to come.
        late: (microbatch, first segment) -> what BI leaves to BW.
        losses: microbatch -> sum of token losses.
        unread_losses: those that are on a device whose host must not wait for them before the step ends.
        squares: this rank's part of the squared gradient norm, then the whole of it; None before any part.
        grad_norm, clip_factor: after the norm's all-reduce.
        evidence: bucket -> shard gradient before clipping, kept for verification.
        rows: microbatch -> segment -> its softmax over cut features.
        rings: (microbatch, segment, pass) -> the ring of its attention.
        routings: (microbatch, first segment of a region of experts) -> how its rows travelled.
        routed_rows: after the step: (microbatch, first segment of a region of experts) -> rows that this
            rank's experts took.
        gathered: (microbatch, name) -> what B reads of a tensor that F gave up ([Note: gathered again]).
        pool: memory for `brought`, of all steps.
        device: where tensors are.
        brought: buffer of the plan -> gathered parameters, or sums of gradients until they are reduced.
        on_host: (microbatch, first segment) of a copy -> activations that the host keeps.
        stopped: a stream of this rank failed.
        alone: a rehearsal, in which no other rank takes part.
    """

    number: int
    batch: Tensor
    tokens: int
    routes: Routes
    ledger: Ledger
    pool: Pool
    device: Device
    reads_left: Counter[Copy]
    uses_left: Counter[tuple[int, int, str]]
    graphs: dict[tuple[int, int], OpenGraph] = field(default_factory=dict)
    late: dict[tuple[int, int], LateWork] = field(default_factory=dict)
    partial: dict[tuple[int, int, str], tuple[Tensor, int]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    unread_losses: dict[int, Tensor] = field(default_factory=dict)
    squares: Tensor | None = None
    grad_norm: float | None = None
    clip_factor: float = 1.0
    evidence: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, dict[int, CutRows]] = field(default_factory=dict)
    rings: dict[tuple[int, int, TaskKind], Ring] = field(default_factory=dict)
    routings: dict[tuple[int, int], Routing] = field(default_factory=dict)
    routed_rows: dict[tuple[int, int], int] = field(default_factory=dict)
    gathered: dict[tuple[int, Value], tuple[Tensor, int]] = field(default_factory=dict)
    brought: dict[int, Tensor] = field(default_factory=dict)
    on_host: dict[tuple[int, int], OnHost] = field(default_factory=dict)
    stopped: bool = False
    alone: bool = False
    _values: dict[Copy, tuple[Tensor, int]] = field(default_factory=dict)
    _gradients: dict[tuple[int, Value], list[tuple[Order, Tensor, int]]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)
    _unread: set[tuple[int, Value]] = field(default_factory=set)
    _arrived: Condition = field(default_factory=Condition)

    @classmethod
    def new(
        cls, routes: Routes, *, number: int, batch: Tensor, ledger: Ledger, pool: Pool, device: Device
    ) -> StepState:
        """Return the state at the begin of a step."""
        return cls(
            number=number,
            batch=batch,
            tokens=counted_tokens(batch),
            routes=routes,
            ledger=ledger,
            pool=pool,
            device=device,
            reads_left=Counter(routes.reads),
            uses_left=Counter(routes.uses),
        )

    def add_squares(self, part: Tensor) -> Tensor:
        """Add to the squared gradient norm, [], and return the sum so far."""
        self.squares = part if self.squares is None else self.squares + part
        return self.squares

    def keep_loss(self, microbatch: int, loss: Tensor) -> None:
        """Keep the sum of the token losses of a microbatch; it is read at once, or at the end of the step.

        Raises: RunFailedError unless it is finite.
        """
        if self.device.threads:
            self._read_loss(microbatch, loss)
        else:
            self.unread_losses[microbatch] = loss

    def _read_loss(self, microbatch: int, loss: Tensor) -> None:
        value = float(loss)
        if not math.isfinite(value):
            raise RunFailedError(f"the loss of microbatch {microbatch} in step {self.number} is {value}")
        self.losses[microbatch] = value

    def put(self, microbatch: int, value: Value, tensor: Tensor, *, stage: int = NONE) -> None:
        """Keep a boundary tensor for its readers (if any); `stage`: that received it [Note: copies]."""
        key = self.routes.copy(microbatch, value, stage=stage)
        with self._lock:
            if self.reads_left[key]:
                self._values[key] = (tensor, self.ledger.hold(tensor, MemoryClass.ACTIVATIONS))
        with self._arrived:
            self._arrived.notify_all()

    def await_value(self, microbatch: int, value: Value) -> None:
        """Wait for a boundary tensor that comes while its reader is under way [Note: beside]."""
        key = self.routes.copy(microbatch, value, stage=NONE)
        self._await(lambda: key in self._values)

    def await_gradients(self, microbatch: int, value: Value) -> None:
        """Wait for all parts of a gradient that come while its reader is under way [Note: beside]."""
        parts = self.routes.gradient_parts[value]
        self._await(lambda: len(self._gradients.get((microbatch, value), ())) >= parts)

    def _await(self, ready: Callable[[], bool]) -> None:
        self._require_issued(ready())
        with self._arrived:
            while not self._arrived.wait_for(lambda: ready() or self.stopped, _LOOK_S):
                pass
        if not ready():
            raise RunFailedError("another stream of this rank failed")

    def read(self, microbatch: int, value: Value, *, stage: int = NONE) -> Tensor:
        """Return a boundary tensor for one of its readers; the last one lets it go."""
        tensor, held = self.take(microbatch, value, stage=stage)
        self.ledger.release(held)
        return tensor

    def take(self, microbatch: int, value: Value, *, stage: int = NONE) -> tuple[Tensor, int]:
        """Return a boundary tensor for one of its readers, which holds it from now on by a ledger key."""
        key = self.routes.copy(microbatch, value, stage=stage)
        with self._lock:
            found = self._values.get(key)
            check_invariant(found is not None, f"tensor {value} of microbatch {microbatch} read before made")
            tensor, held = found or (torch.empty(0), 0)
            self.reads_left[key] -= 1
            if self.reads_left[key] == 0:
                del self._values[key]  # the last reader takes over what was held
            else:
                self.ledger.hold(tensor, MemoryClass.ACTIVATIONS)
        self.device.used_here(tensor)
        return tensor, held

    def add_gradient(self, microbatch: int, value: Value, gradient: tuple[Order, Tensor]) -> None:
        """Keep the gradient of a boundary tensor that one consumer computed."""
        order, tensor = gradient
        entry = (order, tensor, self.ledger.hold(tensor, MemoryClass.ACTIVATIONS))
        with self._lock:
            self._gradients.setdefault((microbatch, value), []).append(entry)
        with self._arrived:
            self._arrived.notify_all()

    def take_gradient(self, microbatch: int, value: Value, *, stage: int | None = None) -> Tensor | None:
        """Return the sum over consumers (of one stage), later consumers first, as autograd does."""
        key = (microbatch, value)
        with self._lock:
            entries = self._gradients.pop(key, [])
            mine = [entry for entry in entries if stage in {None, entry[0][0]}]
            rest = [entry for entry in entries if stage not in {None, entry[0][0]}]
            if rest:
                self._gradients[key] = rest
        total = None
        for _, tensor, held in sorted(mine, key=lambda entry: entry[0], reverse=True):
            self.device.used_here(tensor)
            total = tensor if total is None else total + tensor
            self.ledger.release(held)
        return total

    def _require_issued(self, ready: bool) -> None:
        """Raise RunFailedError for what the only thread would wait for, in its own future."""
        if not (ready or self.device.threads):
            raise RunFailedError("a task needs what another makes that the plan dispatches later")

    def keep_gathered(self, microbatch: int, value: Value, tensor: Tensor) -> None:
        """Keep what was gathered again until the last B that reads it."""
        with self._arrived:
            if (microbatch, value) in self._unread:  # B is over, and did without
                self._unread.remove((microbatch, value))
                return
            held = self.ledger.hold(tensor, MemoryClass.ACTIVATIONS)
            self.gathered[microbatch, value] = (tensor, held)
            self._arrived.notify_all()

    def fetch_gathered(self, microbatch: int, value: Value) -> Tensor:
        """Return what is gathered again while B computes; waits for it."""
        key = (microbatch, value)
        self._require_issued(key in self.gathered)
        with self._arrived:
            while not self._arrived.wait_for(lambda: key in self.gathered or self.stopped, _LOOK_S):
                pass
            if key not in self.gathered:
                raise RunFailedError("another stream of this rank failed")
            tensor = self.gathered[key][0]
        self.device.used_here(tensor)
        return tensor

    def ring(self, key: tuple[int, int, TaskKind], new: Callable[[], Ring]) -> Ring:
        """Return a ring by (microbatch, segment, pass); who asks first makes it."""
        with self._lock:
            if key not in self.rings:
                self.rings[key] = new()
            return self.rings[key]

    def stop(self) -> None:
        """Let everything that waits for tensors of this step give up."""
        with self._arrived:
            self.stopped = True
            self._arrived.notify_all()

    def forget_gathered(self, microbatch: int, values: Iterable[Value]) -> None:
        """Let go what was gathered again."""
        for value in values:
            with self._arrived:
                found = self.gathered.pop((microbatch, value), None)
                if found is None:
                    self._unread.add((microbatch, value))
                else:
                    self.ledger.release(found[1])

    def keep_part(self, use: tuple[int, int, str], part: Tensor) -> None:
        """Keep what (stage, microbatch, parameter) has of its gradient until the other parts are there."""
        self.partial[use] = (part, self.ledger.hold(part, MemoryClass.WORKSPACE))

    def take_part(self, use: tuple[int, int, str]) -> Tensor | None:
        """Return what was kept, if anything."""
        part, held = self.partial.pop(use, (None, 0))
        if part is not None:
            self.ledger.release(held)
        return part

    def bring(
        self,
        buffer: int,
        *,
        numel: int,
        dtype: torch.dtype,
        memory_class: MemoryClass = MemoryClass.BUCKETS,
    ) -> Tensor:
        """Let a buffer of a bucket come to life, flat, of unknown values."""
        flat = self.brought[buffer] = self.pool.take(numel, dtype)
        self.ledger.hold(flat, memory_class)
        return flat

    def drop(self, buffer: int) -> None:
        """End the life of a buffer of a bucket."""
        flat = self.brought.pop(buffer)
        self.ledger.release(flat.untyped_storage().data_ptr())
        self.pool.give(flat)

    def check_empty(self) -> None:
        """Raise InternalError when something was made and never used: the plan lost a task."""
        kept = (
            self._values,
            self._gradients,
            self.graphs,
            self.late,
            self.gathered,
            self.brought,
            self.on_host,
        )
        left = [str(key) for found in kept for key in found]
        check_invariant(not left, f"left over after step {self.number}: {', '.join(left[:5])}")

    def let_go(self) -> None:
        """End the step: of what is not a figure of it, keep nothing."""
        self.check_empty()
        for microbatch, loss in self.unread_losses.items():
            self._read_loss(microbatch, loss)
        self.unread_losses.clear()
        self.batch = torch.empty(0)
        self.routed_rows = {key: sum(ways.received) for key, ways in self.routings.items()}
        for kept in (self.routings, self.rows, self.rings):
            kept.clear()
