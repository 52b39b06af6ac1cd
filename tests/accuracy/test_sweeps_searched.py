"""The search inside the values of a published sweep, and what its ranking is worth against what was run."""

from __future__ import annotations

import math

import pytest

from benchmarks.published_sweeps import FOLDER, predict_sweeps, sweeps_of, without_odd_runs
from benchmarks.sweeps_searched import (
    Layout,
    Measured,
    layout,
    measured_of,
    score_ranking,
    search_inside,
    values_of,
)
from piper.strategy import Strategy
from piper.validation.jobs_of_rows import job_of_row
from piper.validation.odd_runs import ODD_RUNS
from piper.validation.rows import read_rows


def named(strategy: str) -> Layout:
    return layout(Strategy.parse(strategy).stated, micro_batch=1)


FAST, SLOW, LARGE, OTHER = (named(f"tp={tp},dp={8 // tp}") for tp in (1, 2, 4, 8))
MEASURED = {
    FAST: Measured(step_time_s=1.0, predicted_s=1.2, fits=True),
    SLOW: Measured(step_time_s=1.5, predicted_s=1.1, fits=True),
    LARGE: Measured(step_time_s=math.inf, predicted_s=1.0, fits=True),
}


def test_the_regret_of_a_pick_that_was_run_is_that_of_the_sweep() -> None:
    found = score_ranking([(SLOW, 1.1), (FAST, 1.2)], MEASURED)
    assert found["pick"] == "measured"
    assert found["regret_1"] == pytest.approx(0.5)
    assert found["regret_5"] == 0
    assert found["rank_of_best"] == 2


def test_a_pick_that_nobody_ran_has_no_regret_but_a_promise_and_that_of_the_first_that_was_run() -> None:
    found = score_ranking([(OTHER, 0.8), (SLOW, 1.1), (FAST, 1.2)], MEASURED)
    assert (found["pick"], found["regret_1"]) == ("not_measured", None)
    assert found["regret_first_measured"] == pytest.approx(0.5)
    assert found["promised"] == pytest.approx(0.5)
    assert found["rank_of_best"] == 3
    assert found["missed"] == 0


def test_a_pick_that_did_not_fit_where_it_was_run_is_counted_as_such() -> None:
    found = score_ranking([(LARGE, 1.0), (FAST, 1.2)], MEASURED)
    assert (found["pick"], found["regret_1"], found["oom_in_top_5"]) == ("oom", None, 1)


def test_a_best_run_that_the_search_never_simulated_has_no_rank() -> None:
    found = score_ranking([(SLOW, 1.2)], MEASURED)
    assert found["rank_of_best"] is None
    assert found["missed"] == pytest.approx(0.2)


def test_strategies_that_differ_only_in_how_states_are_kept_have_one_place() -> None:
    cut = named("tp=1,dp=8,zero=3")
    assert cut != FAST
    assert score_ranking([(cut, 1.0)], MEASURED)["rank_of_best"] == 1


def test_what_changes_nothing_does_not_tell_layouts_apart() -> None:
    assert named("tp=1,pp=1,dp=8,sp=off,schedule=gpipe") == FAST
    assert named("tp=8,dp=1,zero=1,sp=off") != named("tp=8,dp=1,zero=1,sp=on")
    assert named("tp=8,dp=1,zero=1") == named("tp=8,dp=1,zero=0")


def test_the_search_in_the_values_of_a_sweep_picks_from_them_what_it_predicts_to_be_fastest() -> None:
    sweeps = sweeps_of(read_rows([FOLDER / "vtrain2024_single_node.csv"]))
    sweep = min(sweeps, key=lambda each: (len(each.runs), each.name))
    values = values_of([job_of_row(row) for row in sweep.rows])
    ranking = search_inside(sweep.rows)
    assert ranking is not None
    for name, place in (("tp", 0), ("pp", 1), ("dp", 3), ("recompute", 8), ("micro_batch", 9)):
        assert {found[place] for found, _ in ranking} <= set(values[name])
    found = score_ranking(ranking, measured_of(sweep.rows, predict_sweeps([sweep])))
    assert found["ranked"] == len(ranking)
    assert found["missed"] <= 0.01


def test_a_sweep_without_odd_runs_keeps_all_others() -> None:
    sweeps = sweeps_of(read_rows([FOLDER / "hagemann2023.csv"]))
    for sweep in sweeps:
        kept = {row.case_id for row in without_odd_runs(sweep).rows}
        assert kept == {row.case_id for row in sweep.rows} - ODD_RUNS
