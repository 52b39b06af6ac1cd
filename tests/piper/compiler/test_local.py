"""What one rank computes and keeps: small figures that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.ops import OpKind
from piper.compiler.local import LocalModel
from piper.errors import StrategyError
from piper.graph import ExpertSharding, Recomputation, SequenceSharding, Shares, TensorSharding
from simulator.plan import TaskKind
from tests.facts import graph_of
from tests.graphs import EXPERTS, FFN, HIDDEN, SEQ, after, fused, placed, transformer

HIDDEN_BYTES = SEQ * HIDDEN * 2
NORM, Q, CORE, OUT, ADD, MLP, END = range(1, 8)
TP = TensorSharding(segments=(Q, CORE, OUT, MLP))


def local(*, experts: bool = False, axes: dict[str, int] | None = None, **facts: object) -> LocalModel:
    model = transformer(layers=1, experts=experts)
    graph = placed(model, stages=[0] * 9, axes=axes or {"tp": 2, "cp": 2, "dp": 2}, **facts)
    return LocalModel(graph=graph, model=model)


def test_nothing_is_cut_without_facts() -> None:
    found = local()
    assert found.value_bytes((NORM, 0)) == HIDDEN_BYTES
    assert found.operations(Q, TaskKind.F) is found.model.segments[Q].forward.operations
    assert found.saved_bytes(Q, for_weights=True) == 480
    assert found.parameter_numel("layers.0.q.weight") == HIDDEN**2


def test_sequence_parallel_cuts_tokens_around_regions_and_features_inside() -> None:
    found = local(tensor_shardings=(TP,))
    assert found.value_bytes((NORM, 0)) == HIDDEN_BYTES // 2
    assert found.gathered_bytes((NORM, 0)) == HIDDEN_BYTES
    assert found.value_bytes((Q, 0)) == HIDDEN_BYTES // 2
    assert found.value_bytes((OUT, 0)) == HIDDEN_BYTES, "a whole partial sum, before its reduce-scatter"
    assert found.operations(NORM, TaskKind.F)[0].shape == (SEQ // 2, HIDDEN)
    assert found.operations(Q, TaskKind.F)[0].shape == (1, SEQ, HIDDEN // 2, HIDDEN)
    assert found.operations(OUT, TaskKind.F)[0].shape == (1, SEQ, HIDDEN, HIDDEN // 2)
    assert found.saved_bytes(NORM, for_weights=False) == 240


def test_what_tensor_parallelism_leaves_whole_of_a_workspace_is_cut_over_context_only() -> None:
    model = transformer(layers=1)
    cost = replace(model.segments[MLP].backward, workspace_bytes=1000, workspace_whole_bytes=400)
    changed = [replace(s, backward=cost) if i == MLP else s for i, s in enumerate(model.segments)]
    model = replace(model, segments=tuple(changed))
    ring = SequenceSharding(segments=(CORE,))
    sizes = [
        LocalModel(
            graph=placed(model, stages=[0] * 9, axes={"tp": 2, "cp": 2}, **facts), model=model
        ).workspace_bytes(MLP, TaskKind.B)
        for facts in (
            {},
            {"tensor_shardings": (TP,)},
            {"tensor_shardings": (TP,), "sequence_shardings": (ring,)},
        )
    ]
    assert sizes == [1000, 400 + 600 // 2, 400 // 2 + 600 // 4]


def test_without_sequence_parallel_every_rank_has_all_tokens_around_regions() -> None:
    found = local(tensor_shardings=(replace(TP, sequence_parallel=False),))
    assert found.value_bytes((NORM, 0)) == HIDDEN_BYTES
    assert found.operations(NORM, TaskKind.F)[0].shape == (SEQ, HIDDEN)


def test_context_parallel_cuts_tokens_everywhere_but_attention_sees_all_keys() -> None:
    found = local(sequence_shardings=(SequenceSharding(segments=(CORE,)),))
    assert found.value_bytes((Q, 0)) == HIDDEN_BYTES // 2
    (attention,) = found.operations(CORE, TaskKind.F)
    assert attention.shape[3:5] == (SEQ // 2, SEQ)
    whole = found.model.segments[CORE].forward.operations[0]
    assert attention.flops == whole.flops // 2


def test_unbalanced_causal_attention_is_as_slow_as_its_last_piece() -> None:
    balanced, last = (
        local(sequence_shardings=(SequenceSharding(segments=(CORE,), balanced=even),))
        for even in (True, False)
    )
    flops = [found.operations(CORE, TaskKind.F)[0].flops for found in (balanced, last)]
    assert flops[1] * 2 == flops[0] * 3, "the second half sees 3/4 of the scores, the mean is 1/2"


def test_all_to_all_attention_has_whole_sequences_of_some_heads() -> None:
    ulysses = SequenceSharding(segments=(CORE,), method="all_to_all")
    found = local(sequence_shardings=(ulysses,), tensor_shardings=(TP,))
    (attention,) = found.operations(CORE, TaskKind.F)
    assert attention.shape[1] == 1, "4 heads over tp = 2 and cp = 2"
    assert attention.shape[3:5] == (SEQ, SEQ)


def test_the_fullest_rank_of_experts_takes_imbalance_times_the_mean() -> None:
    fact = ExpertSharding(segments=(MLP,), degree=2, imbalance=1.5)
    found = local(experts=True, axes={"dp": 4}, expert_shardings=(fact,))
    (grouped,) = found.operations(MLP, TaskKind.F)
    assert grouped.kind is OpKind.GROUPED_MATMUL
    assert grouped.shape[:3] == (EXPERTS // 2, SEQ * 3 // 2, FFN)
    assert found.value_bytes((MLP, 0)) == HIDDEN_BYTES * 3 // 2
    assert found.parameter_numel("layers.0.mlp.weight") == EXPERTS * HIDDEN * FFN // 2


def test_a_capacity_bounds_the_imbalance() -> None:
    fact = ExpertSharding(segments=(MLP,), degree=2, imbalance=3.0, capacity=1.25)
    found = local(experts=True, axes={"dp": 4}, expert_shardings=(fact,))
    assert found.operations(MLP, TaskKind.F)[0].shape[1] == SEQ * 5 // 4


def test_ranks_that_share_an_expert_take_the_same_rows_and_half_of_the_features() -> None:
    fact = ExpertSharding(segments=(MLP,), degree=2, tensor_degree=2)
    found = local(experts=True, axes={"dp": 4}, expert_shardings=(fact,))
    assert found.operations(MLP, TaskKind.F)[0].shape[:3] == (EXPERTS // 2, SEQ * 2, FFN // 2)
    assert found.parameter_numel("layers.0.mlp.weight") == EXPERTS * HIDDEN * FFN // 4


def test_exchanges_move_what_their_kind_counts() -> None:
    fact = ExpertSharding(segments=(MLP,), degree=2, imbalance=1.5)
    found = local(experts=True, axes={"dp": 4, "cp": 2}, expert_shardings=(fact,),
                  sequence_shardings=(SequenceSharding(segments=(CORE,)),), rows=fused(1, 2))  # fmt: skip
    graph = after(replace(found.graph, replications=()), "insert_exchanges")
    sizes = {n.uid: found.exchanged_bytes(n) for n in graph.nodes if n.is_exchange}
    local_bytes = HIDDEN_BYTES // 2
    assert sizes == {
        "ALL_TO_ALL.F.in.ep6-6": local_bytes * 3 // 2,
        "ALL_TO_ALL.B.in.ep6-6": local_bytes * 3 // 2,
        "ALL_TO_ALL.F.out.ep6-6": local_bytes * 3 // 2,
        "ALL_TO_ALL.B.out.ep6-6": local_bytes * 3 // 2,
        "RING_SHIFT.F.ring.cp3-3": 2 * local_bytes,
        "RING_SHIFT.B.ring.cp3-3": 4 * local_bytes,
    }


def test_gathers_and_reduce_scatters_count_the_whole_tensor() -> None:
    found = local(tensor_shardings=(TP,), axes={"tp": 2})
    graph = after(found.graph, "insert_exchanges")
    assert {found.exchanged_bytes(n) for n in graph.nodes if n.is_exchange} == {HIDDEN_BYTES}


def test_ranks_agree_on_three_numbers_for_each_row_of_a_cut_vocabulary() -> None:
    graph = after(graph_of("tp_loss"), "insert_exchanges")
    found = LocalModel(graph=graph, model=graph.model)
    (agree,) = [n for n in graph.nodes if n.is_exchange and not n.values]
    assert agree.kind is TaskKind.ALL_REDUCE
    assert found.exchanged_bytes(agree) == SEQ * 3 * 4


def test_selective_recomputation_makes_only_the_chosen_kinds_again() -> None:
    model = transformer(layers=1)
    segments = list(model.segments)
    segments[CORE] = replace(segments[CORE], saved_by_kind=(("attention", 600, 400), ("norm", 360, 80)))
    rule = Recomputation(segments=(Q, CORE, OUT), mode="selective", kinds=("attention",))
    graph = placed(model, stages=[0] * 9, axes={}, recomputations=(rule,))
    found = LocalModel(graph=graph, model=replace(model, segments=tuple(segments)))
    assert [found.remade_bytes(CORE, for_weights=w) for w in (False, True)] == [200, 400]
    assert [o.kind for o in found.operations(CORE, TaskKind.R)] == [OpKind.ATTENTION]
    assert found.operations(Q, TaskKind.R) == ()


def test_a_parameter_used_whole_for_some_tokens_or_heads_has_partial_gradients() -> None:
    shares = Shares(graph=local(tensor_shardings=(TP,)).graph)
    assert shares.is_partial("layers.0.norm.weight")
    assert not shares.is_partial("layers.0.q.weight")
    plain = Shares(graph=local(tensor_shardings=(replace(TP, sequence_parallel=False),)).graph)
    assert not plain.is_partial("layers.0.norm.weight")


def test_a_shared_parameter_cut_in_one_region_only_is_refused() -> None:
    model = transformer(layers=1)
    segments = list(model.segments)
    segments[8] = replace(segments[8], parameters=("layers.0.q.weight",))
    model = replace(model, segments=tuple(segments))
    graph = placed(model, stages=[0] * 9, axes={"tp": 2}, tensor_shardings=(replace(TP, where="s.json:3"),))
    with pytest.raises(StrategyError, match="cut in another way") as failure:
        Shares(graph=graph).local_numel(("layers.0.q.weight",))
    assert "s.json:3" in str(failure.value)
