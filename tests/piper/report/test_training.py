"""The outcome of a run as text."""

from __future__ import annotations

from typing import Any

from piper.report.training import describe_run


def trained(**changes: Any) -> dict[str, Any]:
    step = {"loss": 5.5, "step_time_s": 0.2, "grad_norm": 1.25}
    return {
        "strategy": "pp=2,dp=2",
        "world_size": 4,
        "device": "cpu",
        "steps": [step | {"step_time_s": 0.9}, step, step | {"grad_norm": None}],
        "tokens_per_s": 2560.0,
        "peak_memory_bytes": 3 * 2**20,
        "verified": True,
        "max_relative_error": {"loss": 0.0, "gradients": 0.0, "parameters": 0.0},
        "whole_batch_error": {"loss": 1e-8, "gradients": 2.5e-7, "parameters": None},
        "predicted_step_time_s": 0.3,
    } | changes


def test_every_step_is_shown() -> None:
    text = describe_run("tiny-llama", trained())
    assert text.startswith("tiny-llama on 4 cpu processes\nstrategy    pp=2,dp=2\n")
    rows = [line.split() for line in text.splitlines()[4:7]]
    assert rows == [
        ["0", "5.500000", "900.0", "ms", "1.25"],
        ["1", "5.500000", "200.0", "ms", "1.25"],
        ["2", "5.500000", "200.0", "ms", "-"],
    ]


def test_the_prediction_stands_beside_the_measurement_without_the_first_step() -> None:
    text = describe_run("tiny-llama", trained())
    assert "200.0 ms measured (mean after the first step), 300.0 ms predicted (+50%)" in text


def test_a_verified_run_says_how_close_it_is() -> None:
    text = describe_run("tiny-llama", trained())
    assert "verified    yes" in text
    assert (
        "same microbatches and order: loss 0 (bitwise), gradients 0 (bitwise), parameters 0 (bitwise)" in text
    )
    assert "whole batch: loss 1.0e-08, gradients 2.5e-07, parameters not compared" in text


def test_a_run_that_differs_is_loud() -> None:
    assert "verified    NO, IT DIFFERS" in describe_run("tiny-llama", trained(verified=False))


def test_an_unverified_run_says_so() -> None:
    text = describe_run("tiny-llama", trained(verified=None, max_relative_error=None, whole_batch_error=None))
    assert text.endswith("verified    no (ask with --verify)")
