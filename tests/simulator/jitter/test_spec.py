"""What is written after --jitter: every clause reads as it prints, every slip has one error that mends it."""

from __future__ import annotations

import pytest

from cost_models.errors import InputError
from simulator.jitter.disturbance import named_ranks, resolve
from simulator.jitter.spec import (
    KINDS,
    Hiccup,
    Link,
    Noise,
    On,
    Per,
    SlowNode,
    Span,
    Straggler,
    parse_jitter,
    written,
)
from tests.plans import one_f_one_b_rows, pipeline_plan


def test_each_kind_reads_its_example() -> None:
    assert parse_jitter([kind.example for kind in KINDS.values()]) == (
        Straggler(rank=Span(17, 17), factor=1.3),
        Noise(sigma=0.05, on=On.COMPUTE, per=Per.GROUP),
        Link(node=Span(3, 3), factor=0.5),
        SlowNode(node=Span(2, 2), factor=1.2),
        Hiccup(probability=0.001, ms=5.0),
    )


def test_clauses_are_separated_by_semicolons_or_given_one_by_one() -> None:
    joined = parse_jitter(" straggler: rank = 16-23 , factor=2 ; ; noise:sigma=1e-1,per=rank;")
    assert joined == parse_jitter(["straggler:rank=16-23,factor=2", "noise:sigma=0.1,per=rank"])


@pytest.mark.parametrize(
    "text",
    [
        "straggler:rank=17,factor=1.3",
        "straggler:rank=16-23,factor=0.1234567891",
        "noise:sigma=0.05",
        "noise:sigma=0.05,on=all,per=rank",
        "link:rank=0,factor=1",
        "slow-node:node=0-3,factor=1.2",
        "hiccup:probability=1e-06,ms=5,node=1,per=rank",
    ],
)
def test_a_clause_reads_as_it_is_written(text: str) -> None:
    (clause,) = parse_jitter(text)
    assert written(clause).replace(",", "").split(":")[0] == text.split(":")[0]
    assert parse_jitter(written(clause)) == (clause,)


FAULTS = {
    "stragler:rank=1,factor=2": ("kind = stragler is not known", "did you mean 'straggler'?"),
    "quake": ("kind = quake is not known", "known: straggler, noise, link, slow-node, hiccup"),
    "straggler": ("straggler.rank = straggler must be given", "straggler:rank=17,factor=1.3"),
    "straggler:rank=1": ("straggler.factor = straggler:rank=1 must be given", "straggler:rank=17,factor=1.3"),
    "straggler:rank=1,facter=2": ("straggler.facter = 2 is no field of it", "did you mean 'factor'?"),
    "straggler:rank=1,factor=0": ("straggler.factor = 0 must be > 0", "straggler:rank=17,factor=1.3"),
    "straggler:rank=1,factor=-2": ("straggler.factor = -2 must be > 0", "straggler:rank=17,factor=1.3"),
    "straggler:rank=1,factor=nan": ("straggler.factor = nan must be > 0", "straggler:rank=17,factor=1.3"),
    "straggler:rank=1,factor=inf": ("straggler.factor = inf must be > 0 and at most 10^6", "factor=1.3"),
    "straggler:rank=1,factor=2x": ("straggler.factor = 2x must be > 0", "straggler:rank=17,factor=1.3"),
    "straggler:rank=-1,factor=2": ("straggler.rank = -1 must be a whole number", "rank=17"),
    "straggler:rank=5-3,factor=2": (
        "straggler.rank = 5-3 must be a whole number >= 0, or a range",
        "rank=17",
    ),
    "straggler:rank=5-,factor=2": ("straggler.rank = 5- must be a whole number", "rank=17"),
    "straggler:rank=1,rank=2,factor=2": ("straggler.rank = 2 is given twice", "leave one of them out"),
    "straggler:rank=8,factor=2": ("straggler.rank = 8 must be in 0..7: the job has 8 ranks", "name a rank"),
    "slow-node:node=2,factor=2": ("slow-node.node = 2 must be in 0..1: the job has 2 nodes", "name a node"),
    "link:rank=1,factor=1.5": ("link.factor = 1.5 must be > 0 and at most 1", "link:node=3,factor=0.5"),
    "link:factor=0.5": ("names neither a rank nor a node", "link:node=3,factor=0.5"),
    "link:rank=1,node=1,factor=0.5": ("names a rank and a node", "link:node=3,factor=0.5"),
    "noise:sigma=3": ("noise.sigma = 3 must be > 0 and at most 2", "noise:sigma=0.05"),
    "noise:sigma=0.1,on=compuet": ("noise.on = compuet must be one of compute, communication, all", "on="),
    "noise:sigma=0.1;noise:sigma=0.2,on=all": ("is given twice on compute", "sqrt(a^2 + b^2)"),
    "hiccup:probability=2,ms=1": ("hiccup.probability = 2 must be > 0 and at most 1", "probability=0.001"),
    "hiccup:probability=.1,ms=1;hiccup:probability=.1,ms=2,rank=3": ("has a hiccup already", "other ranks"),
    "": ("says nothing", "straggler:rank=17,factor=1.3"),
    " ; ": ("says nothing", "straggler:rank=17,factor=1.3"),
}


@pytest.mark.parametrize("text", FAULTS)
def test_a_slip_names_the_field_the_rule_and_the_way_out(text: str) -> None:
    plan = pipeline_plan(one_f_one_b_rows(2, 2), replicas=4)
    with pytest.raises(InputError) as caught:
        resolve(parse_jitter(text), plan, gpus_per_node=4)
    rule, fix = FAULTS[text]
    assert caught.value.exit_code == 2
    assert caught.value.message().startswith("--jitter: ")
    assert rule in caught.value.message()
    assert fix in caught.value.fix


def test_clauses_about_one_rank_add_up() -> None:
    plan = pipeline_plan(one_f_one_b_rows(2, 2), replicas=4)
    text = (
        "straggler:rank=1,factor=2;slow-node:node=0,factor=1.5;link:rank=1,factor=0.5;link:node=0,factor=0.8"
    )
    found = resolve(parse_jitter(text), plan, gpus_per_node=4)
    assert found.compute_factor.tolist() == [1.5, 3.0, 1.5, 1.5, 1, 1, 1, 1]
    assert found.network_factor.tolist() == [1.25, 2.0, 1.25, 1.25, 1, 1, 1, 1]
    assert not found.is_random
    assert found.is_healthy.tolist() == [False] * 4 + [True] * 4


def test_a_healed_rank_has_nothing_of_its_own_left() -> None:
    plan = pipeline_plan(one_f_one_b_rows(2, 2), replicas=4)
    text = (
        "straggler:rank=1,factor=2;noise:sigma=0.1,on=all;hiccup:probability=0.1,ms=1;link:rank=1,factor=0.5"
    )
    found = resolve(parse_jitter(text), plan, gpus_per_node=4).healed([1, 5])
    assert found.is_healthy.tolist() == [False, True, False, False, False, True, False, False]
    assert found.is_random


def test_ranks_of_a_clause() -> None:
    plan = pipeline_plan(one_f_one_b_rows(2, 2), replicas=4)
    node = resolve((), plan, gpus_per_node=4).node
    clauses = parse_jitter("straggler:rank=2-3,factor=2;slow-node:node=1,factor=2;noise:sigma=0.1")
    assert [named_ranks(clause, node).tolist() for clause in clauses] == [[2, 3], [4, 5, 6, 7], [*range(8)]]
