"""`cut` of the shorthand: even, balanced, or the units of every stage."""

from __future__ import annotations

import pytest

import piper
from piper.errors import StrategyError
from piper.search import SearchRequest, search_strategies

JOB = {"cluster": "dgx-h100", "gpus": 8, "global_batch": 32, "seq_len": 4096}


def step_time_s(strategy: str) -> float:
    return piper.simulate(piper.compile_plan("llama3-8b", strategy, **JOB)).step_time_s


def units_of(strategy: str) -> list[int]:
    places = [d for d in piper.compile_plan("llama3-8b", strategy, **JOB).directives if d["op"] == "place"]
    units = {stage: place["units"] for place in places for stage in _stages(place["filter"]["PP"])}
    return [units[stage] for stage in sorted(units)]


def _stages(stated: int | list[int]) -> list[int]:
    return stated if isinstance(stated, list) else [stated]


def test_a_balanced_cut_leaves_the_head_fewer_layers_and_is_faster() -> None:
    assert units_of("pp=4,dp=2,cut=balanced") == [9, 9, 9, 7]
    assert step_time_s("pp=4,dp=2,cut=balanced") < 0.95 * step_time_s("pp=4,dp=2")


def test_stated_units_are_those_of_the_stages() -> None:
    assert units_of("pp=4,dp=2,cut=10+8+8+8") == [10, 8, 8, 8]


def test_an_even_cut_is_the_default() -> None:
    assert units_of("pp=4,dp=2,cut=even") == [9, 8, 8, 9]
    assert step_time_s("pp=4,dp=2,cut=even") == step_time_s("pp=4,dp=2")


@pytest.mark.parametrize(
    ("cut", "rule", "fix"),
    [
        ("odd", "even, balanced, or the units", "cut=balanced"),
        ("9+0+9", "even, balanced, or the units", "cut=balanced"),
        ("9+10", "each of 4 stages", "cut=9+8+8+9"),
        ("9+9+9+9", "the model's 34 units", "cut=9+8+8+9"),
    ],
)
def test_a_cut_that_does_not_suit_the_model_is_refused(cut: str, rule: str, fix: str) -> None:
    with pytest.raises(StrategyError) as caught:
        piper.compile_plan("llama3-8b", f"pp=4,dp=2,cut={cut}", **JOB)
    assert rule in caught.value.rule
    assert fix in caught.value.fix


def test_a_search_takes_balanced_cuts_and_others_where_it_is_asked_to() -> None:
    pins = {
        "tp": "1", "cp": "1", "pp": "4", "zero": "1", "schedule": "1f1b", "micro_batch": "1",
        "recompute": "none", "offload": "none",
    }  # fmt: skip
    request = {"model": "llama3-8b", "top": 1, "pin": pins, **JOB}
    best = search_strategies(SearchRequest(**request)).to_json()["best"]
    even = search_strategies(SearchRequest(**request | {"pin": pins | {"cut": "even"}})).to_json()["best"]
    assert best["strategy"]["shorthand"].endswith("cut=balanced")
    assert "cut" not in even["strategy"]["shorthand"]
    assert best["step_time_s"] < even["step_time_s"]
