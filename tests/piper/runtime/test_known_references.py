"""A reference is computed once for all runs that it belongs to, and for no other."""

from __future__ import annotations

import pytest
import torch

from piper.runtime.init import batch_of_step
from piper.runtime.known import KnownReferences, References
from piper.runtime.launch import _settings
from piper.runtime.settings import RunSettings
from simulator.plan import Plan
from tests.piper.runtime.jobs import plan_of, program_for
from tests.piper.runtime.toy import toy


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As ranks do; a busy machine has no core for more."""
    torch.set_num_threads(1)


def settings(plan: Plan, **options: object) -> RunSettings:
    given = {"steps": 2, "seed": 0} | options
    return _settings(plan, given["steps"], given["seed"], True, None, 60.0, None)


def known(store: KnownReferences, text: str, *, seed: int = 0, **options: object) -> object:
    plan = plan_of(text, **options)
    return store.of(plan, toy(), program=program_for(plan), settings=settings(plan, seed=seed))


def test_layouts_that_add_alike_share_a_reference() -> None:
    store = KnownReferences()
    assert known(store, "dp=2") is known(store, "dp=2")
    assert known(store, "pp=2,dp=2") is known(store, "pp=2,dp=2,recompute=none")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("dp=4", {}),
        ("dp=2,micro_batch=2", {"micro_batch": 2}),
        ("dp=2", {"clip": 0.1}),
        ("dp=2", {"optimizer": "adamw"}),
        ("dp=2", {"seed": 1}),
        ("pp=2,dp=2", {}),
    ],
)
def test_whatever_changes_the_reference_computes_it_again(text: str, options: dict[str, object]) -> None:
    store = KnownReferences()
    assert known(store, "dp=2") is not known(store, text, **options)


def test_the_oldest_reference_is_dropped() -> None:
    store = KnownReferences(most=1)
    first = known(store, "dp=1")
    known(store, "dp=1", seed=1)
    assert known(store, "dp=1") is not first


def test_what_is_known_is_what_would_be_computed() -> None:
    plan = plan_of("dp=2", clip=0.1)
    program, given = program_for(plan), settings(plan)
    steps = KnownReferences().of(plan, toy(), program=program, settings=given)
    fresh = References(plan, toy(), program=program, settings=given)
    stored = References(plan, toy(), program=program, settings=given, known=steps)
    start = fresh.start()
    for number in range(2):
        batch = batch_of_step(plan, seed=0, step=number)
        pairs = [(r.whole_batch(number, batch, start), r.same_tree(number, batch)) for r in (fresh, stored)]
        assert pairs[0][0][0] == pairs[1][0][0]
        assert pairs[0][1].losses == pairs[1][1].losses
        for holder, tensor in pairs[0][1].parameters.items():
            assert torch.equal(tensor, pairs[1][1].parameters[holder])
        start = {name: tensor.clone() for (_, name), tensor in pairs[0][1].parameters.items()}


def test_a_run_that_went_elsewhere_is_compared_from_where_it_is() -> None:
    plan = plan_of("dp=2")
    program, given = program_for(plan), settings(plan)
    steps = KnownReferences().of(plan, toy(), program=program, settings=given)
    stored = References(plan, toy(), program=program, settings=given, known=steps)
    elsewhere = {name: tensor + 0.1 for name, tensor in steps[1].start.items()}
    batch = batch_of_step(plan, seed=0, step=1)
    assert stored.whole_batch(1, batch, elsewhere)[0] != steps[1].whole[0]
