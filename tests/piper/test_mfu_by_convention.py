"""MFU and HFU of whole predictions, for every convention, model and kind of recomputation."""

import pytest

from piper.predict import Job, predict
from piper.strategy import Strategy
from simulator.conventions import CONVENTIONS

MODELS = {"tiny-llama": "pp=2,dp=2", "tiny-moe": "ep=2,dp=2", "gpt2": "tp=2"}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_mfu_is_at_most_hfu_and_equal_where_nothing_is_made_again(model, recompute):
    strategy = Strategy.parse(f"{MODELS[model]},recompute={recompute}")
    for convention in CONVENTIONS:
        result = predict(Job(model=model, strategy=strategy, seq_len=64, mfu_convention=convention)).result
        assert 0 < result["mfu"] <= result["hfu"] <= 1
        once = recompute == "none" or CONVENTIONS[convention].with_recompute
        assert (result["mfu"] == result["hfu"]) == once
