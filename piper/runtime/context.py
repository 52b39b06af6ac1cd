"""`RankContext`: what the handlers of a rank share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from piper.runtime.borders import Border, Value
from piper.runtime.devices.device import Device
from piper.runtime.dropout import DropoutKeys
from piper.runtime.groups import Groups
from piper.runtime.halves import Halves
from piper.runtime.here import Here
from piper.runtime.init import inputs_of, labels_of, replica_of, samples_of
from piper.runtime.ledger import Ledger
from piper.runtime.local_shapes import heads_dim, token_dim, turned
from piper.runtime.pieces import Places
from piper.runtime.program import Program
from piper.runtime.reductions import Reducer
from piper.runtime.ring import Ring
from piper.runtime.routes import Routes
from piper.runtime.settings import RunSettings
from piper.runtime.state import RankState
from piper.runtime.step import StepState
from simulator.plan import NONE, Plan, Task, TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank's plan, code, state and ways to reach the others.

    `halves`: (first segment, microbatch size, whether hooks watch what autograd saves) -> what BI does and
    what waits [Note: rehearsal].
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
    places: Places
    device: Device
    halves: dict[tuple[int, int, bool], Halves] = field(default_factory=dict)

    def micro_batch(self, microbatch: int) -> int:
        """Return the samples of a microbatch."""
        return self.plan.training.micro_batch_sizes[microbatch]

    def samples(self, microbatch: int) -> Sequence[int]:
        """Return the global sample numbers of a microbatch of this rank."""
        return samples_of(self.plan, replica=replica_of(self.plan, self.rank), microbatch=microbatch)

    def model_input(self, step: StepState, place: tuple[int, int], number: int) -> Tensor:
        """Return a copy of tokens (0) or labels (1) [Note: bytes of a task].

        They are [microbatch, tokens], those that a rank has in a segment: `place` is (microbatch, segment).
        """
        microbatch, segment = place
        samples = self.samples(microbatch)
        rows = step.batch[samples[0] : samples[-1] + 1]
        wanted = inputs_of(rows) if number == 0 else labels_of(rows)
        tokens = self.places.tokens(segment)
        if tokens is not None:
            wanted = wanted.index_select(1, torch.tensor(tokens))
        return wanted.to(self.device.place)

    def here(self, step: StepState, place: tuple[int, int], *, again: bool = False) -> Here:
        """Return what the code of a segment knows of its rank and microbatch.

        `place` is (microbatch, segment); `again`: an R task runs it.
        """
        microbatch, segment = place
        forward = TaskKind.R if again else TaskKind.F

        def ring(backward: bool) -> Ring:
            return self.ring(step, microbatch, segment, phase=TaskKind.B if backward else forward)

        return Here(
            keys=DropoutKeys(seed=self.settings.seed, step=step.number, samples=self.samples(microbatch)),
            tensor=self.places.tensor,
            tokens=self.places.tokens(segment),
            rows=step.rows.setdefault(microbatch, {}),
            segment=segment,
            expert_rows=self._expert_rows(step, microbatch, segment),
            rings=ring if segment in self.places.rings else None,
        )

    def _expert_rows(self, step: StepState, microbatch: int, segment: int) -> int | None:
        first = self.places.experts.get(segment)
        ways = None if first is None else step.routings.get((microbatch, first))
        return None if ways is None else sum(ways.received)

    def ring(self, step: StepState, microbatch: int, segment: int, *, phase: TaskKind) -> Ring:
        """Return the ring around the attention of a segment, in one pass of a microbatch."""
        return step.ring((microbatch, segment, phase), partial(self._new_ring, step))

    def _new_ring(self, step: StepState) -> Ring:
        at, pieces = self.places.ring
        if step.alone:
            at, pieces = 0, (pieces[at],)
        positions = [torch.tensor(tokens, dtype=torch.int64) for tokens in pieces]
        return Ring(place=at, positions=positions, stopped=lambda: step.stopped)

    def whole_shape(self, value: Value, microbatch: int) -> tuple[int, ...]:
        """Return the uncut shape of a boundary tensor for one microbatch."""
        spec = self.plan.segments[value[0]].outputs[value[1]]
        sizes = list(spec.shape)
        if spec.batch_dim is not None:
            first = self.plan.training.micro_batch_sizes[0]
            sizes[spec.batch_dim] = sizes[spec.batch_dim] // first * self.micro_batch(microbatch)
        return tuple(sizes)

    def turning_dims(self, value: Value, microbatch: int, border: Border) -> tuple[int, int]:
        """Return the dimensions of tokens and heads of a tensor at a border of attention."""
        whole, size = self.whole_shape(value, microbatch), self.micro_batch(microbatch)
        home = self.program.segments[size][value[0]].outputs[value[1]].shape
        inside = None if border.enters else home
        seq_len = self.plan.training.seq_len
        heads = heads_dim(whole, micro_batch=size, seq_len=seq_len, inside=inside)
        return token_dim(whole, micro_batch=size, seq_len=seq_len, heads=heads).dim, heads

    def shape(self, value: Value, microbatch: int) -> tuple[int, ...]:
        """Return the shape of a boundary tensor on this rank, on the side of a border that it is named by."""
        whole = self.whole_shape(value, microbatch)
        borders = self.routes.borders
        if not self.plan.cuts.regions:
            return whole
        home = self.program.segments[self.micro_batch(microbatch)][value[0]].outputs[value[1]].shape
        behind = len(value) > 2 and value[2] != NONE  # noqa: PLR2004
        for border in borders.prefix((value[0], value[1]), value[2]) if behind else ():
            size, side = self.micro_batch(microbatch), borders.all[border]
            if borders.is_ends(border, value):
                home = (home[0] // side.region.degree,)
            else:
                home = turned(home, whole, side, plan=self.plan, micro_batch=size)
        return home

    def group(self, task: Task) -> tuple[dist.ProcessGroup | None, int]:
        """Return the process group of a collective and its size; a group of one needs no process group."""
        members = self.plan.groups[task.group].of(self.rank)
        stream = self.routes.device.streams[task.stream]
        if len(members) == 1:
            return None, 1
        return self.groups.collectives[members, stream], len(members)
