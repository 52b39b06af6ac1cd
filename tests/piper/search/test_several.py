"""Searches over several numbers of GPUs: the fewest, the fastest, the cheapest, one front."""

from __future__ import annotations

from typing import Any

import pytest

from piper.errors import JobError
from piper.search import SearchRequest, SearchResult, search_strategies
from piper.search.candidate import Candidate
from piper.search.evaluate import Evaluator
from piper.search.several import search_several
from tests.piper.search.test_search import FEW, TINY

JOB = {name: value for name, value in TINY.items() if name != "gpus"} | {"values": FEW, "top": 2}


def searched(**changes: Any) -> dict[str, Any]:
    return search_strategies(SearchRequest(**JOB | changes)).to_json()


@pytest.fixture(scope="module")
def two_and_four() -> dict[str, Any]:
    return searched(gpu_counts=(4, 2))


def test_several_numbers_of_gpus_are_one_search_whose_counts_add_up(two_and_four: dict[str, Any]) -> None:
    alone = [searched(gpus=gpus) for gpus in (2, 4)]
    found = two_and_four
    assert found["space_size"] == sum(each["space_size"] for each in alone)
    assert sum(found["pruned"].values()) + found["simulated"] == found["space_size"]
    assert found["best"] == min((each["best"] for each in alone), key=lambda best: best["step_time_s"])
    assert [row["gpus"] for row in found["gpus"]] == [2, 4]
    assert [row["step_time_s"] for row in found["gpus"]] == [each["best"]["step_time_s"] for each in alone]
    assert found["lower_bound_s"] == min(each["lower_bound_s"] for each in alone)


def test_the_front_is_over_time_memory_and_gpus(two_and_four: dict[str, Any]) -> None:
    front = [(e["step_time_s"], e["peak_memory_bytes"], e["n_gpus"]) for e in two_and_four["pareto"]]
    for one in front:
        assert not any(
            other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in front
        )
    assert {gpus for _, _, gpus in front} == {2, 4}


def test_the_cheapest_number_of_gpus_has_the_fewest_gpu_seconds(two_and_four: dict[str, Any]) -> None:
    found = searched(gpu_counts=(2, 4), objective="cost")
    costs = {row["gpus"]: row["gpus"] * row["step_time_s"] for row in two_and_four["gpus"]}
    assert found["best"]["n_gpus"] == min(costs, key=lambda gpus: costs[gpus])
    assert found["lower_bound_gpu_s"] <= min(costs.values())
    assert found["gap"] == pytest.approx(1 - found["lower_bound_gpu_s"] / min(costs.values()))


def test_a_target_leaves_out_numbers_that_are_too_slow(two_and_four: dict[str, Any]) -> None:
    slow, fast = (row["step_time_s"] for row in two_and_four["gpus"])
    found = searched(gpu_counts=(2, 4), objective="cost", target_step_time_s=(slow + fast) / 2)
    assert found["best"]["n_gpus"] == 4
    assert [row["outcome"] for row in found["gpus"]] == ["slower than the target", "chosen"]
    assert found["target"]["met"]
    never = searched(gpu_counts=(2, 4), target_step_time_s=fast / 1000)
    assert never["target"] == {"step_time_s": fast / 1000, "met": False, "impossible": True}


def test_the_fewest_gpus_of_a_small_model_are_one() -> None:
    found = searched(min_gpus=True)
    assert found["best"]["n_gpus"] == 1
    assert [(row["gpus"], row["outcome"]) for row in found["gpus"]] == [(1, "chosen")]


@pytest.mark.parametrize(
    ("request_", "needed", "tried", "chosen"),
    [
        ({}, 1, [1], 1),
        ({}, 5, [1, 2, 4, 8], 8),
        ({}, 72, [1, 2, 4, 8, 16, 24, 32, 48, 64, 72, 80, 96], 72),
        ({"gpus": 32}, 72, [1, 2, 4, 8, 16, 24, 32], None),
        ({"gpu_counts": (64, 24, 40)}, 30, [24, 40], 40),
    ],
)
def test_numbers_are_tried_rising_and_then_between(
    request_: dict[str, Any], needed: int, tried: list[int], chosen: int | None
) -> None:
    """A search that needs so many GPUs for its target, and on one of them fits nothing."""

    def search(asked: SearchRequest) -> SearchResult:
        gpus = asked.gpus or 0
        best: dict[str, Any] | None = None
        if gpus > 1 or needed == 1:
            best = {"n_gpus": gpus, "step_time_s": needed / gpus, "peak_memory_bytes": 1}
            best["strategy"] = {"shorthand": f"dp={gpus}"}
        summary = {
            "schema_version": 1, "objective": "time", "space_size": 1, "evaluated": 1, "simulated": 1,
            "pruned": {"illegal": 0}, "ended_by": "bound", "lower_bound_s": needed / gpus, "best": best,
            "ranking": [], "pareto": [], "pareto_complete": True, "pareto_open": 0, "heatmap": [],
            "rejected": [], "timings_s": {"first_answer": None},
        }  # fmt: skip
        return SearchResult(summary=summary)

    request = SearchRequest(
        model="tiny-llama", global_batch=8, min_gpus=True, target_step_time_s=1.0, **request_
    )
    found = search_several(request, search, node=8, most_nodes=1000).to_json()
    assert [row["gpus"] for row in found["gpus"]] == tried
    assert (found["best"] and found["best"]["n_gpus"]) == chosen


def test_a_number_without_a_legal_strategy_is_named_and_the_others_answer() -> None:
    found = searched(gpu_counts=(3, 4), pin={"pp": "4"}, top=1)
    assert [(row["gpus"], row["outcome"]) for row in found["gpus"]] == [
        (3, "no legal strategy"), (4, "chosen"),
    ]  # fmt: skip
    assert "--pin pp=4" in found["gpus"][0]["reason"]
    with pytest.raises(JobError, match="--pin pp=4 on 3 GPUs"):
        searched(gpu_counts=(3, 5), pin={"pp": "4"})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"global_batch": None, "min_gpus": True}, "--global-batch"),
        ({"gpus": 2, "gpu_counts": (2, 4)}, "gpus"),
        ({"gpu_counts": (0, 4)}, "gpus"),
        ({"target_step_time_s": -1.0}, "target_step_time"),
        ({"target_step_time_s": 1.0, "objective": "memory"}, "objective"),
    ],
)
def test_a_bad_request_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(JobError) as caught:
        searched(**changes)
    assert caught.value.field == field


def test_several_searches_resume_from_one_file(tmp_path: Any) -> None:
    db = str(tmp_path / "search.sqlite")
    first = searched(gpu_counts=(2,), db=db)
    both = searched(gpu_counts=(2, 4), db=db, resume=True)
    assert both["gpus"][0]["step_time_s"] == first["gpus"][0]["step_time_s"]
    again = searched(gpu_counts=(2, 4), db=db, resume=True)
    assert {k: v for k, v in again.items() if k != "timings_s"} == {
        k: v for k, v in both.items() if k != "timings_s"
    }


def test_an_interrupt_ends_the_searches_at_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Evaluator.simulate, []

    def interrupted(self: Evaluator, candidate: Candidate) -> dict[str, Any]:
        calls.append(candidate)
        if candidate.gpus == 4:
            raise KeyboardInterrupt
        return original(self, candidate)

    monkeypatch.setattr(Evaluator, "simulate", interrupted)
    result = search_strategies(SearchRequest(**JOB, gpu_counts=(2, 4, 8)))
    assert result.interrupted
    assert result.summary["ended_by"] == "interrupted"
    assert [row["gpus"] for row in result.summary["gpus"]] == [2, 4]
    assert result.summary["best"]["n_gpus"] == 2
