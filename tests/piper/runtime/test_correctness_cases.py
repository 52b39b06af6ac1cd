"""Defects of other frameworks that users reported: here each behaves as `correctness_cases.csv` expects.

The table names the reports. What they have in common: the loss looked plausible, so gradient norms are
compared, and every run is compared with one process.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from piper.errors import PiperError
from piper.models import find_model
from piper.runtime import run_local
from piper.runtime.sources import build
from tests.piper.runtime.checkpointed import Checkpointed
from tests.piper.runtime.jobs import plan_of, train
from tests.piper.runtime.named_runs import compiled_job, require_equal, run_job
from tests.piper.runtime.small_models import CONFIGS
from tests.piper.runtime.toy import SEQ

PADDING = 0.3


def steps_of(text: str, *, padding: float = 0.0, **options: Any) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of every step of a verified run of the toy."""
    model = {name: options.pop(name) for name in ("tied", "dropout", "frozen") if name in options}
    plan = plan_of(text, **{"clip": 1e9, **options, **model})
    outcome = train(plan, model=model, padding=padding)
    require_equal(outcome)
    return [(step["loss"], step["grad_norm"]) for step in outcome.result["steps"]]


def same(one: list[tuple[float, float]], other: list[tuple[float, float]], *, rel: float = 1e-5) -> None:
    for a, b in zip(one, other, strict=True):
        assert a == pytest.approx(b, rel=rel)


def tied_copies_stay_equal(_folder: Path) -> None:
    one = steps_of("dp=1", tied=True)
    same(one, steps_of("pp=2", tied=True))
    same(one, steps_of("pp=2,schedule=zbv", tied=True))


def stages_change_no_gradient_norm(_folder: Path) -> None:
    same(steps_of("dp=1", padding=PADDING), steps_of("pp=2", padding=PADDING))


def accumulation_changes_no_gradient_norm(_folder: Path) -> None:
    same(
        steps_of("dp=1,micro_batch=4", global_batch=16, micro_batch=4),
        steps_of("pp=2", global_batch=16, micro_batch=1),
    )


def losses_are_normalised_once(_folder: Path) -> None:
    few, many = (steps_of(f"dp=1,micro_batch={size}", padding=PADDING, micro_batch=size) for size in (4, 1))
    same(few, many)


def microbatches_weigh_by_their_tokens(_folder: Path) -> None:
    same(steps_of("dp=1,micro_batch=8", padding=PADDING, micro_batch=8), steps_of("dp=1", padding=PADDING))


def replicas_weigh_by_their_tokens(_folder: Path) -> None:
    same(steps_of("dp=1", padding=PADDING), steps_of("dp=2", padding=PADDING))


def the_last_partial_window_counts(_folder: Path) -> None:
    plan = plan_of("dp=1,micro_batch=4", global_batch=10, micro_batch=4)
    assert plan.training.micro_batch_sizes == (4, 4, 2)
    same(
        steps_of("dp=1,micro_batch=4", global_batch=10, micro_batch=4),
        steps_of("dp=1,micro_batch=10", global_batch=10, micro_batch=10),
    )


def recomputation_restores_random_numbers(_folder: Path) -> None:
    assert steps_of("pp=2,recompute=full", dropout=0.1) == steps_of("pp=2", dropout=0.1)


def checkpoints_that_lose_random_numbers_are_detected(_folder: Path) -> None:
    """A forward that a module runs again by itself draws other masks: run and reference differ."""
    require_equal(run_job(compiled_job("tests.piper.runtime.checkpointed:checkpointed", "pp=2", seq_len=SEQ)))
    dropped = run_job(compiled_job("tests.piper.runtime.checkpointed:dropping", "pp=2", seq_len=SEQ), steps=1)
    assert dropped.result["verified"] is False
    with pytest.raises(PiperError, match="use_reentrant=False"):
        compiled_job("tests.piper.runtime.checkpointed:reentrant", "pp=2", seq_len=SEQ)


def lengths_that_vary_keep_accumulated_gradients(_folder: Path) -> None:
    same(
        steps_of("pp=1", padding=PADDING, global_batch=2),
        steps_of("pp=2", padding=PADDING, global_batch=2),
    )


def every_adapter_gets_a_gradient(folder: Path) -> None:
    base = CONFIGS["llama"] | {"num_hidden_layers": 4, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(base))
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    outcome = run_job(compiled_job(str(folder), "pp=2,dp=2,zero=1", optimizer="sgd"))
    require_equal(outcome)
    assert outcome.result["gradient_coverage"] == {"trainable": 4 * 3 * 2, "with_gradient": 4 * 3 * 2}
    reported = base | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
    (folder / "config.json").write_text(json.dumps(reported))
    adapter = {"r": 64, "lora_alpha": 128, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    module = build(find_model(str(folder)), dtype="bf16", device="meta", seq_len=SEQ)
    trained = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    assert (len(trained), sum(trained)) == (32 * 3 * 2, 32 * 3 * 64 * (4096 + 14336))


def a_stage_without_trained_parameters_hinders_nobody(_folder: Path) -> None:
    steps_of("pp=3,dp=2,zero=1", frozen=2)
    steps_of("pp=6,zero=1", frozen=1, clip=0.1)


BEHAVIOUR: dict[str, Callable[[Path], None]] = {
    "e01_piper_tied": tied_copies_stay_equal,
    "e03_titan_pp_scale": stages_change_no_gradient_norm,
    "e05_ds_pp_sum": accumulation_changes_no_gradient_norm,
    "e06_areal_double_div": losses_are_normalised_once,
    "e07_ga_token_mean": microbatches_weigh_by_their_tokens,
    "e08_ddp_token_mean": replicas_weigh_by_their_tokens,
    "e10_mlx_partial_window": the_last_partial_window_counts,
    "e11_rng_recompute_olmo": recomputation_restores_random_numbers,
    "e13_guided_ckpt": checkpoints_that_lose_random_numbers_are_detected,
    "e14_pp_reinit_grads": lengths_that_vary_keep_accumulated_gradients,
    "e18_lora_grad_coverage": every_adapter_gets_a_gradient,
    "e19_zero1_pp_hang": a_stage_without_trained_parameters_hinders_nobody,
}


def reported() -> list[str]:
    with (Path(__file__).parent / "correctness_cases.csv").open(newline="") as file:
        return [row["case_id"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("case", reported())
def test_a_reported_defect_is_not_ours(case: str, tmp_path: Path) -> None:
    BEHAVIOUR[case](tmp_path)


@pytest.mark.parametrize("padding", [-0.1, 0.6, float("nan")])
def test_padding_must_leave_tokens(padding: float) -> None:
    plan = plan_of("dp=1")
    with pytest.raises(PiperError, match="--padding"):
        run_local(plan, partial(Checkpointed, reentrant=False), num_ranks=1, steps=1, padding=padding)


def test_padding_is_left_out_of_the_loss_and_of_its_divisor() -> None:
    """Cross-entropy of random labels is near log(vocabulary), whatever share of the tokens counts."""
    losses = [steps_of("dp=1", padding=share)[0][0] for share in (0.0, 0.5)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
