"""What `piper explain` says: parts that add up, changes that were simulated, and two strategies compared."""

from __future__ import annotations

import json

import pytest

from piper.cli import main


def explained(capsys, *arguments: str) -> dict:
    assert main(["explain", "tiny-llama", "--global-batch", "8", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_path_and_the_breakdown_each_fill_the_step_and_bubble_phases_fill_the_bubble(capsys):
    found = explained(capsys, "--strategy", "pp=2,dp=2")
    step = found["step_time_s"]
    assert sum(found["breakdown_s"].values()) == pytest.approx(step, rel=1e-9)
    assert sum(found["critical_path"]["by_kind_s"].values()) == pytest.approx(step, rel=1e-9)
    assert sum(found["critical_path"]["by_pipeline_rank_s"].values()) == pytest.approx(step, rel=1e-9)
    assert sum(found["bubble_s"].values()) == pytest.approx(found["breakdown_s"]["bubble"], abs=1e-12)
    assert set(found["bubble_s"]) == {"warm_up", "steady", "cool_down"}
    for kind in found["slack"].values():
        assert 0 <= kind["n_critical"] <= kind["n"]
        assert 0 <= kind["median_s"] <= kind["largest_s"]


def test_changes_come_by_what_they_gain_and_a_tiny_model_gains_most_without_launches(capsys):
    found = explained(capsys, "--strategy", "pp=2,dp=2")
    gains = [change["gain_s"] for change in found["what_if"]]
    assert gains == sorted(gains, reverse=True)
    assert found["what_if"][0]["change"] == "no launch cost"
    for change in found["what_if"]:
        assert change["step_time_s"] == pytest.approx(found["step_time_s"] - change["gain_s"])


def test_a_second_strategy_is_slower_by_the_sum_of_what_its_parts_take_longer(capsys):
    found = explained(capsys, "--strategy", "dp=4", "--against", "pp=4")
    more = found["against"]["difference_s"]
    assert more["step_time_s"] == pytest.approx(found["against"]["step_time_s"] - found["step_time_s"])
    assert sum(more["breakdown_s"].values()) == pytest.approx(more["step_time_s"], rel=1e-6)


def test_the_text_answers_where_what_and_what_would_help(capsys):
    arguments = ["explain", "tiny-llama", "--strategy", "pp=2", "--against", "pp=2,recompute=full"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for heading in ("where the step goes", "what limits it", "how late tasks may be", "what would help most"):
        assert out.count(heading) == 2
    assert "bubble by phase: warm-up" in out
    (verdict,) = [line for line in out.splitlines() if " slower than " in line]
    assert [name.count("recompute=full") for name in verdict.split(" is ")] == [1, 0]
