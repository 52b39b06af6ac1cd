"""The space: counts add up, its rules are those of the schedules, and every point says something else."""

from __future__ import annotations

import numpy as np
import pytest

from piper.errors import StrategyError
from piper.schedules import SCHEDULES, unchecked_rows
from piper.search.choices import choices_of
from piper.search.schedule_rules import RULES
from piper.search.space import JobLimits, ModelLimits, Space, enumerate_space

MODEL = ModelLimits(num_units=18, num_layers=16, heads=(8,), cuts_tensors=True, cuts_sequences=True)


def space_of(gpus: int, **pin: str) -> Space:
    choices = choices_of(gpus=(gpus,), num_units=18, cuts_tensors=True, cuts_sequences=True, pin=pin)
    return enumerate_space(choices, MODEL, JobLimits(global_batch=24, seq_len=64, gpus_per_node=8))


@pytest.mark.parametrize("gpus", [1, 4, 6, 24, 96])
def test_every_raw_point_is_legal_or_illegal_or_a_duplicate(gpus: int) -> None:
    space = space_of(gpus)
    assert space.size == space.num_candidates + sum(space.illegal.values()) + space.duplicates


def test_points_are_distinct_and_use_all_gpus() -> None:
    points = list(space_of(4, recompute="none"))
    assert len(points) == len(set(points)) == space_of(4, recompute="none").num_candidates
    assert {p.tp * p.cp * p.pp * p.dp for p in points} == {4}


def test_odd_sizes_are_searched() -> None:
    degrees = {(p.tp, p.pp, p.dp) for p in space_of(6, offload="none", recompute="none")}
    assert (2, 3, 1) in degrees
    assert (1, 3, 2) in degrees


def test_one_pipeline_rank_has_one_order_and_one_replica_nothing_to_cut() -> None:
    for point in space_of(4, recompute="none", offload="none"):
        assert point.pp > 1 or (point.schedule, point.vp) == ("1f1b", 1)
        assert point.dp * point.cp > 1 or (point.zero, point.bucket_mb) == (0, 0)
        assert point.tp > 1 or (point.sp, point.async_tp) == ("on", "off")


def test_a_pinned_value_is_kept() -> None:
    assert {point.zero for point in space_of(1, zero="1")} == {1}


def test_millions_of_points_are_counted_without_making_them() -> None:
    assert space_of(16384).size > 10**8


@pytest.mark.parametrize("name", [name for name in SCHEDULES if not name.startswith("synthesized")])
def test_the_rules_of_schedules_are_those_of_their_rows(name: str) -> None:
    rule = RULES[name]
    for ranks, number, stages in (
        (p, m, v) for p in (1, 2, 3, 4) for m in (1, 4, 5, 8, 9) for v in (1, 2, 3)
    ):
        if rule.stages == "several" and stages == 1:
            continue  # the same as a schedule for one stage
        taken = rule.takes(np.array([ranks]), np.array([number])) & rule.takes_stages(np.array([stages]))
        try:
            unchecked_rows(
                name, num_pipeline_ranks=ranks, num_microbatches=number, virtual_stages_per_rank=stages
            )
        except StrategyError:
            assert not taken[0], (ranks, number, stages)
        else:
            assert taken[0], (ranks, number, stages)
