"""A rank that raises, dies or falls silent ends the job soon, is named once, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from piper.errors import RunFailedError
from piper.runtime import rank as rank_module
from piper.runtime.handlers import collectives, compute, transfers
from simulator.plan import Plan
from tests.piper.runtime.jobs import plan_of, train

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = {child.pid for child in multiprocessing.active_children()}
    yield
    assert {child.pid for child in multiprocessing.active_children()} <= before


def on_rank(rank: int, deed: Callable[[], object], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original` with `deed` before it on one rank, from the second step on."""

    def run(context: Any, step: Any, task: Any) -> Any:
        if context.rank == rank and step.number == 1:
            deed()
        return original(context, step, task)

    return run


def failure(plan: Plan, **options: Any) -> str:
    begin = time.monotonic()
    with pytest.raises(RunFailedError) as caught:
        train(plan, steps=3, verify=False, **options)
    assert time.monotonic() - begin < LIMIT_S
    return str(caught.value)


def raise_value_error() -> None:
    raise ValueError("the cat sat on the keyboard\nand more")


def test_a_raising_rank_is_named_with_its_task_and_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "backward", on_rank(3, raise_value_error, compute.backward))
    text = failure(plan_of("pp=2,dp=2"))
    assert text == "rank 3 failed in 1B0 (step 1): ValueError: the cat sat on the keyboard"


def test_a_rank_that_fails_in_a_stream_thread_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = transfers.send_activations
    monkeypatch.setattr(transfers, "send_activations", on_rank(0, raise_value_error, original))
    assert failure(plan_of("pp=2")).startswith("rank 0 failed in 0SEND_F0 (step 1): ValueError")


def test_a_killed_rank_is_named_with_its_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    deed = on_rank(2, lambda: os.kill(os.getpid(), signal.SIGKILL), compute.forward)
    monkeypatch.setattr(compute, "forward", deed)
    assert failure(plan_of("pp=2,dp=2")) == "rank 2 was killed by SIGKILL in 1F0 (step 1)"


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rank_that_fails_between_collectives_is_named(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "forward", on_rank(2, raise_value_error, compute.forward))
    text = failure(plan_of(f"dp=4,zero={zero}"))
    first = "0F0/0" if zero == 3 else "0F0"
    assert text == f"rank 2 failed in {first} (step 1): ValueError: the cat sat on the keyboard"


def test_a_rank_that_fails_in_a_gather_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    deed = on_rank(1, raise_value_error, collectives.all_gather)
    monkeypatch.setattr(collectives, "all_gather", deed)
    assert failure(plan_of("dp=4,zero=3")).startswith(
        "rank 1 failed in 0ALL_GATHER:F0/0@dense0n0 (step 1): V"
    )


def test_a_rank_killed_between_collectives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    deed = on_rank(3, lambda: os.kill(os.getpid(), signal.SIGKILL), compute.backward)
    monkeypatch.setattr(compute, "backward", deed)
    text = failure(plan_of("dp=4,zero=3"))
    assert text.startswith("rank 3 was killed by SIGKILL in 0B0/")


def test_a_rank_silent_between_collectives_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "forward", on_rank(0, lambda: time.sleep(60), compute.forward))
    text = failure(plan_of("dp=4,zero=3"), timeout_s=2.0)
    assert text == "rank 0 was silent for 2 s in 0F0/0 (step 1)"


def test_a_rank_that_leaves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "forward", on_rank(1, lambda: os._exit(7), compute.forward))
    assert failure(plan_of("dp=2")) == "rank 1 ended with exit code 7 in 0F0 (step 1)"


def test_a_silent_rank_is_blamed_and_not_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "backward", on_rank(1, lambda: time.sleep(60), compute.backward))
    assert failure(plan_of("pp=2,dp=2"), timeout_s=2.0) == "rank 1 was silent for 2 s in 0B0 (step 1)"


def test_ranks_that_all_wait_are_reported_with_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    deed = on_rank(0, lambda: time.sleep(60), transfers.send_activations)
    monkeypatch.setattr(transfers, "send_activations", deed)
    text = failure(plan_of("pp=2"), timeout_s=2.0)
    assert text.startswith("no rank made progress for 2 s: rank 0 before 0")
    assert "rank 1 before 1F0 (step 1), waiting for 1RECV_F0" in text


def test_a_loss_that_is_not_finite_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(context: Any, step: Any, task: Any) -> None:
        for bucket in context.state.buckets.values():
            bucket.parameters.detach().mul_(float("inf"))

    original = compute.forward
    monkeypatch.setattr(
        compute, "forward", lambda c, s, t: (overflow(c, s, t) if s.number == 1 else None, original(c, s, t))
    )
    text = failure(plan_of("dp=1"))
    assert text.startswith("rank 0 failed in 0F0 (step 1): the loss of microbatch 0 in step 1 is nan")


def test_ranks_with_different_plans_refuse_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    original = rank_module._digest
    monkeypatch.setattr(rank_module, "_digest", lambda job: f"{original(job)}{job.rank == 1}")
    assert "ranks [1] run another plan or other options than rank 0" in failure(
        plan_of("dp=3", global_batch=3)
    )
