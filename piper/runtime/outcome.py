"""`RunOutcome`: what a run gives back: the numbers of `piper run --json`, and the measured `Timeline`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from piper.errors import RunFailedError
from simulator.plan import Plan
from simulator.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One step: loss (mean over tokens), seconds, global gradient norm (None without clipping)."""

    loss: float
    step_time_s: float
    grad_norm: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Differences to one process, worst over all steps (DESIGN 6); relative errors per tensor.

    Args:
        verified: whether (a) and (b) hold.
        same_tree: (a), keys loss, gradients, parameters.
        whole_batch: (b), the same keys; parameters is None with an optimizer other than SGD.
        differing: (a), what is not bitwise equal, for people: "step 0 gradient of head.weight on rank 2".
    """

    verified: bool
    same_tree: dict[str, float]
    whole_batch: dict[str, float | None]
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLedger:
    """Bytes of storages that one rank held, by `MemoryClass` (`piper.runtime.ledger`).

    Args:
        rank: whose.
        static_bytes: before the first step, int64 [classes].
        task_bytes: what is held more after each task than before it, int64 [steps, tasks, classes].
        routed_rows: per step, (microbatch, first segment of a region of experts) -> rows that the rank's
            experts took.
    """

    rank: int
    static_bytes: np.ndarray
    task_bytes: np.ndarray
    routed_rows: tuple[dict[tuple[int, int], int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """A finished run.

    Args:
        result: the JSON object of `piper run --json`; `predicted_step_time_s` is None until the caller knows.
        timeline: what was measured, on one clock.
        differing: with `verify`: what differs from one process.
        ledgers: per rank, what it held.
    """

    result: dict[str, Any]
    timeline: Timeline
    ledgers: tuple[RankLedger, ...]
    differing: tuple[str, ...] = ()


def run_result(
    plan: Plan,
    steps: list[StepFigures],
    *,
    device: str,
    peak_memory_bytes: int,
    verification: Verification | None,
) -> dict[str, Any]:
    """Return the object of `piper run --json`; throughput leaves out the first step where there are more."""
    timed = steps[1:] or steps
    seconds = sum(step.step_time_s for step in timed)
    return {
        "strategy": plan.strategy,
        "world_size": plan.num_ranks,
        "device": device,
        "steps": [
            {"loss": step.loss, "step_time_s": step.step_time_s, "grad_norm": step.grad_norm}
            for step in steps
        ],
        "tokens_per_s": plan.training.tokens_per_step * len(timed) / seconds,
        "peak_memory_bytes": peak_memory_bytes,
        "verified": None if verification is None else verification.verified,
        "max_relative_error": None if verification is None else verification.same_tree,
        "whole_batch_error": None if verification is None else verification.whole_batch,
        "predicted_step_time_s": None,
        "interrupted": False,
    }


def require_verified(outcome: RunOutcome) -> None:
    """Raise RunFailedError with the figures when the run differs from one process (exit 5)."""
    if outcome.result["verified"] is not False:
        return
    same, whole = outcome.result["max_relative_error"], outcome.result["whole_batch_error"]
    first = f"; first difference: {outcome.differing[0]}" if outcome.differing else ""
    raise RunFailedError(
        "the run differs from one process: same summation order: "
        f"{_shown(same)}; whole batch: {_shown(whole)}{first}"
    )


def _shown(errors: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {'-' if value is None else f'{value:.3g}'}" for name, value in errors.items())
