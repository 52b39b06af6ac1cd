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
