"""Whatever the layout: three optimizer steps equal one process (DESIGN 6)."""

from __future__ import annotations

import pytest

from piper.predict import Job, compile_job
from piper.runtime import RunOutcome, run_local
from piper.strategy import load_strategy
from tests.piper.runtime.jobs import plan_of, train

BITWISE = {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}

LAYOUTS = {
    "pipeline x data, 1f1b": ("pp=2,dp=2,schedule=1f1b", {}, {}),
    "pipeline x data, gpipe": ("pp=2,dp=2,schedule=gpipe", {}, {}),
    "pipeline only": ("pp=4,schedule=1f1b", {}, {}),
    "two stages on each rank, the ranks around one peer": ("pp=2,vp=2", {}, {}),
    "fewer microbatches than ranks": ("pp=4", {"global_batch": 2}, {}),
    "as many stages as units": ("pp=6,schedule=gpipe", {}, {}),
    "data only, clipped": ("dp=4", {"clip": 0.1}, {}),
    "one rank": ("pp=1,dp=1", {"clip": 0.1}, {}),
    "uneven last microbatch": ("pp=2,dp=2,micro_batch=3", {"micro_batch": 3, "clip": 0.1}, {}),
    "tied across stages, clipped": ("pp=2,dp=2", {"clip": 0.1}, {"tied": True}),
    "tied on one stage": ("dp=2", {}, {"tied": True}),
    "recompute": ("pp=2,dp=2,recompute=full", {"clip": 0.1}, {"dropout": 0.2}),
    "recompute, tied on one stage": ("dp=2,recompute=full", {}, {"tied": True}),
    "zero 1, clipped": ("pp=2,dp=2,zero=1", {"clip": 0.1}, {}),
    "zero 1, three replicas, tied": ("dp=3,zero=1", {"clip": 0.1, "global_batch": 6}, {"tied": True}),
    "zero 1, tied across stages, recompute": (
        "pp=2,dp=2,zero=1,recompute=full",
        {"clip": 0.1},
        {"tied": True, "dropout": 0.1},
    ),
    "tensors cross several stages": ("pp=3,dp=2", {"clip": 0.1}, {"crossing": True}),
    "tensors cross every stage, tied": ("pp=6", {}, {"crossing": True, "tied": True}),
    "tensors cross, recompute": ("pp=1,recompute=full", {}, {"crossing": True, "tied": True}),
    "tensors cross stages, recompute, zero 1": (
        "pp=2,dp=2,zero=1,recompute=full",
        {"micro_batch": 3},
        {"crossing": True, "dropout": 0.1},
    ),
    "frozen stages": ("pp=6", {"clip": 0.1}, {"frozen": 2}),
    "frozen stages, recompute, zero 1": ("pp=3,dp=2,zero=1,recompute=full", {}, {"frozen": 3}),
    "halves of backwards, tensors cross stages, tied": (
        "pp=3,schedule=zb_h1",
        {"clip": 0.1},
        {"crossing": True, "tied": True},
    ),
    "halves, recompute, dropout, zero 1": (
        "pp=2,dp=2,zero=1,recompute=full,schedule=zb_2p",
        {"clip": 0.1, "micro_batch": 3},
        {"dropout": 0.1},
    ),
    "halves beside whole backwards": ("pp=3,schedule=dualpipe_v,vp=2", {"global_batch": 9}, {"tied": True}),
    "halves, frozen stages": ("pp=3,schedule=zb_h1", {}, {"frozen": 2}),
    "zero 1 without replicas": ("pp=2,zero=1", {}, {}),
    "zero 2, clipped": ("pp=2,dp=2,zero=2", {"clip": 0.1}, {}),
    "zero 2, reduced part by part, tied across stages": (
        "pp=2,dp=2,zero=2,recompute=full",
        {"clip": 0.1},
        {"tied": True, "dropout": 0.1},
    ),
    "zero 2, tensors cross stages": ("pp=3,dp=2,zero=2", {}, {"crossing": True}),
    "zero 3, clipped": ("dp=4,zero=3", {"clip": 0.1}, {}),
    "zero 3, tied on one stage": ("dp=2,zero=3", {"clip": 0.1}, {"tied": True, "crossing": True}),
    "zero 3, tied across stages, recompute": (
        "pp=2,dp=2,zero=3,recompute=full",
        {"clip": 0.1},
        {"tied": True, "dropout": 0.1},
    ),
    "zero 3, two stages on each rank": ("pp=2,vp=2,dp=2,zero=3", {"clip": 0.1}, {}),
    "zero 3, split backward": ("pp=2,dp=2,zero=3,schedule=zb_h1", {"clip": 0.1}, {"crossing": True}),
    "zero 3, fetched early": ("dp=2,zero=3,prefetch=3", {}, {}),
    "zero 3, frozen stages": ("pp=3,dp=2,zero=3", {}, {"frozen": 2}),
    "zero 3, uneven last microbatch": ("dp=2,zero=3,micro_batch=3", {"micro_batch": 3}, {}),
    "zero 3 without replicas": ("pp=2,zero=3", {}, {}),
    "copies of shards, zero 1": ("dp=4,zero=1,hsdp=2", {"clip": 0.1}, {}),
    "copies of shards, zero 2": ("dp=4,zero=2,hsdp=2", {"clip": 0.1}, {}),
    "copies of shards, zero 3": ("dp=4,zero=3,hsdp=2", {"clip": 0.1}, {"tied": True}),
}


def run(name: str, *, optimizer: str) -> RunOutcome:
    text, sizes, model = LAYOUTS[name]
    return train(plan_of(text, optimizer=optimizer, **sizes, **model), model=model)


@pytest.mark.parametrize("name", LAYOUTS)
def test_sgd_run_is_bitwise_equal_to_the_same_tree_and_close_to_the_whole_batch(name: str) -> None:
    result = run(name, optimizer="sgd").result
    assert result["max_relative_error"] == BITWISE
    whole = result["whole_batch_error"]
    assert whole["loss"] < 1e-6
    assert whole["gradients"] < 1e-5
    assert whole["parameters"] < 1e-5
    assert result["verified"] is True


@pytest.mark.parametrize(
    "name", ["pipeline x data, 1f1b", "zero 1, three replicas, tied", "copies of shards, zero 3"]
)
def test_adamw_run_is_bitwise_equal_and_its_whole_batch_parameters_are_not_judged(name: str) -> None:
    result = run(name, optimizer="adamw").result
    assert result["max_relative_error"] == BITWISE
    assert result["whole_batch_error"]["parameters"] is None
    assert result["verified"] is True


def test_bf16_with_fp32_masters_is_bitwise_equal_and_judged_by_its_own_tolerances() -> None:
    strategy = load_strategy("pp=2,dp=2,zero=1,recompute=full")
    compiled = compile_job(Job(model="tiny-llama", strategy=strategy, gpus=4, global_batch=4, dtype="bf16"))
    outcome = run_local(compiled.plan, compiled.source, num_ranks=4, steps=2, verify=True, timeout_s=60.0)
    assert outcome.result["max_relative_error"] == BITWISE
    assert 1e-5 < outcome.result["whole_batch_error"]["gradients"] < 5e-2
    assert outcome.result["verified"] is True


@pytest.mark.parametrize("strategy", ["pp=2,dp=2,zero=1", "pp=4,recompute=full"])
def test_sparse_experts_train_as_in_one_process(strategy: str) -> None:
    job = Job(
        model="tiny-moe", strategy=load_strategy(strategy), gpus=4, global_batch=4, dtype="fp32",
        optimizer="sgd",
    )  # fmt: skip
    compiled = compile_job(job)
    outcome = run_local(compiled.plan, compiled.source, num_ranks=4, steps=3, verify=True, timeout_s=60.0)
    assert outcome.result["max_relative_error"] == BITWISE
    assert outcome.result["verified"] is True


def test_native_reductions_hold_within_tolerances() -> None:
    plan = plan_of("dp=4", clip=0.1)
    result = train(plan, reductions="native").result
    assert result["verified"] is True
    assert result["max_relative_error"]["gradients"] < 1e-5


def test_every_layout_trains_the_same_model() -> None:
    one, four = (train(plan_of(text), verify=False).result["steps"] for text in ("dp=1", "pp=2,dp=2"))
    assert [step["loss"] for step in one] == pytest.approx([step["loss"] for step in four], rel=1e-6)


def test_recompute_repeats_dropout_and_changes_no_bit() -> None:
    """The gradient norm of every step, and the losses after it, are equal: so are the gradients."""
    model = {"dropout": 0.3}
    kept, again = (
        train(plan_of(f"pp=2,recompute={mode}", clip=0.1, **model), verify=False, model=model)
        for mode in ("none", "full")
    )
    figures = [[(step["loss"], step["grad_norm"]) for step in run.result["steps"]] for run in (kept, again)]
    assert figures[0] == figures[1]


def test_dropout_takes_part() -> None:
    plain, dropped = (
        train(plan_of("dp=1", **model), verify=False, steps=1, model=model).result["steps"][0]["loss"]
        for model in ({}, {"dropout": 0.3})
    )
    assert plain != dropped
