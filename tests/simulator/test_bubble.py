"""Unit costs, free communication: the textbook bubble (p - 1) / (m + p - 1), compared as whole numbers."""

from __future__ import annotations

import pytest

from simulator import simulate
from simulator.timeline.attribution import Label, attribute
from tests.plans import Costs, FakeCostModel, gpipe_rows, one_f_one_b_rows, pipeline_plan

GRID = [(p, m) for p in (2, 4, 8) for m in range(p, 4 * p + 1)]


@pytest.mark.parametrize("rows", [gpipe_rows, one_f_one_b_rows])
def test_bubbles_are_exactly_those_of_the_textbook(rows):
    for p, m in GRID:
        eager_limit_bytes = 0 if m % 2 else 1 << 30
        plan = pipeline_plan(rows(p, m), costs=Costs(forward_ns=3, backward_ns=6))
        model = FakeCostModel(eager_limit_bytes=eager_limit_bytes)
        timeline = simulate(plan, model, steps=1)
        bubble = attribute(plan, timeline).label_ns[:, Label.BUBBLE]
        assert timeline.makespan_ns == (m + p - 1) * 9
        assert all(int(ns) * (m + p - 1) == timeline.makespan_ns * (p - 1) for ns in bubble)


@pytest.mark.parametrize("rows", [gpipe_rows, one_f_one_b_rows])
def test_the_steady_state_period_has_the_same_bubble_as_one_step(rows):
    plan = pipeline_plan(rows(4, 8))
    assert (
        simulate(plan, FakeCostModel()).step_time_ns == simulate(plan, FakeCostModel(), steps=1).makespan_ns
    )


def test_1f1b_keeps_at_most_as_many_activations_as_ranks_remain_and_gpipe_keeps_all():
    costs = Costs(activation_bytes=10, parameter_bytes=0)
    for rows, held in ((one_f_one_b_rows, [4, 3, 2, 1]), (gpipe_rows, [8, 8, 8, 8])):
        timeline = simulate(pipeline_plan(rows(4, 8), costs=costs), FakeCostModel(), steps=1)
        assert [int(track.memory_bytes.sum(axis=1).max()) // 10 for track in timeline.tracks] == held
