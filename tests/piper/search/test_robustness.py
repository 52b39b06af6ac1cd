"""Winners on hardware whose rates are not quite what its files say."""

from __future__ import annotations

from typing import Any

import pytest

from piper.errors import JobError
from piper.predict import Job
from piper.search import SearchRequest, search_strategies
from piper.search.robustness import robustness_of
from tests.piper.search.samples import Sample
from tests.piper.search.test_search import FEW, TINY


def test_changes_of_kernels_and_links_are_simulated_each_apart() -> None:
    job = TINY | {"cluster": "local-cpu", "dtype": "fp32"}  # where no launch hides what a kernel takes
    found: dict[str, Any] = search_strategies(
        SearchRequest(**job, values=FEW, top=2, robustness=True)
    ).to_json()
    robust, step_s = found["robustness"], found["best"]["step_time_s"]
    times = {row["change"]: row["winner_s"] for row in robust["changes"]}
    assert times["kernels 10 % faster"] < step_s < times["kernels 10 % slower"]
    assert times["links 10 % faster"] <= step_s <= times["links 10 % slower"]
    assert robust["stays_best"] == sum(r["stays_best"] for r in robust["changes"]) / 4
    assert robust["largest_regret"] == max(row["regret"] for row in robust["changes"]) >= 0


def test_a_winner_that_is_not_the_best_then_has_a_regret() -> None:
    """A strategy that sends much is called the winner: the regret is what it loses to the best."""
    job = Job(**TINY | {"cluster": "local-cpu", "dtype": "fp32"})
    sample = Sample.of(job, **FEW)
    candidates = sorted(sample.space, key=lambda candidate: candidate.tp)[
        :: max(1, sample.space.num_candidates // 2)
    ]
    times = {c: sample.evaluator.simulate(c)["step_time_s"] for c in candidates}
    slowest = max(times, key=lambda c: times[c])
    robust = robustness_of(slowest, candidates, sample.evaluator)
    assert robust["strategies"] == len(candidates)
    assert robust["stays_best"] == 0
    for row in robust["changes"]:
        assert row["winner_s"] > row["best_s"]
        assert row["regret"] == pytest.approx(row["winner_s"] / row["best_s"] - 1)


def test_memory_does_not_depend_on_rates() -> None:
    with pytest.raises(JobError) as caught:
        search_strategies(SearchRequest(**TINY, objective="memory", robustness=True))
    assert caught.value.field == "objective"
