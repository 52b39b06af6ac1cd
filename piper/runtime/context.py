"""`RankContext`: what the handlers of a rank share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from piper.runtime.dropout import DropoutKeys
from piper.runtime.groups import Groups
from piper.runtime.halves import Halves
from piper.runtime.init import replica_of, samples_of
from piper.runtime.ledger import Ledger
from piper.runtime.program import Program
from piper.runtime.reductions import Reducer
from piper.runtime.routes import Routes, Value
from piper.runtime.settings import RunSettings
from piper.runtime.state import RankState
from piper.runtime.step import StepState
from simulator.plan import Plan, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank's plan, code, state and ways to reach the others.

    `halves`: (first segment, microbatch size) -> what BI does and what waits [Note: rehearsal].
    """

    rank: int
    plan: Plan
    program: Program
    routes: Routes
    settings: RunSettings
    state: RankState
    groups: Groups
    reducer: Reducer
    ledger: Ledger
    halves: dict[tuple[int, int], Halves] = field(default_factory=dict)

    def micro_batch(self, microbatch: int) -> int:
        """Return the samples of a microbatch."""
        return self.plan.training.micro_batch_sizes[microbatch]

    def samples(self, microbatch: int) -> Sequence[int]:
        """Return the global sample numbers of a microbatch of this rank."""
        return samples_of(self.plan, replica=replica_of(self.plan, self.rank), microbatch=microbatch)

    def model_input(self, step: StepState, microbatch: int, number: int) -> Tensor:
        """Return a copy of tokens (0) or labels (1), [microbatch, seq_len] [Note: bytes of a task]."""
        samples = self.samples(microbatch)
        rows = step.batch[samples[0] : samples[-1] + 1]
        wanted = rows[:, :-1] if number == 0 else rows[:, 1:]
        return wanted.clone(memory_format=torch.contiguous_format)

    def keys(self, step: StepState, microbatch: int) -> DropoutKeys:
        """Return what dropout masks of a microbatch depend on."""
        return DropoutKeys(seed=self.settings.seed, step=step.number, samples=self.samples(microbatch))

    def shape(self, value: Value, microbatch: int) -> tuple[int, ...]:
        """Return the shape of a boundary tensor for one microbatch."""
        segment, output = value
        spec = self.plan.segments[segment].outputs[output]
        sizes = list(spec.shape)
        if spec.batch_dim is not None:
            first = self.plan.training.micro_batch_sizes[0]
            sizes[spec.batch_dim] = sizes[spec.batch_dim] // first * self.micro_batch(microbatch)
        return tuple(sizes)

    def group(self, task: Task) -> tuple[dist.ProcessGroup | None, int]:
        """Return the process group of a collective and its size; a group of one needs no process group."""
        members = self.plan.groups[task.group].of(self.rank)
        stream = self.routes.device.streams[task.stream]
        if len(members) == 1:
            return None, 1
        return self.groups.collectives[members, stream], len(members)
