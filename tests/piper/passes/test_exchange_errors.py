"""Regions that cannot be cut as stated are refused, naming line, rule and fix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper.errors import StrategyError
from piper.graph import ExpertSharding, Offloading, SequenceSharding
from tests.facts import ALL, DENSE_TP, ONE, TP, ULYSSES, every
from tests.graphs import after, placed, transformer


def test_regions_that_disagree_about_sequence_parallel_name_both_lines() -> None:
    one = replace(DENSE_TP, where="s.json:2")
    other = replace(TP, segments=(6,), sequence_parallel=False, where="s.json:3")
    graph = placed(transformer(layers=1), stages=ONE, axes={"tp": 2}, tensor_shardings=(one, other))
    with pytest.raises(StrategyError, match=r"s.json:3.*differs from the shard_tensor at s.json:2"):
        after(graph, "insert_exchanges")


def test_a_third_matmul_in_a_region_is_refused_by_name() -> None:
    model = transformer(layers=1)
    segments = list(model.segments)
    segments[4] = replace(segments[4], tensor_refused=("layers.0.out.weight",))
    model = replace(model, segments=tuple(segments))
    graph = placed(model, stages=ONE, axes={"tp": 2}, tensor_shardings=(replace(TP, where="s.json:5"),))
    with pytest.raises(StrategyError, match=r"s.json:5.*layers.0.out.weight.*partial sums"):
        after(graph, "insert_exchanges")


def test_experts_need_tokens_that_are_cut_over_tp() -> None:
    fact = ExpertSharding(segments=(6,), degree=2, where="s.json:4")
    model = transformer(layers=1, experts=True)
    plain = replace(DENSE_TP, sequence_parallel=False)
    graph = placed(model, stages=ONE, axes={"tp": 2}, expert_shardings=(fact,), tensor_shardings=(plain,))
    with pytest.raises(StrategyError, match=r"s.json:4.*all hold the same ones"):
        after(graph, "insert_exchanges")


def test_tokens_are_not_exchanged_for_heads_around_a_projection() -> None:
    fact = SequenceSharding(segments=(2, 3), method="all_to_all", where="s.json:6")
    graph = placed(transformer(layers=1), stages=ONE, axes={"cp": 2}, sequence_shardings=(fact,))
    with pytest.raises(StrategyError, match=r"s.json:6.*layers.0.q.weight"):
        after(graph, "insert_exchanges")


def test_replicas_without_a_replicate_are_refused() -> None:
    graph = placed(transformer(layers=1), stages=ONE, axes={"dp": 2})
    with pytest.raises(StrategyError, match=r"stage 0.*on 2 replicas, but no replicate claims it"):
        after(graph, "reduce_gradients")


def test_parameters_that_are_cut_are_not_offloaded_too() -> None:
    fact = Offloading(segments=ALL, what="params", where="s.json:7")
    graph = placed(
        transformer(layers=1), stages=ONE, axes={"dp": 2}, replications=every(zero=3), offloadings=(fact,)
    )
    with pytest.raises(StrategyError, match=r"s.json:7.*are cut over 2 ranks"):
        after(graph, "insert_offloads")


def test_heads_are_not_cut_into_pieces() -> None:
    graph = placed(
        transformer(layers=1), stages=ONE, axes={"tp": 8}, tensor_shardings=(replace(TP, where="s.json:5"),)
    )
    with pytest.raises(StrategyError, match=r"s.json:5.*tp = 8.*does not divide the 4 heads"):
        after(graph, "insert_exchanges")


def test_heads_are_shared_by_tensor_and_all_to_all_context_parallelism() -> None:
    graph = placed(
        transformer(layers=1), stages=ONE, axes={"tp": 2, "cp": 4}, tensor_shardings=(TP,),
        sequence_shardings=(ULYSSES,), replications=every(),
    )  # fmt: skip
    with pytest.raises(StrategyError, match=r"tp x cp = 8.*does not divide the 4 heads"):
        after(graph, "insert_exchanges")


def test_experts_are_not_cut_by_ep() -> None:
    fact = ExpertSharding(segments=(6,), degree=8, where="s.json:4")
    model = transformer(layers=1, experts=True)
    graph = placed(model, stages=ONE, axes={"dp": 8}, expert_shardings=(fact,), replications=every())
    with pytest.raises(StrategyError, match=r"s.json:4.*degree = 8 does not divide the 4 experts"):
        after(graph, "insert_exchanges")
