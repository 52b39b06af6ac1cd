"""The outcome of a search as text."""

from __future__ import annotations

from typing import Any

from piper.report.ranking import describe_search
from tests.piper.report.samples import figures


def found(**changes: Any) -> dict[str, Any]:
    fast = figures(step_time_s=0.01, strategy={"shorthand": "pp=4", "directives": []})
    slow = figures(step_time_s=0.02, strategy={"shorthand": "dp=4", "directives": []})
    return {
        "space_size": 40,
        "evaluated": 20,
        "pruned": {"illegal": 10, "duplicate": 0, "memory": 6, "bound": 22},
        "simulated": 2,
        "ended_by": "bound",
        "lower_bound_s": 0.008,
        "gap": 0.2,
        "gap_basis": "over this space",
        "best": fast,
        "ranking": [fast, slow],
        "pareto": [fast],
        "pareto_complete": False,
        "pareto_open": 12,
        "rejected": [
            {"family": "pp=1,recompute=none", "reason": "does not fit (bound)", "count": 6, "best_s": None},
            {"family": "pp=2,recompute=full", "reason": "bounded out", "count": 3, "best_s": 0.03},
            {"family": "pp=2,recompute=full", "reason": "slower", "count": 1, "best_s": 0.04},
        ],
        "timings_s": {"wall": 2.5, "evaluations_per_s": 8.0},
    } | changes


def test_the_ranking_comes_with_the_best_its_bound_and_the_reasons() -> None:
    text = describe_search(found())
    assert "best        pp=4" in text
    assert "bound       8.000 ms: nothing in this space is faster than that, 20.0% below the best" in text
    assert "pp=1,recompute=none  -         6 does not fit (bound)" in text
    assert "pp=2,recompute=full  30.00 ms  3 bounded out, 1 slower" in text
    assert text.index("pp=4") < text.index("dp=4")


def test_a_proven_best_is_said_to_be_proven() -> None:
    text = describe_search(found(lower_bound_s=0.01, gap=0.0))
    assert "bound       10.00 ms: nothing else in this space is faster, by our simulator" in text


def test_the_bound_of_a_search_for_memory_is_in_bytes() -> None:
    text = describe_search(found(objective="memory", lower_bound_bytes=3 * 2**30, gap=0.25))
    assert "bound       3.00 GiB: nothing in this space needs less than that, 25.0% below the best" in text


def test_the_counts_say_what_was_not_simulated() -> None:
    last = describe_search(found()).splitlines()[-1]
    assert last == (
        "40 strategies: 2 simulated, not needed: 10 illegal, 6 memory, 22 bound; 2.500 s, ended by bound"
    )


def test_a_search_without_a_fitting_strategy_says_so_with_the_reasons() -> None:
    text = describe_search(found(ranking=[], best=None, lower_bound_s=None, gap=None))
    assert text.startswith("no strategy fits")
    assert "does not fit (bound)" in text
    conflict = {"constraints": "--pin tp=1", "reason": "--pin tp=1 leave nothing that fits on 8 GPUs"}
    text = describe_search(found(ranking=[], best=None, lower_bound_s=None, gap=None, conflict=conflict))
    assert text.startswith("no strategy fits\nbecause     --pin tp=1 leave nothing that fits on 8 GPUs")


def test_why_not_is_answered_by_cause() -> None:
    answer = {
        "asked": {"pp": "8"},
        "strategy": "pp=8,dp=1",
        "status": "ranked",
        "reason": "",
        "slower_by_s": 0.004,
        "by_cause_s": {"compute": 0.001, "bubble": 0.003, "host": 0.0},
    }
    text = describe_search(found(why_not=answer))
    assert "why not pp=8? pp=8,dp=1: ranked\n  slower by 4.000 ms:\n    bubble          +3.0 ms\n" in text
    assert "host" not in text


def test_why_not_of_a_strategy_that_was_not_simulated_gives_its_bound() -> None:
    answer = {"asked": {"pp": "8"}, "strategy": "pp=8", "status": "bounded out", "reason": "bounded out",
              "bound_s": 0.012, "winner_s": 0.01}  # fmt: skip
    assert "why not pp=8? pp=8: bounded out\n" in describe_search(found(why_not=answer))
    assert "it takes at least 12.00 ms, the best 10.00 ms" in describe_search(found(why_not=answer))


def test_the_front_comes_with_how_complete_it_is() -> None:
    assert "(of what was simulated: by their bounds 12 others might be on it)" in describe_search(found())
    assert "(complete, by bounds)" in describe_search(found(pareto_complete=True, pareto_open=0))


def test_numbers_of_gpus_a_target_and_a_whole_run_are_written() -> None:
    tried = [
        {"gpus": 2, "outcome": "nothing fits", "strategy": None, "step_time_s": None},
        {"gpus": 4, "outcome": "chosen", "strategy": "pp=4", "step_time_s": 0.01},
    ]
    best = found()["best"] | {"run": {"tokens": 1000, "steps": 10, "days": 2.0, "gpu_hours": 96.0}}
    target = {"step_time_s": 0.005, "met": False, "impossible": True}
    text = describe_search(found(best=best, gpus=tried, target=target))
    assert "2     nothing fits  -" in text
    assert "4     chosen        pp=4" in text
    assert "4 GPUs: pp=4" in text
    assert "whole run   1,000 tokens: 10 steps, 2.0 days, 96 GPU-hours" in text
    assert "target      5.000 ms a step: not met: nothing in this space can, by its bounds" in text


def test_the_bound_of_the_cheapest_is_in_gpu_seconds() -> None:
    text = describe_search(found(objective="cost", lower_bound_s=None, lower_bound_gpu_s=0.03, gap=0.25))
    assert "bound       0.03 GPU-seconds of a step: nothing in this space costs less than that" in text


def test_robustness_names_the_changes_on_which_another_is_better() -> None:
    changes = [
        {
            "change": "kernels 10 % faster",
            "winner_s": 0.009,
            "best": "pp=4",
            "stays_best": True,
            "regret": 0.0,
        },
        {
            "change": "links 10 % slower",
            "winner_s": 0.011,
            "best": "dp=4",
            "stays_best": False,
            "regret": 0.02,
        },
    ]
    robust = {"strategies": 5, "stays_best": 0.5, "largest_regret": 0.02, "changes": changes}
    text = describe_search(found(robustness=robust))
    assert "best in 50% of the changes among the first 5; regret at most 2.0%" in text
    assert "links 10 % slower    11.00 ms, 2.0% less with dp=4" in text
