"""Laws of jitter: what is slower never helps, a straggler delays all, the guilty are found, seeds decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.errors import InputError
from simulator import build_workload
from simulator.jitter import Sampling, parse_jitter, section_of, study, timeline_of
from simulator.jitter.outcome import ranks_text
from simulator.plan import Plan
from simulator.timeline.attribution import Label, attribute
from tests.jitters import disturbance_of, step_ns
from tests.plans import Costs, FakeCostModel, PlanBuilder, one_f_one_b_rows, pipeline_plan
from tests.random_plans import PRICES, plans

PRICE = FakeCostModel(transfer_ns=lambda *_: 30, collective_ns=lambda *_: 50)


def pipeline(*, replicas: int = 4) -> Plan:
    costs = Costs(forward_ns=1000, backward_ns=2000, update_ns=100)
    return pipeline_plan(one_f_one_b_rows(2, 6), costs=costs, replicas=replicas, clip=True)


def studied(plan: Plan, spec: str, *, gpus_per_node: int = 2, **sampling):
    workload = build_workload(plan, PRICE)
    clauses = parse_jitter(spec)
    return study(plan, workload, clauses, gpus_per_node=gpus_per_node, sampling=Sampling(**sampling))


@settings(max_examples=60, deadline=None)
@given(plan=plans(), prices=PRICES, factor=st.floats(1, 4), rank=st.integers(0, 11), seed=st.integers(0, 99))
def test_what_is_slower_never_makes_a_step_shorter(plan, prices, factor, rank, seed) -> None:
    rank %= plan.num_ranks
    noise = "noise:sigma=0.2,per=rank"
    before = step_ns(plan, prices, noise, seed=seed, steps=2)
    after = step_ns(plan, prices, f"{noise};straggler:rank={rank},factor={factor:g}", seed=seed, steps=2)
    assert all(b <= a for b, a in zip(before, after, strict=True))
    link = step_ns(plan, prices, f"{noise};link:rank={rank},factor={1 / factor:g}", seed=seed, steps=2)
    assert all(b <= a for b, a in zip(before, link, strict=True))


@pytest.mark.parametrize("rank", [0, 3])
def test_a_straggler_delays_all_replicas_by_what_its_compute_takes_longer(rank: int) -> None:
    builder = PlanBuilder(replicas=4)
    device = builder.devices[0]
    group, bucket = builder.group("dp", "dp", [0]), device.bucket("d")
    for number in range(5):
        device.compute(f"f{number}", 1000, microbatch=number)
    device.task("reduce", 9, "dp", group=group, bucket=bucket, waits=["f4"])
    device.compute("update", 0, 14, waits=["reduce"])
    plan = builder.build()
    assert step_ns(plan, PRICE, "") == [5050]
    assert step_ns(plan, PRICE, f"straggler:rank={rank},factor=1.3") == [6550]
    found = studied(plan, f"straggler:rank={rank},factor=1.3", steps=1)
    labels = attribute(plan, timeline_of(plan, build_workload(plan, PRICE), found))
    by_rank = dict(zip([[0, 3] if rank == 0 else [0, 1]][0], labels.label_ns.tolist(), strict=False))
    assert sorted(row[Label.STRAGGLER] for row in by_rank.values()) == [0, 1500]


def test_the_straggler_is_found_and_healing_it_saves_what_it_costs() -> None:
    plan = pipeline()
    found = studied(plan, "straggler:rank=5,factor=1.5;noise:sigma=0.02", runs=4, seed=3)
    worst = found.blames[0]
    assert worst.ranks == (5,)
    assert worst.pipeline_rank == 1
    assert worst.node == 2
    assert worst.excess_ns > 0
    cost = found.cost_ns[0]
    assert worst.saved_ns == pytest.approx(cost, rel=0.05)
    assert cost > 0.3 * found.undisturbed_ns
    assert max(blame.saved_ns or 0 for blame in found.blames[1:]) < 0.1 * cost


def test_who_is_late_for_the_sake_of_others_saves_nothing_when_healed() -> None:
    plan = pipeline()
    found = studied(plan, "straggler:rank=5,factor=2")
    saved = {blame.ranks: blame.saved_ns for blame in found.blames[:3]}
    assert saved.pop((5,)) == pytest.approx(found.step_ns.mean() - found.undisturbed_ns)
    assert set(saved.values()) == {0.0}


def test_quantiles_are_ordered_and_the_mean_is_between_the_extremes() -> None:
    section = section_of(studied(pipeline(), "noise:sigma=0.2", runs=6, seed=1))
    times = section["step_time_s"]
    assert list(times) == ["mean", "min", "p5", "p50", "p95", "p99", "max"]
    ordered = [times[name] for name in ("min", "p5", "p50", "p95", "p99", "max")]
    assert ordered == sorted(ordered)
    assert times["min"] < times["mean"] < times["max"]
    assert section["slowdown"] == times["mean"] / section["undisturbed_step_time_s"]
    assert np.shape(section["step_times_s"]) == (6, 3)


def test_the_seed_decides_and_the_engine_does_not() -> None:
    plan = pipeline()
    spec = "noise:sigma=0.2,on=all;hiccup:probability=0.05,ms=0.001;straggler:rank=1,factor=1.2"
    sections = [
        section_of(studied(plan, spec, runs=2, seed=seed, engine=engine))
        for seed, engine in ((7, "auto"), (7, "fast"), (7, "reference"), (8, "auto"))
    ]
    assert sections[0] == sections[1] == sections[2]
    assert sections[0]["step_times_s"][1] == sections[3]["step_times_s"][0]
    assert sections[0]["step_times_s"][0] != sections[3]["step_times_s"][0]


def test_one_run_is_enough_where_nothing_is_drawn() -> None:
    found = studied(pipeline(), "straggler:rank=1,factor=1.2", runs=9)
    assert found.step_ns.shape[0] == found.sampling.runs == 1
    assert found.notices == ("one run was simulated: nothing is drawn, all runs are the same",)
    assert studied(pipeline(), "straggler:rank=1,factor=1.2").notices == ()


def test_all_tracks_of_a_small_job_are_shown_and_stand_for_all_ranks() -> None:
    plan = pipeline()
    workload = build_workload(plan, PRICE)
    found = studied(plan, "straggler:rank=5,factor=2")
    timeline = timeline_of(plan, workload, found)
    assert [track.rank for track in timeline.tracks] == [0, 1, 4, 5]
    assert [track.n_devices for track in timeline.tracks] == [3, 1, 3, 1]
    assert timeline.step_time_ns == found.step_ns[0, -1]
    assert attribute(plan, timeline).mean_s(Label.STRAGGLER) > 0


def test_of_many_units_the_guilty_the_named_and_a_typical_one_of_each_pipeline_rank_are_shown() -> None:
    plan = pipeline(replicas=40)
    found = studied(plan, "noise:sigma=0.05;straggler:rank=45,factor=1.5", runs=1)
    timeline = timeline_of(plan, build_workload(plan, PRICE), found)
    assert 45 in [track.rank for track in timeline.tracks]
    assert {track.pipeline_rank for track in timeline.tracks} == {0, 1}
    assert len(timeline.tracks) <= 10
    assert sum(track.n_devices for track in timeline.tracks) == 80
    assert any("ranks that stand for all 80" in text for text in timeline.warnings)


def test_a_job_that_lasts_longer_than_a_simulation_can_hold_is_refused() -> None:
    plan = pipeline()
    work = build_workload(plan, PRICE)
    long = replace(work, duration_ns=work.duration_ns * 10**10)
    with pytest.raises(InputError, match=r"--jitter: total time = .* must be at most 2\^62"):
        study(
            plan, long, parse_jitter("straggler:rank=0,factor=1e6"), gpus_per_node=2, sampling=Sampling(),
        )  # fmt: skip


def test_progress_tells_what_is_being_run() -> None:
    plan, said = pipeline(), []
    study(
        plan, build_workload(plan, PRICE), parse_jitter("noise:sigma=0.1;straggler:rank=1,factor=3"),
        gpus_per_node=2, sampling=Sampling(runs=2), report=said.append,
    )  # fmt: skip
    assert said[:3] == ["without jitter", "run 1 of 2", "run 2 of 2"]
    assert "with rank 1 healthy" in said
    assert said[-1] == "the run that is shown"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((17,), "17"), ((16, 17, 18), "16-18"), ((0, 2, 3, 9), "0,2-3,9"), ((1, 3, 5, 7), "1,3,5,...")],
)
def test_ranks_are_written_in_short(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_text(ranks) == text


def test_a_disturbance_without_clauses_is_healthy() -> None:
    assert disturbance_of("", pipeline()).is_healthy.all()
