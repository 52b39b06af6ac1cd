"""What the documentation promises: `piper run tiny-llama --local N --strategy ... --steps 3 --verify` holds.

Each strategy runs as the command would run it; references are shared ([Note: known references]).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from piper.runtime.handlers import host
from tests.piper.runtime.ledgers import differences
from tests.piper.runtime.named_runs import BITWISE, compiled_job, require_equal, run_job, run_named
from tests.piper.runtime.small_models import small_model
from tests.piper.runtime.toy import SEQ

STATE = [
    "dp=4",
    "dp=4,zero=1",
    "dp=4,zero=2",
    "dp=4,zero=3",
    "dp=4,zero=2,hsdp=2",
    "dp=4,zero=3,hsdp=2",
    "dp=4,zero=3,prefetch=2",
    "dp=4,zero=1,bucket_mb=1",
    "pp=2,dp=2,zero=2",
    "pp=2,dp=2,zero=3,recompute=full",
]


@pytest.mark.parametrize("strategy", STATE)
def test_state_cut_over_replicas_trains_as_one_process(strategy: str) -> None:
    require_equal(run_named("tiny-llama", strategy, global_batch=4))


DROPPED = "tests.piper.runtime.toy:dropped"

AWAY = [
    ("tiny-llama", "pp=2,dp=2,recompute=selective", {}),
    ("tiny-llama", "dp=2,zero=3,recompute=selective", {"global_batch": 2, "dtype": "bf16"}),
    ("tiny-llama", "pp=2,recompute=selective,schedule=zb_h1", {}),
    ("tiny-llama", "dp=4,zero=1,offload=optimizer", {"optimizer": "adamw"}),
    ("tiny-llama", "pp=2,offload=optimizer", {"optimizer": "adamw", "global_batch": 2, "dtype": "bf16"}),
    ("tiny-llama", "pp=4,offload=activations", {}),
    ("tiny-llama", "pp=2,dp=2,zero=3,offload=activations,recompute=selective", {}),
    ("tiny-llama", "pp=2,dp=2,zero=1,offload=params", {}),
    (DROPPED, "pp=2,dp=2,recompute=selective", {"seq_len": SEQ}),
    (DROPPED, "pp=2,dp=2,recompute=full", {"seq_len": SEQ}),
    (DROPPED, "dp=4,zero=3,recompute=selective,offload=activations", {"seq_len": SEQ}),
]


@pytest.mark.parametrize(("model", "strategy", "options"), AWAY)
def test_what_goes_away_comes_back_equal_and_the_simulation_knows_its_bytes(
    model: str, strategy: str, options: dict[str, object]
) -> None:
    job = compiled_job(model, strategy, **{"optimizer": "sgd", "global_batch": 4, **options})
    outcome = run_job(job)
    require_equal(outcome)
    assert differences(job, outcome) == []


def test_recomputation_changes_no_loss_of_a_model_with_dropout() -> None:
    losses = [
        [step["loss"] for step in run_named(DROPPED, f"pp=2,recompute={mode}", seq_len=SEQ).result["steps"]]
        for mode in ("none", "selective", "full")
    ]
    assert losses[0] == losses[1] == losses[2]


def test_a_large_batch_of_a_model_with_layer_norms_is_compared_in_bf16(tmp_path: Path) -> None:
    """torch sums the gradients of these norms in bf16, so that the whole batch was wrong, not the run."""
    job = compiled_job(small_model("gpt2", tmp_path), "dp=2,micro_batch=2", global_batch=64, dtype="bf16")
    outcome = run_job(job, steps=1)
    assert outcome.result["max_relative_error"] == BITWISE
    assert outcome.result["whole_batch_error"]["gradients"] < 0.03
    assert outcome.result["verified"] is True


NUMBERS = {
    "gradients in bf16": ("dp=2,zero=2", {"dtype": "bf16"}, {"gradient_dtype": "bf16"}),
    "gradients in bf16, gathered": ("dp=2,zero=3", {"dtype": "bf16"}, {"gradient_dtype": "bf16"}),
    "no masters": ("pp=2,zero=1", {"dtype": "bf16"}, {"master_dtype": "none"}),
    "moments in bf16, on the host": (
        "dp=2,zero=1,offload=optimizer",
        {"optimizer": "adamw"},
        {"moment_dtype": "bf16"},
    ),
    "momentum": ("dp=2,zero=1", {"optimizer": "momentum"}, {}),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_states_in_other_numbers_train_as_one_process_with_these(name: str) -> None:
    strategy, options, states = NUMBERS[name]
    settings = tuple((f"strategy.{key}", value) for key, value in states.items())
    job = compiled_job("tiny-llama", strategy, global_batch=2, settings=settings, **options)
    outcome = run_job(job)
    assert outcome.differing == ()
    assert outcome.result["max_relative_error"] == BITWISE
    assert differences(job, outcome) == []


def test_a_late_copy_to_the_host_takes_nothing_that_was_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    original = host.offload

    def late(*arguments: Any) -> None:
        time.sleep(0.02)
        original(*arguments)

    monkeypatch.setattr(host, "offload", late)
    require_equal(run_named("tiny-moe", "pp=2,offload=activations,recompute=selective", global_batch=2))
