"""Scopes while tracing: their indices, nesting, and what is refused; and that they cost nothing otherwise."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from piper import annotate
from piper.annotation import Trace, tags_of, tracing
from piper.errors import ModelError


def opened(trace: Trace) -> dict[str, int]:
    """The tags that an operation would have now."""
    return dict(tags_of(trace.stack))


def test_a_scope_outside_of_tracing_does_nothing() -> None:
    with annotate("PP") as scope:
        assert scope is None


def test_indices_count_the_entries_of_each_name_in_tracing_order() -> None:
    seen = []
    with tracing() as trace:
        for _ in range(2):
            with annotate("PP"):
                for _ in range(2):
                    with annotate("EP"):
                        seen.append(opened(trace))
    assert seen == [{"PP": 0, "EP": 0}, {"PP": 0, "EP": 1}, {"PP": 1, "EP": 2}, {"PP": 1, "EP": 3}]


def test_every_trace_counts_from_zero() -> None:
    for _ in range(2):
        with tracing() as trace, annotate("PP"):
            assert opened(trace) == {"PP": 0}


def test_a_scope_yields_its_name_index_and_a_number_of_its_own() -> None:
    with tracing(), annotate("PP") as outer, annotate("ACT") as inner, annotate("PP") as last:
        assert outer is not None
        assert inner is not None
        assert last is not None
        assert [(s.name, s.index) for s in (outer, inner, last)] == [("PP", 0), ("ACT", 0), ("PP", 1)]
        assert len({s.uid for s in (outer, inner, last)}) == 3


def test_of_nested_scopes_with_one_name_the_inner_wins_and_the_outer_comes_back() -> None:
    with tracing() as trace, annotate("A"):
        with annotate("B"), annotate("A"):
            assert opened(trace) == {"A": 1, "B": 0}
        assert opened(trace) == {"A": 0}


def test_a_given_index_skips_ahead_and_counting_goes_on_behind_it() -> None:
    with tracing() as trace:
        seen = []
        for index in (None, 7, None):
            with annotate("PP", index):
                seen.append(opened(trace)["PP"])
    assert seen == [0, 7, 8]


def test_a_scope_that_is_opened_again_has_its_old_tag_and_uses_up_no_index() -> None:
    with tracing() as trace:
        seen = []
        for index in (None, None, 0, None):
            with annotate("EP", index) as scope:
                assert scope is not None
                assert scope.counted is (index is None)
                seen.append(opened(trace)["EP"])
    assert seen == [0, 1, 0, 2]


def test_an_error_inside_closes_the_scope() -> None:
    with tracing() as trace:
        with pytest.raises(ZeroDivisionError), annotate("PP"):
            _ = 1 / 0
        assert trace.stack == ()
        with annotate("PP"):
            assert opened(trace) == {"PP": 1}


def test_whoever_listens_is_told_of_each_opening_and_closes_with_it() -> None:
    log: list[str] = []

    @contextmanager
    def listen(stack):
        log.append("open " + " ".join(f"{scope.name}{scope.index}" for scope in stack))
        yield
        log.append(f"close {stack[-1].name}")

    with tracing(on_enter=listen), annotate("PP"), annotate("TP"):
        log.append("work")
    assert log == ["open PP0", "open PP0 TP0", "work", "close TP", "close PP"]


def test_another_thread_is_not_part_of_the_trace() -> None:
    def scope_elsewhere() -> object:
        with annotate("PP") as scope:
            return scope

    with tracing(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(scope_elsewhere).result() is None


@pytest.mark.parametrize("name", ["", None, 3, "PASS", "MB"])
def test_a_name_that_is_no_tag_is_refused_traced_or_not(name: object) -> None:
    with pytest.raises(ModelError) as caught, annotate(name):  # type: ignore[arg-type]
        pass
    assert (caught.value.where, caught.value.field, caught.value.value) == ("piper.annotate", "name", name)
    assert '"PP"' in caught.value.fix


@pytest.mark.parametrize("index", [-1, True, 1.0, "0"])
def test_an_index_that_is_no_whole_number_is_refused(index: object) -> None:
    with pytest.raises(ModelError) as caught, annotate("PP", index):  # type: ignore[arg-type]
        pass
    assert (caught.value.field, caught.value.value) == ("index", index)
    assert "leave it out" in caught.value.fix
