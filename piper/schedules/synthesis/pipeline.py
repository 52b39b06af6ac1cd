"""What a schedule is found for: stages on ranks, what their passes cost and hold, what ranks may hold.

[Note: bound of a makespan]
Nobody ends before `bound_ns`. A rank starts when one microbatch has come down to it, and runs all its passes.
Before its first BI it waits for a microbatch to go to the last stage and back, and can fill that time only
with the forwards that fit into its memory. Behind the last BI of its lowest stage it runs only the BW that
fit; then that gradient still goes up to stage 0, whose BW ends the step. What microbatches hold, times how
long at least, is no more than what a rank may hold times the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cost_models.errors import check_invariant

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline of S stages on R ranks; times are whole ns (or any one unit), sizes whole bytes (likewise).

    Args:
        stages: of each rank; all S of them once.
        num_microbatches: per step, >= 1.
        forward_ns, inputs_ns, weights_ns: of F, BI and BW of each stage, >= 0.
        hop_ns: from each stage to the next one and back, S - 1 of them: latency, 0 on one rank.
        held_bytes: of each stage and microbatch, from the start of F to the end of BI.
        left_bytes: from there to the end of BW: what is left of them, and what BI made for BW.
        cap_bytes: of each rank; at least one microbatch of all its stages, and what a BI may add to that.
        fused: whether backwards run in one piece, B: then `inputs_ns` are its times, `weights_ns` and
            `left_bytes` are 0.
    """

    stages: tuple[tuple[int, ...], ...]
    num_microbatches: int
    forward_ns: tuple[int, ...]
    inputs_ns: tuple[int, ...]
    weights_ns: tuple[int, ...]
    hop_ns: tuple[int, ...]
    held_bytes: tuple[int, ...]
    left_bytes: tuple[int, ...]
    cap_bytes: tuple[int, ...]
    fused: bool = False

    def __post_init__(self) -> None:
        count = self.num_stages
        check_invariant(sorted(s for held in self.stages for s in held) == list(range(count)), "stages once")
        for listed in (self.forward_ns, self.inputs_ns, self.weights_ns, self.held_bytes, self.left_bytes):
            check_invariant(len(listed) == count, "one figure per stage")
        check_invariant(len(self.hop_ns) == count - 1, "one hop between two stages")
        check_invariant(not (self.fused and (any(self.weights_ns) or any(self.left_bytes))), "no BW")
        for rank, held in enumerate(self.stages):
            added = max(0, *(self.left_bytes[s] - self.held_bytes[s] for s in held))
            least = sum(self.held_bytes[s] for s in held) + added
            if least > self.cap_bytes[rank]:
                raise ValueError(
                    f"one microbatch holds {least} bytes on pipeline rank {rank}, "
                    f"its memory cap is {self.cap_bytes[rank]}"
                )

    @property
    def num_stages(self) -> int:
        """Return S."""
        return len(self.forward_ns)

    @property
    def num_passes(self) -> int:
        """Return how many passes a step has."""
        return 3 * self.num_stages * self.num_microbatches

    @cached_property
    def work_ns(self) -> tuple[int, ...]:
        """Return the time of all passes of each rank."""
        passes = self.costs.sum(axis=0)
        return tuple(self.num_microbatches * int(passes[list(held)].sum()) for held in self.stages)

    @cached_property
    def period_ns(self) -> float:
        """Return the least time between microbatches: the passes of one on the busiest rank."""
        return max(self.work_ns) / self.num_microbatches

    @cached_property
    def costs(self) -> Ints:
        """Return the costs of F, BI and BW, int64 [3, S]."""
        return np.array([self.forward_ns, self.inputs_ns, self.weights_ns], dtype=np.int64)

    @cached_property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Return the rank of each stage."""
        home = {stage: rank for rank, held in enumerate(self.stages) for stage in held}
        return tuple(home[stage] for stage in range(self.num_stages))

    @cached_property
    def bound_ns(self) -> int:
        """Return what no order can beat; see [Note: bound of a makespan]."""
        down = np.concatenate([[0], np.cumsum(np.array(self.forward_ns[:-1]) + np.array(self.hop_ns))])
        up = np.concatenate([[0], np.cumsum(np.array(self.inputs_ns[1:]) + np.array(self.hop_ns))])
        bottom = int(down[-1]) + self.forward_ns[-1]
        ends = []
        for rank, held in enumerate(self.stages):
            low, high = min(held), max(held)
            back = bottom + int(up[-1] - up[high])
            start = max(int(down[low]), back - self._most_forwards_ns(rank))
            end = start + self.work_ns[rank]
            ends.append(end)
            if low > 0:
                rest = self._way_up_ns(low) + self.weights_ns[0]
                ends.append(end - self._most_weights_ns(rank) + rest)
            lives = [bottom - int(down[s] + up[s]) + int(up[-1]) + self.inputs_ns[s] for s in held]
            ends.append(self._area_ns(rank, lives))
        return max(ends)

    def _area_ns(self, rank: int, lives_ns: list[int]) -> int:
        """Return the least time in which what all microbatches hold passes through a rank's memory.

        Args:
            rank: which.
            lives_ns: of each of its stages: least time from the start of F to the end of BI.
        """
        area = sum(
            self.held_bytes[s] * life + self.left_bytes[s] * self.weights_ns[s]
            for s, life in zip(self.stages[rank], lives_ns, strict=True)
        )
        return -(-self.num_microbatches * area // self.cap_bytes[rank])

    def _way_up_ns(self, stage: int) -> int:
        """Return how long a gradient takes from the end of a stage's BI to the end of that of stage 0."""
        return sum(self.inputs_ns[s] + self.hop_ns[s] for s in range(stage))

    def _most_forwards_ns(self, rank: int) -> int:
        """Return the longest time of forwards whose bytes fit a rank together."""
        times = {s: self.forward_ns[s] for s in self.stages[rank]}
        return self._most_ns(rank, times, self.held_bytes)

    def _most_weights_ns(self, rank: int) -> int:
        """Return the longest time of BW whose bytes fit a rank together, while the last BI still runs."""
        times = {s: self.weights_ns[s] for s in self.stages[rank]}
        return self._most_ns(rank, times, self.left_bytes)

    def _most_ns(self, rank: int, times: dict[int, int], sizes: tuple[int, ...]) -> int:
        """Return the most time of passes, or parts of them, that fit the cap: best use of bytes first."""
        left, most = float(self.cap_bytes[rank]), 0.0
        for s in sorted((s for s in times if times[s]), key=lambda s: sizes[s] / times[s]):
            count = float(self.num_microbatches)
            if sizes[s]:
                count = min(count, left / sizes[s])
            most += count * times[s]
            left -= count * sizes[s]
        return -int(-most // 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesis:
    """An order that was found.

    Args:
        rows: of each rank, its passes as codes such as "2F0".
        makespan_ns: the end of the last pass.
        longest_span_ns: the longest time from a rank's first start to its last end.
        peak_bytes: most bytes of each rank.
        bound_ns: what no order of the pipeline can beat.
        method: what it was found by.
        tried: orders that were timed.
    """

    rows: tuple[tuple[str, ...], ...]
    makespan_ns: int
    longest_span_ns: int
    peak_bytes: tuple[int, ...]
    bound_ns: int
    method: str
    tried: int

    @property
    def gap(self) -> float:
        """Return by which share of the bound the makespan is above it."""
        return self.makespan_ns / self.bound_ns - 1
