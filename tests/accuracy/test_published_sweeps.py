"""Layouts of published sweeps are ranked as well as they were: present figures, which may only improve."""

from __future__ import annotations

import pytest

from benchmarks.published_sweeps import FOLDER, QUICK, SOURCES, score_sweeps, sweeps_of
from piper.validation.rows import read_rows


@pytest.mark.slow
@pytest.mark.accuracy
def test_the_best_five_predictions_of_a_sweep_hold_a_layout_that_is_hardly_slower_than_the_best() -> None:
    sweeps = sweeps_of(read_rows([FOLDER / f"{name}.csv" for name in SOURCES]))
    found = score_sweeps(sweeps[:QUICK])
    assert found["regret_5_mean"] <= 0.02
    assert found["regret_1_mean"] <= 0.08
    assert found["false_oom"] <= 0.10


def test_sweeps_have_many_measured_layouts() -> None:
    sweeps = sweeps_of(read_rows([FOLDER / f"{name}.csv" for name in SOURCES]))
    assert len(sweeps) >= 25
    assert all(len(sweep.runs) >= 8 for sweep in sweeps)
