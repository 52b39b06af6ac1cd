"""Bounds never exceed what the simulator says, for random strategies of jobs of every kind."""

from __future__ import annotations

import pytest

from piper.predict import Job
from tests.piper.search.samples import JOBS, Sample, broken_bounds, job_of

_QUICK = {"dense": 140, "experts": 110, "six": 100, "no barrier": 80, "two nodes": 70}
"""500 in all."""


@pytest.mark.parametrize("name", JOBS)
def test_no_bound_exceeds_the_simulation(name: str) -> None:
    assert broken_bounds(Sample.of(job_of(name)), _QUICK[name], seed=7) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", JOBS)
def test_no_bound_exceeds_ten_thousand_simulations(name: str) -> None:
    assert broken_bounds(Sample.of(job_of(name)), 2000, seed=11) == []


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpus", "global_batch"), [("llama3-8b", 16, 48), ("llama2-7b", 12, 60)])
def test_no_bound_exceeds_the_simulation_of_a_large_model(model: str, gpus: int, global_batch: int) -> None:
    job = Job(model=model, gpus=gpus, global_batch=global_batch, seq_len=1024)
    assert broken_bounds(Sample.of(job), 60, seed=7) == []
