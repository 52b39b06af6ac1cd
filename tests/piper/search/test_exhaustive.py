"""Nothing in whole simulated spaces is better than what the search finds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from piper.search import SearchRequest, search_strategies
from tests.piper.search.samples import Sample, job_of

BETTER = 0.001
"""By which share the best of a space may beat what the search finds."""
SPACES: dict[str, dict[str, tuple[int | str, ...]]] = {
    "dense": {"offload": ("none",), "prefetch": (0,), "bucket_mb": (0,), "hsdp": (0,), "cp": (1, 2)},
    "six": {"offload": ("none",), "prefetch": (0,), "bucket_mb": (0,), "async_tp": ("off",)},
    "experts": {"offload": ("none",), "prefetch": (0,), "bucket_mb": (0,), "sp": ("on",)},
}
"""Spaces of some thousand strategies."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SPACES)
def test_no_strategy_of_a_whole_space_beats_the_search(name: str) -> None:
    sample = Sample.of(job_of(name), **SPACES[name])
    assert sample.space.num_candidates >= 3000
    results = [sample.evaluator.simulate(candidate) for candidate in sample.space]
    fastest = min(result["step_time_s"] for result in results if result["fits"])
    assert found(name)["best"]["step_time_s"] <= fastest * (1 + BETTER)


def found(name: str) -> dict[str, Any]:
    """Return what the search finds in one of the spaces."""
    job = {key: value for key, value in asdict(job_of(name)).items() if key != "strategy"}
    return search_strategies(SearchRequest(**job, top=1, values=SPACES[name])).to_json()
