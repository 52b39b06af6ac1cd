"""What is refused before any rank starts, and ranks that somebody else starts."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from piper.errors import JobError, PiperError
from piper.runtime import OptimizerSettings, default_optimizer, run_local, run_rank
from piper.runtime.handlers import compute
from simulator.plan import Plan
from tests.piper.runtime.jobs import plan_of, train
from tests.piper.runtime.toy import toy


def test_a_world_size_other_than_the_plans_names_both() -> None:
    with pytest.raises(JobError) as caught:
        run_local(plan_of("pp=2,dp=2"), toy(), num_ranks=3, steps=1)
    error = caught.value
    assert error.exit_code == 2
    assert (error.field, error.value) == ("--local", 3)
    assert "must be 4, the ranks of strategy 'pp=2,dp=2" in error.rule
    assert "start 4 processes" in error.fix


def test_a_model_whose_token_numbers_are_unknown_is_refused() -> None:
    plan = plan_of("pp=2")
    unknown = replace(plan, model=replace(plan.model, vocabulary=0))
    with pytest.raises(JobError) as caught:
        run_local(unknown, toy(), num_ranks=2, steps=1)
    assert caught.value.field == "vocabulary"
    assert "nn.Embedding" in caught.value.fix


@pytest.mark.parametrize(("size", "value"), [("3", 3), ("two", "two"), ("", "")])
def test_a_wrong_torchrun_world_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, size: str, value: object
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(JobError) as caught:
        run_rank(plan_of("pp=2,dp=2"), toy(), steps=1)
    assert (caught.value.field, caught.value.value) == ("WORLD_SIZE", value)
    assert "start" in caught.value.fix


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("steps", 0, "--steps"),
        ("steps", True, "--steps"),
        ("timeout_s", float("nan"), "--timeout"),
        ("timeout_s", -1.0, "--timeout"),
        ("reductions", "orderd", "--reductions"),
        ("seed", -1, "--seed"),
        ("seed", "x", "--seed"),
        ("num_ranks", 0, "--local"),
        ("num_ranks", 2.0, "--local"),
    ],
)
def test_wrong_options_are_refused(option: str, value: object, field: str) -> None:
    options: dict[str, Any] = {"num_ranks": 2, "steps": 1, option: value}
    with pytest.raises(JobError) as caught:
        run_local(plan_of("dp=2"), toy(), **options)
    assert caught.value.field == field
    assert caught.value.fix


def test_a_misspelt_reduction_is_guessed() -> None:
    with pytest.raises(JobError, match="did you mean 'ordered'"):
        run_local(plan_of("dp=2"), toy(), num_ranks=2, steps=1, reductions="orderd")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), "fast", True])
def test_a_learning_rate_must_be_a_positive_number(rate: Any) -> None:
    with pytest.raises(JobError) as caught:
        OptimizerSettings(name="sgd", learning_rate=rate, weight_decay=0.0)
    assert caught.value.field == "learning rate"


def test_an_optimizer_that_we_cannot_run_is_refused() -> None:
    with pytest.raises(JobError) as caught:
        default_optimizer("muon")
    assert (caught.value.field, caught.value.value) == ("optimizer", "muon")


def test_importing_the_runtime_loads_no_torch() -> None:
    script = "import piper.runtime, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def _join(plan: Plan, rank: int, port: int, pipe: Connection) -> None:
    here = {"RANK": rank, "WORLD_SIZE": plan.num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in here.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
    try:
        outcome = run_rank(plan, toy(), steps=2, verify=True, timeout_s=30.0)
        pipe.send(outcome.result if outcome else None)
    except PiperError as error:
        pipe.send(str(error))
    finally:
        os._exit(0)


def join_all(plan: Plan) -> list[Any]:
    """Start every rank as torchrun would: by environment alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    found = []
    for rank in range(plan.num_ranks):
        receive, send = fork.Pipe(duplex=False)
        fork.Process(target=_join, args=(plan, rank, port, send), daemon=True).start()
        found.append(receive)
    return [pipe.recv() for pipe in found]


@pytest.mark.timeout(120)
def test_ranks_started_by_environment_verify_and_rank_0_has_the_outcome() -> None:
    results = join_all(plan_of("pp=2"))
    assert results[0]["verified"] is True
    assert results[1] is None


@pytest.mark.timeout(120)
def test_ranks_started_by_environment_agree_on_the_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: Any, step: Any, task: Any) -> None:
        if context.rank == 1:
            raise ValueError("broken")
        return original(context, step, task)

    original = compute.forward
    monkeypatch.setattr(compute, "forward", broken)
    culprit = "rank 1 failed in 1F0 (step 0): ValueError: broken"
    assert join_all(plan_of("pp=2")) == [f"rank 0 stopped: {culprit}", culprit]


def test_the_seed_changes_the_run() -> None:
    losses = [
        train(plan_of("dp=1"), verify=False, steps=1, seed=s).result["steps"][0]["loss"] for s in (0, 1)
    ]
    assert losses[0] != losses[1]
