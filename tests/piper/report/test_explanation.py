"""What `piper explain` says: parts that add up, changes that were simulated, and two strategies compared."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from piper.capture import capture
from piper.cli import main
from piper.models import find_model
from piper.report.explanation import sharing_lines
from piper.report.saved import largest_saved


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


def test_what_sharing_slows_is_said_by_kind_with_factor_resource_and_neighbours(capsys):
    for slow in explained(capsys, "--strategy", "pp=2,dp=2")["sharing"]:
        assert 0 <= slow["alone_s"] < slow["lasted_s"]
    sharing = [
        {
            "kind": "exposed_dp", "alone_s": 0.010, "lasted_s": 0.013, "over": ["NVLink out of rank 0"],
            "beside": ["exposed_pp", "exposed_tp"],
        },
        {"kind": "F", "alone_s": 0.0, "lasted_s": 1e-9, "over": [], "beside": []},
        {"kind": "B", "alone_s": 1.0, "lasted_s": 1.5, "over": list("abcd"), "beside": ["exposed_dp"]},
    ]  # fmt: skip
    assert sharing_lines(sharing) == [
        "  exposed_dp 1.30x +3.000 ms by sharing NVLink out of rank 0 with exposed_pp, exposed_tp",
        "  B 1.50x +500.0 ms by sharing a, b, c and 1 more with exposed_dp",
    ]


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
    headings = ("where the step goes", "what limits it", "how late tasks may be", "what would help most")
    for heading in (*headings, "what forward keeps for backward"):
        assert out.count(heading) == 2
    assert "bubble by phase: warm-up" in out
    (verdict,) = [line for line in out.splitlines() if " slower than " in line]
    assert [name.count("recompute=full") for name in verdict.split(" is ")] == [1, 0]


def test_the_largest_saved_tensors_come_first_each_with_the_operators_that_saved_and_made_it(capsys):
    found = explained(capsys, "--strategy", "pp=2", "--set", "model.attention=math")["saved_tensors"]
    sums = [tensor["total_bytes"] for tensor in found["largest"]]
    assert len(sums) == 10
    assert sums == sorted(sums, reverse=True)
    scores = found["largest"][0]
    assert scores == {
        "segment": "PP{i}",
        "tags": ["CP", "LAYER", "PP", "TP"],
        "count": 16,
        "shape": [1, 8, 64, 64],
        "dtype": "fp32",
        "bytes": 8 * 64 * 64 * 4,
        "total_bytes": 16 * 8 * 64 * 64 * 4,
        "saved_by": "aten._safe_softmax.default",
        "made_by": "aten._safe_softmax.default",
        "border": None,
    }


def test_saved_tensors_follow_the_kernels_of_the_job_and_its_microbatch(capsys):
    flash = explained(capsys, "--strategy", "pp=2,micro_batch=2")["saved_tensors"]
    assert (flash["micro_batch"], flash["seq_len"], flash["dtype"]) == (2, 64, "bf16")
    assert not [tensor for tensor in flash["largest"] if "softmax" in tensor["saved_by"]]
    (widest,) = {tensor["bytes"] for tensor in flash["largest"][:4]}
    assert widest == 2 * 64 * 192 * 2


def test_saved_tensors_sum_to_what_the_segments_of_the_model_keep():
    model = capture(find_model("tiny-moe"), micro_batch=1, seq_len=64, dtype="bf16")
    found = largest_saved(model, limit=10_000)
    inside = sum(tensor["total_bytes"] for tensor in found["largest"] if tensor["border"] is None)
    assert inside == sum(segment.saved_bytes for segment in model.segments)
    assert found["n_tensors"] == sum(tensor["count"] for tensor in found["largest"])
    kinds = Counter(tensor["segment"] for tensor in found["largest"])
    assert kinds["layers.{i}.block_sparse_moe.experts"] == 6
