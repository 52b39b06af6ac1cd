"""What the published system got wrong (arXiv 2606.11169): a run that did so again would not be verified.

Each test does the wrong thing on purpose, in one place, and sees that a comparison with one process refuses
it, or states the right thing where a comparison could not see it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piper.errors import RunFailedError, StrategyError
from piper.predict import CompiledJob
from piper.runtime import context as contexts
from piper.runtime import state as states
from piper.runtime.handlers import collectives, compute, routing, transfers
from piper.runtime.init import initial_piece
from simulator.plan import Task
from tests.piper.runtime.jobs import plan_of, train
from tests.piper.runtime.named_runs import compiled_job, require_equal, run_job
from tests.piper.runtime.toy import SEQ

HALVES = "pp=2,dp=2,schedule=zb_h1"


def verified(text: str, **model: object) -> bool:
    outcome = train(plan_of(text, clip=0.1, **model), model=model, steps=2)
    return bool(outcome.result["verified"])


@pytest.mark.parametrize("text", [HALVES, "dp=2", "pp=2,dp=2,zero=1,schedule=dualpipe_v"])
def test_what_is_right_is_verified(text: str) -> None:
    assert verified(text)


def test_sums_that_are_reduced_again_with_every_microbatch_count_early_ones_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of N replicas and M microbatches, microbatch k weighed N^(M-1-k)."""
    original = compute._accumulate

    def reduced_at_once(place: Any, use: tuple[int, str], gradient: Any) -> None:
        original(place, use, gradient)
        if place.microbatch < place.context.plan.training.num_microbatches - 1:
            place.context.state.gradient_of(use[1]).mul_(place.context.plan.replicas)

    monkeypatch.setattr(compute, "_accumulate", reduced_at_once)
    assert not verified(HALVES)


def test_sums_over_replicas_without_a_mean_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_microbatch(place: Any) -> torch.Tensor:
        return torch.ones(()) / place.step.tokens * place.context.plan.replicas

    monkeypatch.setattr(compute, "loss_gradient", of_a_microbatch)
    assert not verified(HALVES)


def test_one_input_for_all_microbatches_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = contexts.samples_of
    monkeypatch.setattr(
        contexts,
        "samples_of",
        lambda plan, *, replica, microbatch: original(plan, replica=replica, microbatch=0),
    )
    assert not verified("pp=2")


def test_replicas_that_start_from_different_values_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = states.initial_piece

    def of_the_rank(plan: Any, rank: int, name: str, *, seed: int) -> torch.Tensor:
        return original(plan, rank, name, seed=seed + rank)

    monkeypatch.setattr(states, "initial_piece", of_the_rank)
    assert not verified("dp=2")


EXPERTS = "dp=2,ep=2"


def expert_job() -> CompiledJob:
    return compiled_job("tiny-moe", EXPERTS, optimizer="sgd", global_batch=2)


def test_every_expert_is_owned_by_one_rank() -> None:
    """All ranks held all experts."""
    plan = expert_job().plan
    cut = [found.name for found in plan.cuts.parameters if found.dims == (("ep", 0),)]
    assert cut
    for parameter in plan.parameters:
        if parameter.name in cut:
            pieces = [initial_piece(plan, rank, parameter.name, seed=0) for rank in range(plan.num_ranks)]
            assert sum(piece.shape[0] for piece in pieces) == parameter.shape[0]
            assert not torch.equal(*pieces)


def test_rows_that_are_split_equally_whoever_has_their_expert_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks did not say how many rows they send; each took an equal part of all for its own."""
    original = routing.routing

    def equal(context: Any, task: Task, ends: torch.Tensor) -> Any:
        rows, experts = int(ends[-1]), ends.numel()
        even = torch.arange(1, experts + 1, dtype=ends.dtype) * rows // experts
        return original(context, task, even.to(ends.dtype))

    monkeypatch.setattr(routing, "routing", equal)
    assert is_noticed(expert_job())


def test_a_run_with_experts_is_verified_where_nothing_is_wrong() -> None:
    assert not is_noticed(expert_job())


def is_noticed(job: CompiledJob) -> bool:
    """Return whether a run fails or differs from one process."""
    try:
        return run_job(job, steps=1, timeout_s=5.0).result["verified"] is False
    except RunFailedError:
        return True


@pytest.mark.parametrize("degree", [{}, {"degree": 1}])
def test_experts_cut_over_one_device_are_refused_before_anything_runs(
    degree: dict[str, int], tmp_path: Path
) -> None:
    """It was accepted, and crashed in the middle of a step."""
    strategy = [{"op": "mesh", "axes": {"pp": 1}}, {"op": "shard", "filter": {"EP": "*"}, **degree}]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(strategy))
    with pytest.raises(StrategyError, match=r"(?s)shard.degree = 1.*leave shard out"):
        compiled_job("tiny-moe", str(path), gpus=1)


def test_a_gather_left_out_after_the_update_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "all_gather", lambda *_: None)
    assert not verified("dp=2,zero=1")


def test_buckets_whose_state_is_cut_and_whole_ones_on_one_rank_are_all_stepped(tmp_path: Path) -> None:
    strategy = [
        {"op": "mesh", "axes": {"dp": 2, "pp": 1}},
        {"op": "place", "filter": {"PP": [0, 1]}, "at": {"pp": 0}},
        {"op": "replicate", "filter": {"PP": 0}, "shard_optimizer": True},
        {"op": "replicate", "filter": {"PP": 1}},
    ]
    path = tmp_path / "mixed.json"
    path.write_text(json.dumps(strategy))
    job = compiled_job("tests.piper.runtime.toy:plain", str(path), seq_len=SEQ, gpus=2, optimizer="sgd")
    (device,) = job.plan.device_plans
    assert {bucket.zero for bucket in device.buckets} == {0, 1}
    require_equal(run_job(job))


def test_a_first_half_that_starts_from_ones_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """BI with no receive before it took ones for the gradients of its outputs."""
    original = compute._seed

    def ones(place: Any, value: Any, end: Any) -> torch.Tensor:
        return torch.ones_like(original(place, value, end))

    monkeypatch.setattr(compute, "_seed", ones)
    assert not verified("pp=1,schedule=zb_h1")


PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")


class Counting(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_second_half_makes_only_what_the_first_did_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BI and BW together make the matrix products of B: nothing runs twice."""

    def counted(original: Any) -> Any:
        def run(*arguments: Any) -> None:
            with Counting() as counting:
                original(*arguments)
            with log.open("a") as file:  # a rank is a process of its own
                file.write(f"{sum(counting.seen[name] for name in PRODUCTS)}\n")

        return run

    for name in ("backward", "backward_inputs", "backward_weights"):
        monkeypatch.setattr(compute, name, counted(getattr(compute, name)))
    found = []
    for text in ("pp=1", "pp=1,schedule=zb_h1"):
        log = tmp_path / f"{len(found)}.txt"
        train(plan_of(text, global_batch=2), steps=1, verify=False)
        found.append([int(line) for line in log.read_text().split()])
    whole, halves = found
    assert len(halves) == 2 * len(whole) == 4
    assert sum(halves) == sum(whole)
    assert min(halves) > 0


@pytest.mark.parametrize("microbatches", [2, 8])
def test_what_is_in_a_bucket_depends_on_neither_microbatches_nor_halves(microbatches: int) -> None:
    plain, halved = (
        plan_of(text, global_batch=microbatches) for text in ("pp=2,schedule=1f1b", "pp=2,schedule=zb_h1")
    )
    assert [d.buckets for d in plain.device_plans] == [d.buckets for d in halved.device_plans]


def test_every_tensor_that_crosses_a_border_takes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries of several tensors were reduced to one by a guess."""
    model = {"crossing": True}
    plan = plan_of("pp=3", **model)
    assert max(len(edge.values) for edge in plan.edges) > 1
    original = transfers._send

    def first_only(context: Any, task: Task, tensor: torch.Tensor, *, message: tuple[int, int]) -> None:
        sent = tensor if message[1] == 0 else torch.zeros_like(tensor)
        original(context, task, sent, message=message)

    assert train(plan, model=model, steps=1).result["verified"] is True
    monkeypatch.setattr(transfers, "_send", first_only)
    assert train(plan, model=model, steps=1).result["verified"] is False
