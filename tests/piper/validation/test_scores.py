"""Predictions of published runs -> scores."""

import pytest

from piper.validation.predictions import RowPrediction
from piper.validation.rows import PublishedRow
from piper.validation.scores import score, scores


def prediction(name: str, predicted: float, measured: float | None, **more: object) -> RowPrediction:
    texts = {"case_id": name, "tp": name, "oom": "true" if measured is None else "false"}
    row = PublishedRow(file="runs", texts=texts)
    values = {"fits": measured is not None, "low_s": predicted * 0.9, "high_s": predicted * 1.1} | more
    return RowPrediction(row=row, predicted_s=predicted, measured_s=measured, **values)  # type: ignore[arg-type]


def test_errors_are_relative_to_what_was_measured() -> None:
    found = score([prediction("a", 1.1, 1.0), prediction("b", 1.6, 2.0)])
    assert found["mape"] == pytest.approx(0.15)
    assert found["bias"] == pytest.approx(-0.05)
    assert found["band_coverage"] == 0.5


def test_the_fastest_predicted_layout_that_fits_is_picked() -> None:
    runs = [
        prediction("a", 1.0, 1.5, fits=False), prediction("b", 2.0, 1.1), prediction("c", 3.0, 1.0),
        prediction("d", 4.0, 2.0),
    ]  # fmt: skip
    found = score(runs)["ranking"]
    assert (found["n_groups"], found["top1_hits"]) == (1, 0)
    assert found["regret_mean"] == pytest.approx(0.1)


def test_three_layouts_are_no_ranking() -> None:
    assert score([prediction(name, 1.0, 1.0) for name in "abc"])["ranking"]["n_groups"] == 0


def test_verdicts_weigh_both_kinds_of_runs_alike() -> None:
    runs = [prediction("a", 1, None), prediction("b", 1, None, fits=True), prediction("c", 1, 1.0)]
    assert score(runs)["oom"] == {"n": 3, "precision": 1.0, "recall": 0.5, "balanced_accuracy": 0.75}


def test_skipped_runs_are_counted_by_reason() -> None:
    row = PublishedRow(file="runs", texts={"case_id": "a"})
    found = scores([RowPrediction(row=row, reason="gpu: is on no known cluster"), prediction("b", 1.0, 1.0)])
    assert found["skipped"] == [{"reason": "gpu: is on no known cluster", "count": 1}]
    assert found["by_source"]["runs"]["n_time"] == 1
