"""What a strategy file means does not depend on the order of its directives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from simulator.plan import Plan
from simulator.plan.codec import plan_to_bytes
from tests.strategies import Draft, compile_drawn, drawn

PERMUTATIONS = 3


def without_lines(plan: Plan) -> bytes:
    """Return the file of a plan, without the lines of its directives."""
    return plan_to_bytes(replace(plan, directive_places=()))


def permuted(draft: Draft, choose: random.Random) -> Draft:
    """Return the strategy with its directives in another order; no stage is placed twice in it."""
    listed = list(draft.directives)
    choose.shuffle(listed)
    return replace(draft, directives=listed)


def check(seed: int) -> None:
    draft, choose = drawn(seed), random.Random(seed)
    stated = without_lines(compile_drawn(draft, verified=False))
    for _ in range(PERMUTATIONS):
        other = permuted(draft, choose)
        assert without_lines(compile_drawn(other, verified=False)) == stated, str(other)


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_the_directives_gives_the_same_plan(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30, 330))
def test_any_order_of_the_directives_of_many_strategies_gives_the_same_plan(seed: int) -> None:
    check(seed)


def test_the_later_of_two_places_of_a_stage_counts() -> None:
    """The one override that the published system defines: here the order in the file has a meaning."""
    homes = [{"op": "place", "filter": {"PP": stage}, "at": {"pp": home}} for stage, home in ((0, 0), (1, 1))]
    again = {"op": "place", "filter": {"PP": 1}, "at": {"pp": 0}}
    third = {"op": "place", "filter": {"PP": 2}, "at": {"pp": 1}}
    mesh = {"op": "mesh", "axes": {"pp": 2}}

    def stages(*directives: dict[str, object]) -> list[tuple[int, ...]]:
        draft = Draft(choose=random.Random(0), directives=list(directives), global_batch=4)
        return [device.stages for device in compile_drawn(draft).device_plans]

    assert stages(mesh, *homes, third, again) == [(0, 1), (2,)]
    assert stages(mesh, again, *homes, third) == [(0,), (1, 2)]


def test_a_device_list_that_a_later_one_overrides_adds_no_pipeline_rank() -> None:
    listed = [
        {"op": "place", "filter": {"PP": stage}, "devices": [home]}
        for stage, home in ((0, 0), (1, 1), (2, 2), (1, 0))
    ]
    draft = Draft(choose=random.Random(0), directives=listed, global_batch=4)
    assert [device.stages for device in compile_drawn(draft).device_plans] == [(0, 1), (2,)]
