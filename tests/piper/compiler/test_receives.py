"""Receives are posted one slot ahead, in the order in which the other end sends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cost_models.errors import InternalError
from piper.compiler.columns import Numbers
from piper.compiler.receives import Transfers, posted
from tests.piper.compiler.test_columns import numbers


def end(places: Sequence[int], *, edge: int = 0, first_task: int = 0) -> Transfers:
    count = len(places)
    return Transfers(
        edge=edge,
        microbatches=numbers(*range(count)),
        tasks=numbers(*range(first_task, first_task + count)),
        place=numbers(*places),
    )


def listed(found: tuple[Numbers, Numbers]) -> list[tuple[int, int]]:
    return list(zip(found[0].tolist(), found[1].tolist(), strict=True))


def test_a_receive_is_posted_one_slot_before_its_use() -> None:
    found = posted([end([1, 2, 4])], [end([10, 20, 30])], num_microbatches=3)
    assert listed(found) == [(0, 0), (1, 1), (2, 3)]


def test_nothing_is_posted_before_the_first_slot() -> None:
    assert listed(posted([end([0])], [end([10])], num_microbatches=1)) == [(0, 0)]


def test_what_is_sent_earlier_but_needed_later_is_posted_early_enough() -> None:
    found = posted([end([9, 3])], [end([10, 20])], num_microbatches=2)
    assert listed(found) == [(0, 2), (1, 2)]


def test_two_edges_of_a_pair_share_the_order_of_the_sends() -> None:
    received = [end([1, 5], edge=0), end([3, 7], edge=1, first_task=2)]
    sent = [end([10, 30], edge=0), end([20, 40], edge=1, first_task=2)]
    assert listed(posted(received, sent, num_microbatches=2)) == [(0, 0), (2, 2), (1, 4), (3, 6)]


def test_ends_that_transfer_different_tensors_are_our_fault() -> None:
    with pytest.raises(InternalError, match="transfer different tensors"):
        posted([end([1, 2])], [end([10, 20], edge=1)], num_microbatches=2)
