"""Where rows divide stages, and what a part needs: data, its own forward, the end of its recomputed unit."""

from __future__ import annotations

from dataclasses import replace

from piper.graph import Graph, Recomputation
from piper.graph.parts import Parts
from simulator.plan import TaskKind, TaskName
from tests.graphs import placed, transformer

F, B, BW = TaskKind.F, TaskKind.B, TaskKind.BW
STAGES = [0] * 4 + [1] * 5
"""Of one layer: embedding, norm, q, attention | out, add, mlp, end, head."""


def graph(*borders: tuple[TaskKind, int], **facts: object) -> Graph:
    found = placed(transformer(layers=1), stages=STAGES, axes={"pp": 2}, **facts)
    return replace(found, row_borders=tuple(sorted(borders)))


def named(code: str) -> TaskName:
    return TaskName.parse(code)


def test_an_undivided_stage_is_one_part_named_by_the_stage() -> None:
    parts = Parts(graph=graph())
    assert [parts.of(F, stage) for stage in (0, 1)] == [(0,), (4,)]
    assert parts.name((F, 1, 4), 3).code == "1F3"
    assert parts.needs[F, 1, 4] == ((F, 0, 0),)
    assert set(parts.needs[B, 0, 0]) == {(B, 1, 4), (F, 0, 0)}


def test_a_pass_is_divided_on_its_own_and_halves_share_the_parts_of_the_backward() -> None:
    parts = Parts(graph=graph((B, 2), (F, 6)))
    assert parts.of(B, 0) == parts.of(TaskKind.BI, 0) == (0, 2)
    assert parts.of(F, 0) == parts.of(BW, 0) == (0,)
    assert parts.of_task(named("0BI1")) == ((B, 0, 0), (B, 0, 2))
    assert parts.of_task(named("0BI1/2")) == ((B, 0, 2),)
    assert parts.name((B, 0, 2), 1, kind=TaskKind.BI) == named("0BI1/2")


def test_parts_need_those_that_give_them_tensors_gradients_or_what_they_saved() -> None:
    parts = Parts(graph=graph((F, 6), (B, 6), (BW, 6)))
    assert parts.needs[F, 1, 6] == ((F, 1, 4),)
    assert set(parts.needs[B, 1, 4]) == {(B, 1, 6), (F, 1, 4)}
    assert parts.needs[BW, 1, 6] == ((B, 1, 6),)
    assert (BW, 1, 6) in parts.followers[B, 1, 6]


def test_parts_of_a_recomputed_unit_run_backward_from_its_end() -> None:
    """Attention and its border with the residual: the data do not order them, their R does."""
    model = transformer(layers=1)
    segments = list(model.segments)
    segments[3] = replace(segments[3], inputs=((1, 0),))
    apart = replace(model, segments=tuple(segments))
    borders = ((B, 2), (B, 3))
    plain = replace(placed(apart, stages=[0] * 9, axes={}), row_borders=borders)
    again = replace(plain, recomputations=(Recomputation(segments=(1, 2, 3)),))
    assert (B, 0, 3) not in Parts(graph=plain).needs[B, 0, 2]
    assert (B, 0, 3) in Parts(graph=again).needs[B, 0, 2]


def test_a_part_has_its_share_of_the_segments_of_its_stage() -> None:
    parts = Parts(graph=graph((F, 5)))
    assert parts.share(named("1F0")) == 1
    assert [float(parts.share(named(code))) for code in ("1F0/4", "1F0/5")] == [0.2, 0.8]
