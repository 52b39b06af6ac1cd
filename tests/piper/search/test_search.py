"""The search against exhaustive simulation, its counts, its reasons and its refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import cost_models
from piper.errors import JobError
from piper.predict import Job
from piper.search import SearchRequest, search_strategies
from piper.search.candidate import Candidate
from piper.search.evaluate import Evaluator
from piper.search.status import Status
from piper.strategy import load_strategy
from tests.piper.search.samples import Sample

TINY = {"model": "tiny-llama", "cluster": "dgx-h100", "gpus": 4, "global_batch": 8}


PLAIN = {
    "sp": ("on",),
    "async_tp": ("off",),
    "offload": ("none",),
    "bucket_mb": (0,),
    "prefetch": (0,),
    "cp": (1,),
    "zero": (0, 1),
    "schedule": ("1f1b", "gpipe", "zb_h1"),
    "recompute": ("none", "full"),
    "micro_batch": (1, 2),
}
"""Values of a space that can be simulated as a whole."""
FEW = PLAIN | {"zero": (0, 1), "schedule": ("1f1b",), "recompute": ("none",), "micro_batch": (1,), "vp": (1,)}
"""Values of a space that is searched in no time."""


def searched(**changes: Any) -> dict[str, Any]:
    return search_strategies(SearchRequest(**(TINY | {"values": PLAIN} | changes))).to_json()


def without_timings(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "timings_s"}


@pytest.fixture(scope="module")
def everything() -> dict[Candidate, dict[str, Any]]:
    sample = Sample.of(Job(**TINY), **PLAIN)
    return {candidate: sample.evaluator.simulate(candidate) for candidate in sample.space}


def test_exhaustive_simulation_finds_nothing_better(everything: dict[Candidate, dict[str, Any]]) -> None:
    found = searched(top=3)
    fastest = min(result["step_time_s"] for result in everything.values())
    assert found["best"]["step_time_s"] <= fastest * 1.001
    assert found["lower_bound_s"] <= fastest
    assert found["gap"] == pytest.approx(1 - found["lower_bound_s"] / found["best"]["step_time_s"])


def test_the_ranking_has_one_entry_for_each_layout() -> None:
    ranking = searched(top=5)["ranking"]
    layouts = [
        re.sub(r"(zero|hsdp|offload|bucket_mb|prefetch)=\w+,?", "", e["strategy"]["shorthand"])
        for e in ranking
    ]
    assert len(set(layouts)) == len(layouts) == 5


def test_counts_add_up_to_the_space() -> None:
    found = searched(top=2)
    assert sum(found["pruned"].values()) + found["simulated"] == found["space_size"]
    others = found["space_size"] - found["pruned"]["duplicate"] - 1
    assert sum(row["count"] for row in found["rejected"]) == others
    assert found["ended_by"] in {"bound", "estimate"}


def test_families_are_listed_by_their_degrees() -> None:
    families = list(dict.fromkeys(row["family"] for row in searched(top=2)["rejected"]))
    degrees = [int(family.split(",")[0].removeprefix("pp=")) for family in families]
    assert degrees == sorted(degrees)
    assert len(set(degrees)) > 2


def test_the_answer_does_not_depend_on_the_number_of_processes() -> None:
    assert without_timings(searched(jobs=2, top=2)) == without_timings(searched(jobs=1, top=2))


def test_what_does_not_fit_is_rejected_with_its_bytes() -> None:
    found = search_strategies(
        SearchRequest(
            model="llama3-8b", cluster="h100-8gpu", gpus=8, global_batch=8, seq_len=512, top=1,
            pin={"pp": "1", "tp": "1", "cp": "1", "micro_batch": "1", "offload": "none"},
            why_not={"zero": "0"},
        )
    ).to_json()  # fmt: skip
    assert found["best"] is None or found["best"]["fits"]
    assert found["why_not"]["status"] == str(Status.MEMORY_BOUND)
    assert "GiB more than a device has" in found["why_not"]["reason"]


def test_memory_can_be_the_objective(everything: dict[Candidate, dict[str, Any]]) -> None:
    found = searched(objective="memory", top=1)
    least = min(r["peak_memory_bytes"] for r in everything.values())
    assert found["best"]["peak_memory_bytes"] == least
    assert 0 < found["lower_bound_bytes"] <= least
    assert found["gap"] == pytest.approx(1 - found["lower_bound_bytes"] / least)


def test_the_pareto_front_holds_no_dominated_strategy() -> None:
    front = searched(top=6)["pareto"]
    times = [entry["step_time_s"] for entry in front]
    memory = [entry["peak_memory_bytes"] for entry in front]
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)
    assert len(set(memory)) == len(memory)


def test_the_pareto_front_says_that_it_is_of_simulated_strategies() -> None:
    assert "that were simulated" in searched(top=1)["pareto_basis"]


def test_pin_and_forbid_narrow_the_space() -> None:
    found = searched(pin={"pp": "2"}, forbid=(("schedule", "gpipe"),), top=6)
    assert all("pp=2," in entry["strategy"]["shorthand"] for entry in found["ranking"])
    assert "gpipe" not in {entry["schedule"] for entry in found["ranking"]}


def test_why_not_names_the_seconds_by_cause() -> None:
    answer = searched(top=6, why_not={"pp": "4"})["why_not"]
    assert answer["status"] == str(Status.RANKED)
    assert answer["slower_by_s"] == pytest.approx(sum(answer["by_cause_s"].values()))


@pytest.mark.parametrize(
    ("changes", "wanted", "reason"),
    [
        ({}, {"tp": "3"}, "no legal strategy has tp=3 on 4 GPUs"),
        ({}, {"tp": "2", "dp": "4"}, "no legal strategy has tp=2 and dp=4 on 4 GPUs"),
        ({"pin": {"pp": "2"}}, {"pp": "4"}, "--pin pp=2 leaves it out"),
        ({"forbid": (("pp", "4"),)}, {"pp": "4", "zero": "0"}, "--forbid pp=4 leaves it out"),
        ({}, {"offload": "params"}, "values offload=none leaves it out"),
        (
            {"micro_batch": 1, "values": PLAIN | {"micro_batch": (1, 2)}},
            {"micro_batch": "2"},
            "--micro-batch",
        ),
        ({"pin": {"pp": "4"}}, {"zero": "1"}, "it says the same as a strategy without them"),
    ],
)
def test_why_not_names_the_rule_or_the_constraint(
    changes: dict[str, Any], wanted: dict[str, str], reason: str
) -> None:
    answer = searched(**{"values": FEW, "top": 1, "why_not": wanted} | changes)["why_not"]
    assert answer["status"] == "illegal"
    assert answer["reason"].startswith(reason)


def test_why_not_names_the_rank_and_the_moment_of_a_simulated_peak() -> None:
    pin = {"pp": "4", "schedule": "1f1b", "recompute": "none", "micro_batch": "1"}
    only = searched(pin=pin, top=1)["best"]
    left = only["device_memory_bytes"] - only["needed_memory_bytes"]
    found = searched(pin=pin, top=1, reserve_bytes=left + 1, why_not={"pp": "4"})
    assert found["best"] is None
    assert found["why_not"]["status"] == str(Status.OUT_OF_MEMORY)
    peak = only["peak"]
    assert f"on pipeline rank {peak['pipeline_rank']}, " in found["why_not"]["reason"]
    assert found["why_not"]["reason"].endswith("after the step began")
    assert sum(peak["memory_by_class_bytes"].values()) == only["peak_memory_bytes"]


def test_why_not_looks_for_a_strategy_that_fits(everything: dict[Candidate, dict[str, Any]]) -> None:
    """Each value is answered by a simulation, no faster than the fastest that has it."""
    for name, value in (("recompute", "full"), ("schedule", "gpipe"), ("tp", "4"), ("zero", "1")):
        answer = searched(top=1, why_not={name: value})["why_not"]
        assert answer["status"] == str(Status.RANKED)
        best = min(r["step_time_s"] for r in everything.values())
        least = min(r["step_time_s"] for c, r in everything.items() if str(getattr(c, name)) == value)
        assert answer["slower_by_s"] >= least - best - 1e-12


def test_a_cluster_of_one_node_is_searched_up_to_its_size() -> None:
    found = searched(cluster="h100-8gpu", gpus=8, pin={"tp": "8"}, top=1, values=FEW)
    assert found["best"]["strategy"]["shorthand"].startswith("tp=8,")
    assert found["lower_bound_s"] <= found["best"]["step_time_s"]


def test_limits_end_the_search_and_say_so() -> None:
    capped = searched(max_candidates=3, top=6)
    assert (capped["simulated"], capped["ended_by"]) == (3, "max_candidates")
    assert sum(capped["pruned"].values()) + 3 == capped["space_size"]


def test_a_time_limit_still_gives_an_answer_and_adds_up() -> None:
    found = searched(time_limit_s=1e-9)
    assert found["ended_by"] == "time_limit"
    assert found["best"] is not None
    assert 0 < found["lower_bound_s"] <= found["best"]["step_time_s"]
    assert sum(found["pruned"].values()) + found["simulated"] == found["space_size"]


def test_an_interrupt_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Evaluator.simulate, []

    def interrupted(self: Evaluator, candidate: Candidate) -> dict[str, Any]:
        calls.append(candidate)
        if len(calls) > 10:
            raise KeyboardInterrupt
        return original(self, candidate)

    monkeypatch.setattr(Evaluator, "simulate", interrupted)
    result = search_strategies(SearchRequest(**TINY, values=PLAIN, top=6))
    assert result.interrupted
    assert result.summary["simulated"] == 8
    assert result.summary["best"] is not None


def test_saved_strategies_load_and_name_their_files(tmp_path: Path) -> None:
    saved = search_strategies(SearchRequest(**TINY, values=PLAIN, top=2)).save(tmp_path).to_json()
    assert json.loads((tmp_path / "ranking.json").read_text())["best"] == saved["best"]
    (tmp_path / "strategy-99.json").write_text("[]")
    (tmp_path / "strategy-mine.json").write_text("[]")
    saved = search_strategies(SearchRequest(**TINY, values=PLAIN, top=2)).save(tmp_path).to_json()
    assert not (tmp_path / "strategy-99.json").exists(), "an entry of an earlier ranking is left"
    assert (tmp_path / "strategy-mine.json").exists()
    for entry in saved["ranking"]:
        strategy = load_strategy(entry["strategy_file"])
        assert f"pp={strategy.stated.pp}," in entry["strategy"]["shorthand"]


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"pin": {"ppp": "2"}}, "dimension", "did you mean 'pp'"),
        ({"forbid": (("zeros", "1"),)}, "dimension", "did you mean 'zero'"),
        ({"why_not": {"ppp": "2"}}, "dimension", "did you mean 'pp'"),
        ({"why_not": {"pp": "0"}}, "pp", "pp=2"),
        ({"pin": {"pp": "²"}}, "pp", "pp=2"),
        ({"pin": {"zero": "7"}}, "zero", "known: 0, 1, 2, 3"),
        ({"forbid": (("schedule", "gpip"),)}, "schedule", "did you mean 'gpipe'"),
        ({"micro_batch": 2, "pin": {"micro_batch": "4"}}, "micro_batch", "give it once"),
        ({"gpus": 10**12}, "gpus", "use fewer GPUs"),
        ({"top": 0}, "top", "such as 10"),
        ({"jobs": 0}, "jobs", "such as 2"),
        ({"objective": "speed"}, "objective", "time"),
        ({"objective": "memory", "front": 4}, "objective", "time"),
        ({"time_limit_s": float("nan")}, "time_limit", "seconds"),
        ({"max_candidates": -1}, "max_candidates", "such as"),
        ({"pin": {"pp": "3"}}, "space", "--gpus"),
        ({"cluster": "h100-8gpu", "gpus": 16}, "gpus", "at most 8"),
    ],
)
def test_a_bad_request_names_field_and_fix(changes: dict[str, Any], field: str, fix: str) -> None:
    with pytest.raises(JobError) as caught:
        searched(**changes)
    assert caught.value.field == field
    assert fix in caught.value.fix


def test_an_infeasible_request_names_the_smallest_set_of_constraints_that_conflict() -> None:
    pins = {"pp": "3", "dp": "2", "zero": "1", "recompute": "none"}
    with pytest.raises(JobError) as caught:
        searched(gpus=4, pin=pins, values={})
    assert str(caught.value.value) == "--pin pp=3 on 4 GPUs"
    with pytest.raises(JobError) as caught:
        searched(gpus=4, pin={"zero": "1", "tp": "2", "pp": "4"}, values={})
    assert "--pin tp=2 and --pin pp=4" in str(caught.value.fix)
    with pytest.raises(JobError) as caught:
        searched(gpus=4, pin={"zero": "1"}, values={"tp": (3, 5), "pp": (1, 2)})
    assert str(caught.value.value) == "values tp=3/5 on 4 GPUs"
    with pytest.raises(JobError) as caught:
        searched(gpus=4, micro_batch=16, pin={"zero": "1"})
    assert str(caught.value.value) == "--micro-batch micro_batch=16 on 4 GPUs"


def test_where_nothing_fits_the_constraints_that_forbid_it_are_named() -> None:
    found = searched(reserve_bytes=79 * 2**30, pin={"pp": "1"}, values=FEW, top=1)
    assert found["best"] is None
    assert found["conflict"]["reason"].startswith("nothing fits on 4 GPUs, whatever is allowed")
    job = {"model": "llama3-8b", "gpus": 8, "global_batch": 8, "seq_len": 512, "values": FEW | {"pp": (1,)}}
    found = searched(**job, pin={"tp": "1", "zero": "0", "sp": "on"}, top=1)
    assert found["best"] is None
    needed = "--pin tp=1 and --pin zero=0 and values offload=none and values pp=1"
    assert found["conflict"]["constraints"] == needed


def test_where_ranks_share_a_core_the_search_knows(tmp_path: Path) -> None:
    """On one core the work of all ranks adds up: a pipeline that computes little elsewhere wins nothing."""
    text = (Path(cost_models.__file__).parent / "clusters" / "local_cpu.yaml").read_text()
    cluster = tmp_path / "one-core.yaml"
    cluster.write_text(text.replace("cores: 4", "cores: 1"))
    job = Job(**TINY | {"cluster": str(cluster), "dtype": "fp32"})
    values = FEW | {"micro_batch": (1, 4, 8), "schedule": ("1f1b", "zb_h1")}
    sample = Sample.of(job, **values)
    times = {c: sample.evaluator.simulate(c)["step_time_s"] for c in sample.space}
    found = searched(cluster=str(cluster), dtype="fp32", values=values, top=1)
    assert found["simulated"] < len(times)
    assert found["best"]["step_time_s"] <= min(times.values()) * 1.001
    ratios = [
        sample.estimates(cell).step_ns[row] / 1e9 / times[c]
        for cell, row, c in sample.random_points(12, seed=1)
    ]
    assert max(ratios) < 1.75 * min(ratios)


def test_bytes_that_are_to_stay_free_are_not_used() -> None:
    sample = Sample.of(Job(**TINY), **PLAIN)
    result = sample.evaluator.simulate(next(iter(sample.space)))
    left = result["device_memory_bytes"] - result["needed_memory_bytes"]
    for reserve, fits in ((left, True), (left + 1, False)):
        evaluator = Evaluator(job=Job(**TINY), reserve_bytes=reserve)
        assert evaluator.simulate(next(iter(sample.space)))["fits"] is fits
        assert evaluator.capacity_bytes == sample.evaluator.capacity_bytes - reserve


def test_what_cannot_run_does_not_win_where_only_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plan: Any) -> None:
        if plan.schedule != "gpipe":
            raise JobError(where="run", field="schedule", value=plan.schedule, rule="is refused", fix="gpipe")

    monkeypatch.setattr("piper.runtime.runnable.require_runnable", refuse)
    found = searched(top=1, only_runnable=True, pin={"pp": "2"})
    assert found["best"]["schedule"] == "gpipe"


def test_what_of_the_whole_front_is_missing_is_counted_as_open(
    everything: dict[Candidate, dict[str, Any]],
) -> None:
    for objective in ("time", "memory"):
        found = searched(top=3, objective=objective)
        front = [(e["step_time_s"], e["peak_memory_bytes"]) for e in found["pareto"]]
        whole = {(r["step_time_s"], r["peak_memory_bytes"]) for r in everything.values()}
        missing = {w for w in whole if not any(f[0] <= w[0] and f[1] <= w[1] for f in front)}
        assert len(missing) <= found["pareto_open"]
        assert found["pareto_complete"] is (found["pareto_open"] == 0)


def test_along_the_front_what_the_fastest_leaves_out_is_simulated(
    everything: dict[Candidate, dict[str, Any]],
) -> None:
    """With a third of the space simulated, every strategy is within 2 % of one of the front."""
    alone, found = searched(top=3), searched(top=3, front=16)
    assert alone["simulated"] < found["simulated"] <= alone["simulated"] + 16
    assert sum(found["pruned"].values()) + found["simulated"] == found["space_size"]
    assert found["best"] == alone["best"]
    assert found["pareto_open"] < alone["pareto_open"]
    front = [(e["step_time_s"], e["peak_memory_bytes"]) for e in found["pareto"]]
    for result in everything.values():
        time_s, memory = result["step_time_s"], result["peak_memory_bytes"]
        assert min(max(t / time_s, m / memory) for t, m in front) < 1.02


def test_the_heat_map_has_the_best_or_a_bound_of_every_tp_and_pp(
    everything: dict[Candidate, dict[str, Any]],
) -> None:
    found = searched(top=3)
    tiles = {(tile["tp"], tile["pp"]): tile for tile in found["heatmap"]}
    assert set(tiles) == {(candidate.tp, candidate.pp) for candidate in everything}
    for (tp, pp), tile in tiles.items():
        least = min(r["step_time_s"] for c, r in everything.items() if (c.tp, c.pp) == (tp, pp))
        if tile["basis"] == "bound":
            assert tile["step_time_s"] <= least
        if tile["basis"] == "simulated":
            assert tile["step_time_s"] >= least
    assert (
        min(t["step_time_s"] for t in tiles.values() if t["basis"] == "simulated")
        == (found["best"]["step_time_s"])
    )
