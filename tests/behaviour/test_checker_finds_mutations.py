"""Random legal plans pass the checker; random defects of them are found (>= 99 %)."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest

from piper.compiler.compile import emit_plan
from simulator.plan import Plan
from simulator.plan.check import check_plan
from tests.facts import CASES, graph_of
from tests.graphs import after
from tests.mutations.mutant import Mutant
from tests.mutations.table import MUTATIONS
from tests.plan_edits import Order, cross_step_needs, needs, ordered_across_steps, tasks_of
from tests.strategies import compile_drawn, drawn

TRIES = 60
"""Plans that are looked at for one that has a place for a mutation."""

NUM_DRAWN = 400


@lru_cache(maxsize=512)
def legal_plan(number: int) -> Plan:
    """Return the plan of a random strategy, or of a combination of facts that no strategy here draws."""
    if number < NUM_DRAWN or number >= NUM_DRAWN + len(CASES):
        return compile_drawn(drawn(number), verified=False)
    return emit_plan(after(graph_of(said(number)), "check_order"), [], strategy="facts")


def said(number: int) -> str:
    """Return what the plan of a number is made from, for messages."""
    if number < NUM_DRAWN or number >= NUM_DRAWN + len(CASES):
        return f"seed {number} ({', '.join(drawn(number).features)})"
    return list(CASES)[number - NUM_DRAWN]


def mutant(kind: str, number: int) -> tuple[int, Mutant]:
    """Return the number of a plan and one of its mutants, always the same for a kind and number.

    Every third plan is one of `CASES`: these have what strategies may not combine at random yet.
    """
    choose = random.Random(f"{kind} {number}")
    for _ in range(TRIES):
        plan = choose.randrange(NUM_DRAWN)
        if choose.random() < 1 / 3:
            plan = NUM_DRAWN + choose.randrange(len(CASES))
        found = MUTATIONS[kind](legal_plan(plan), choose)
        if found is not None:
            return plan, found
    raise AssertionError(f"none of {TRIES} plans has a place for: {kind}")


def missed(count: int) -> list[str]:
    """Return the defects that the checker does not see, of `count` over all kinds."""
    kinds = [list(MUTATIONS)[number % len(MUTATIONS)] for number in range(count)]
    mutants = [(kind, *mutant(kind, number)) for number, kind in enumerate(kinds)]
    return [
        f"{kind}, {said(plan)}: {found.what}" for kind, plan, found in mutants if not check_plan(found.plan)
    ]


def flagged(seeds: range) -> list[str]:
    """Return what the checker finds in legal plans."""
    return [f"{said(seed)}: {violation}" for seed in seeds for violation in check_plan(legal_plan(seed))]


def test_one_hundred_legal_plans_have_no_violation() -> None:
    assert flagged(range(100)) == []


def test_of_one_hundred_defects_at_most_one_is_missed() -> None:
    found = missed(100)
    assert len(found) <= 1, "\n".join(found)


def test_legal_plans_keep_every_order_that_the_mutations_break() -> None:
    """Else a mutant could be a legal plan: what `needs` lists holds before anything is broken."""
    for seed in (*range(60), *range(NUM_DRAWN, NUM_DRAWN + len(CASES))):
        plan = legal_plan(seed)
        for device in plan.device_plans:
            tasks = tasks_of(device)
            order = Order(tasks)
            assert [pair for pair in needs(plan, device) if not order.has(*pair)] == [], said(seed)
            lost = [p for p in cross_step_needs(plan, device) if not ordered_across_steps(tasks, order, p)]
            assert lost == [], said(seed)


@pytest.mark.parametrize("kind", ["replicas apart", "experts apart"])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("ep")])
def test_groups_of_experts_that_fall_apart_are_always_found(name: str, kind: str) -> None:
    plan = legal_plan(NUM_DRAWN + list(CASES).index(name))
    for seed in range(4):
        broken = MUTATIONS[kind](plan, random.Random(seed))
        assert broken is not None
        assert check_plan(broken.plan), broken.what


def test_ranks_that_cut_a_tensor_or_sum_the_norm_in_halves_are_always_found() -> None:
    halved = 0
    for number in range(60):
        broken = MUTATIONS["ranks apart"](legal_plan(number), random.Random(number))
        if broken is not None:
            halved += 1
            assert check_plan(broken.plan), broken.what
    assert halved


@pytest.mark.slow
def test_one_thousand_legal_plans_have_no_violation() -> None:
    assert flagged(range(1000)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_one_thousand_defects_at_least_99_percent_are_found() -> None:
    found = missed(1000)
    assert len(found) <= 10, "\n".join(found)


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_kind_of_defect_is_found_where_it_has_a_place(kind: str) -> None:
    _, found = mutant(kind, 0)
    assert check_plan(found.plan), found.what
