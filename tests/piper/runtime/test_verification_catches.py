"""Mutations of the runtime that leave plausible losses behind must be caught by --verify."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from piper.errors import RunFailedError
from piper.runtime import RunOutcome, require_verified
from piper.runtime.handlers import collectives, compute, update
from tests.piper.runtime.jobs import plan_of, train


def twice(original: Callable[..., Any]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        original(*arguments)
        original(*arguments)

    return run


def refused(outcome: RunOutcome) -> str:
    assert outcome.result["verified"] is False
    with pytest.raises(RunFailedError) as caught:
        require_verified(outcome)
    assert caught.value.exit_code == 5
    return str(caught.value)


def test_wrong_averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every microbatch as its own mean: right for even sizes only."""

    def mean_of_means(place: Any) -> torch.Tensor:
        context = place.context
        facts = context.plan.training
        return torch.ones(()) / (
            facts.micro_batch_sizes[-1] * facts.seq_len * facts.num_microbatches * context.plan.replicas
        )

    monkeypatch.setattr(compute, "loss_gradient", mean_of_means)
    outcome = train(plan_of("pp=2,dp=2,micro_batch=3", micro_batch=3))
    text = refused(outcome)
    assert outcome.result["max_relative_error"]["gradients"] > 1e-2
    assert outcome.result["whole_batch_error"]["gradients"] > 1e-2
    assert "gradients" in text
    assert "first difference: step 0 gradient of" in text


def test_a_reduction_done_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "all_reduce", twice(collectives.all_reduce))
    outcome = train(plan_of("dp=2"))
    refused(outcome)
    assert outcome.result["max_relative_error"]["gradients"] == pytest.approx(1.0, rel=0.1)


def test_a_reduction_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "all_reduce", lambda *_: None)
    refused(train(plan_of("pp=2,dp=2")))


def test_a_dropped_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = compute._accumulate

    def forgetful(place: Any, use: Any, gradient: Any) -> None:
        original(place, use, None if place.microbatch == 1 else gradient)

    monkeypatch.setattr(compute, "_accumulate", forgetful)
    outcome = train(plan_of("pp=2"))
    refused(outcome)
    assert outcome.result["max_relative_error"]["loss"] > 0  # of the second step


def test_a_tied_weight_that_is_counted_twice_in_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        update,
        "counted_ranges",
        lambda plan, rank, bucket: (
            (0, plan.device_plans[plan.pipeline_rank_of(rank)].buckets[bucket].numel),
        ),
    )
    outcome = train(plan_of("pp=2", tied=True, clip=0.1), model={"tied": True})
    refused(outcome)
    assert outcome.result["max_relative_error"]["parameters"] > 0


def test_gradients_that_are_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    original = update.update

    def keeping(context: Any, step: Any, task: Any) -> None:
        bucket = context.state.buckets[task.bucket]
        kept = bucket.gradients.clone()
        original(context, step, task)
        bucket.gradients.copy_(kept)

    monkeypatch.setattr(update, "update", keeping)
    outcome = train(plan_of("dp=1"))
    assert "step 1 gradient of" in refused(outcome)


def test_a_verified_run_passes() -> None:
    require_verified(train(plan_of("dp=2"), steps=1))


def test_an_unverified_run_passes() -> None:
    require_verified(train(plan_of("dp=2"), steps=1, verify=False))


def test_parameter_gradients_of_a_backward_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = compute._accumulate, []
    watched: set[str] = set()

    def alone(place: Any, use: tuple[int, str], gradient: Tensor | None) -> None:
        alive = sum(reference() is not None for reference in seen)
        if alive > 2:
            raise RuntimeError(f"{alive} gradients are alive when that of {use[1]} arrives")
        for name, parameter in place.context.state.parameters.items():
            if name not in watched:
                watched.add(name)
                parameter.register_hook(lambda g: seen.append(weakref.ref(g)))
        original(place, use, gradient)

    monkeypatch.setattr(compute, "_accumulate", alone)
    assert train(plan_of("pp=1,dp=1"), steps=2).result["verified"] is True
