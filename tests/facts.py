"""Combinations of facts over the transformer of `tests.graphs`, one layer on one or two pipeline ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cost_models.ops import Operation, OpKind
from piper.graph import (
    CapturedModel,
    ExpertSharding,
    Graph,
    Offloading,
    PassCost,
    Recomputation,
    Replication,
    SequenceSharding,
    StageMesh,
    TensorSharding,
)
from piper.graph.graph import Rows
from simulator.plan import TaskName
from tests.graphs import SEQ, VOCABULARY, fused, placed, transformer

ALL = tuple(range(9))
ONE, TWO = [0] * 9, [0] * 4 + [1] * 5
TP = TensorSharding(segments=(2, 3, 4, 6))
PLAIN_TP = replace(TP, sequence_parallel=False)
DENSE_TP = TensorSharding(segments=(2, 3, 4))
RING = SequenceSharding(segments=(3,))
ULYSSES = SequenceSharding(segments=(3,), method="all_to_all")
EP = ExpertSharding(segments=(6,), degree=2, imbalance=1.25)
COARSE = StageMesh(segments=(4, 5, 6, 7, 8), axes=(("tp", 4), ("cp", 1), ("dp", 1)))
FINE = StageMesh(segments=(0, 1, 2, 3), axes=(("tp", 1), ("cp", 1), ("dp", 4)))
TURNED = replace(COARSE, axes=(("tp", 2), ("cp", 2), ("dp", 1)))
FULL, HALF = Recomputation(segments=(4, 5, 6, 7)), Recomputation(segments=(1, 2, 3))


def rows(*texts: str) -> Rows:
    """Return rows from task codes: rows("0F0 0BI0 0BW0", ...)."""
    return tuple(tuple((TaskName.parse(code),) for code in text.split()) for text in texts)


SPLIT = rows("0F0 0F1 0BI0 0BI1 0BW1 0BW0", "1F0 1BI0 1F1 1BW0 1BI1 1BW1")
MIXED = rows("0F0 0F1 0B0 0BI1 0BW1", "1F0 1BI0 1F1 1BW0 1B1")


BOTH_WAYS = rows(
    "0F0 1F2 0F1 1B2 1F3 0B0 1BI3 0BI1 0BW1 1BW3",
    "0F2 1F0 0F3 1B0 1F1 0B2 1BI1 0BI3 0BW3 1BW1",
)


def every(**fields: Any) -> tuple[Replication, ...]:
    """Return one replication of all segments."""
    return (Replication(segments=ALL, **fields),)


CASES: dict[str, dict[str, Any]] = {
    "one_replica": {"stages": TWO, "axes": {}},
    "zero0": {"stages": TWO, "axes": {"dp": 2}, "replications": every()},
    "zero1": {"stages": TWO, "axes": {"dp": 2}, "replications": every(zero=1)},
    "zero2": {"stages": TWO, "axes": {"dp": 2}, "replications": every(zero=2)},
    "zero3": {"stages": TWO, "axes": {"dp": 2}, "replications": every(zero=3)},
    "zero3_one_stage": {"stages": ONE, "axes": {"dp": 4}, "replications": every(zero=3, prefetch=2)},
    "zero3_streams": {
        "stages": TWO, "axes": {"dp": 2}, "rows": MIXED,
        "replications": every(zero=3, reduce_stream="red", gather_stream="blue"),
    },
    "zero1_streams": {
        "stages": TWO, "axes": {"dp": 2},
        "replications": every(zero=1, gather_stream="blue", bucket_bytes=1200),
    },
    "zero3_kept": {"stages": TWO, "axes": {"dp": 2}, "replications": every(zero=3, reshard=False)},
    "hsdp1": {"stages": TWO, "axes": {"dp": 4}, "replications": every(zero=1, shard_ranks=2)},
    "hsdp2": {"stages": TWO, "axes": {"dp": 4}, "replications": every(zero=2, shard_ranks=2)},
    "hsdp3": {"stages": TWO, "axes": {"dp": 4}, "replications": every(zero=3, shard_ranks=2)},
    "per_microbatch": {"stages": TWO, "axes": {"dp": 2}, "replications": every(reduce_every="microbatch")},
    "per_microbatch_hsdp": {
        "stages": TWO, "axes": {"dp": 4},
        "replications": every(reduce_every="microbatch", zero=1, shard_ranks=2),
    },
    "small_buckets": {"stages": TWO, "axes": {"dp": 2}, "replications": every(bucket_bytes=1200)},
    "split": {"stages": TWO, "axes": {"dp": 2}, "replications": every(), "rows": SPLIT},
    "mixed_zero2": {"stages": TWO, "axes": {"dp": 2}, "replications": every(zero=2), "rows": MIXED},
    "recompute_zero3": {
        "stages": TWO, "axes": {"dp": 2}, "replications": every(zero=3), "recomputations": (HALF, FULL),
        "rows": MIXED,
    },
    "tp": {"stages": TWO, "axes": {"tp": 2}, "tensor_shardings": (TP,)},
    "tp_loss": {
        "cut_loss": True, "stages": TWO, "axes": {"tp": 2},
        "tensor_shardings": (replace(TP, segments=(2, 3, 4, 6, 8)),), "rows": SPLIT,
    },
    "tp_plain": {"stages": TWO, "axes": {"tp": 2}, "tensor_shardings": (PLAIN_TP,)},
    "tp_split": {
        "stages": TWO, "axes": {"tp": 2, "dp": 2}, "tensor_shardings": (TP,), "replications": every(zero=1),
        "rows": SPLIT,
    },
    "tp_asynchronous": {
        "stages": TWO, "axes": {"tp": 2}, "tensor_shardings": (replace(TP, asynchronous=True),),
        "rows": MIXED,
    },
    "tp_loss_asynchronous": {
        "cut_loss": True, "stages": TWO, "axes": {"tp": 2}, "rows": MIXED,
        "tensor_shardings": (replace(TP, segments=(2, 3, 4, 6, 8), asynchronous=True),),
    },
    "tp_plain_asynchronous": {
        "stages": TWO, "axes": {"tp": 2}, "tensor_shardings": (replace(PLAIN_TP, asynchronous=True),),
    },
    "tp_recompute": {
        "stages": TWO, "axes": {"tp": 2}, "tensor_shardings": (TP,), "recomputations": (FULL,), "rows": MIXED,
    },
    "cp_ring": {"stages": TWO, "axes": {"cp": 2}, "sequence_shardings": (RING,), "replications": every()},
    "cp_selective": {
        "stages": TWO, "axes": {"cp": 2}, "sequence_shardings": (RING,), "replications": every(),
        "recomputations": (replace(HALF, mode="selective", kinds=("attention",)),),
    },
    "cp_all_to_all": {
        "stages": TWO, "axes": {"cp": 2}, "sequence_shardings": (ULYSSES,), "replications": every(),
        "recomputations": (HALF,),
    },
    "tp_cp_zero3": {
        "stages": TWO, "axes": {"tp": 2, "cp": 2, "dp": 2}, "tensor_shardings": (TP,),
        "sequence_shardings": (RING,), "replications": every(zero=3, shard_ranks=2), "rows": MIXED,
    },
    "meshes": {
        "sizes": (2, 4, 1), "stages": TWO, "axes": {"tp": 2, "dp": 2}, "stage_meshes": (FINE, COARSE),
        "tensor_shardings": (TP,), "replications": every(zero=1), "rows": MIXED,
    },
    "meshes_plain": {
        "sizes": (2, 4, 1), "stages": TWO, "axes": {"tp": 2, "dp": 2}, "stage_meshes": (FINE, COARSE),
        "tensor_shardings": (PLAIN_TP,), "replications": every(zero=2), "recomputations": (HALF, FULL),
    },
    "meshes_cp": {
        "sizes": (1, 2), "stages": TWO, "axes": {"tp": 1, "cp": 2, "dp": 2}, "stage_meshes": (TURNED,),
        "tensor_shardings": (PLAIN_TP,), "sequence_shardings": (RING,), "replications": every(zero=3),
    },
    "meshes_asynchronous": {
        "sizes": (1, 2), "stages": TWO, "axes": {"tp": 2, "dp": 2}, "stage_meshes": (COARSE,),
        "tensor_shardings": (replace(TP, asynchronous=True),), "rows": SPLIT,
        "replications": every(reduce_every="microbatch"),
    },
    "meshes_ep": {
        "sizes": (1, 2), "experts": True, "stages": TWO, "axes": {"tp": 2, "dp": 2},
        "stage_meshes": (COARSE,), "tensor_shardings": (DENSE_TP,), "expert_shardings": (EP,),
        "replications": every(zero=1),
    },
    "tied": {"tied": True, "stages": TWO, "axes": {"dp": 2}, "replications": every(zero=1)},
    "tied_zero3": {
        "tied": True, "stages": TWO, "axes": {"dp": 4}, "replications": every(zero=3, shard_ranks=2),
        "rows": MIXED,
    },
    "tied_per_microbatch_tp": {
        "tied": True, "stages": TWO, "axes": {"tp": 2, "dp": 2}, "tensor_shardings": (TP,),
        "replications": every(reduce_every="microbatch"),
    },
    "tied_two_directions": {
        "tied": True, "stages": TWO, "axes": {"dp": 2}, "replications": every(zero=2), "rows": BOTH_WAYS,
        "microbatches": 4,
    },
    "two_directions": {
        "stages": TWO, "axes": {"dp": 2}, "replications": every(zero=1), "rows": BOTH_WAYS, "microbatches": 4,
    },
    "two_directions_zero3_tp": {
        "stages": TWO, "axes": {"tp": 2, "dp": 2}, "replications": every(zero=3), "rows": BOTH_WAYS,
        "tensor_shardings": (TP,), "microbatches": 4,
    },
    "ep": {
        "experts": True, "stages": TWO, "axes": {"dp": 4}, "expert_shardings": (EP,),
        "replications": every(zero=1),
    },
    "ep_zero3": {
        "experts": True, "stages": TWO, "axes": {"dp": 4}, "expert_shardings": (EP,),
        "replications": every(zero=3), "rows": MIXED,
    },
    "ep_etp_tp": {
        "experts": True, "stages": TWO, "axes": {"tp": 2, "dp": 2}, "tensor_shardings": (DENSE_TP,),
        "expert_shardings": (replace(EP, tensor_degree=2),), "replications": every(zero=1),
    },
    "selective": {
        "stages": TWO, "axes": {}, "recomputations": (replace(HALF, mode="selective", kinds=("attention",)),),
        "rows": MIXED,
    },
    "offload_activations": {
        "stages": TWO, "axes": {"dp": 2}, "replications": every(),
        "offloadings": (Offloading(segments=(2, 3, 6), what="activations"),), "rows": MIXED,
    },
    "offload_state": {
        "stages": TWO, "axes": {"dp": 2}, "replications": every(zero=1),
        "offloadings": (
            Offloading(segments=ALL, what="optimizer"), Offloading(segments=(1, 2), what="params"),
        ),
    },
    "offload_all": {
        "stages": TWO, "axes": {"dp": 2}, "replications": every(zero=2), "recomputations": (FULL,),
        "offloadings": tuple(Offloading(segments=ALL, what=what, prefetch=2)
                             for what in ("activations", "optimizer", "params")),
        "rows": MIXED,
    },
}  # fmt: skip
"""Fields of the graph by name of a combination."""


def with_tied_head(model: CapturedModel) -> CapturedModel:
    """Return the model with the embedding's weight in its head."""
    *others, head = model.segments
    head = replace(head, parameters=("embed.weight",))
    return replace(model, segments=(*others, head), parameters=model.parameters[:-1])


def with_cut_loss(model: CapturedModel) -> CapturedModel:
    """Return the model with its loss inside a TP region that cuts the vocabulary."""
    *others, head = model.segments
    rows = model.micro_batch * SEQ
    softmax = Operation(
        kind=OpKind.SOFTMAX, name="softmax", shape=(rows, VOCABULARY), dtype="fp32",
        flops=5 * rows * VOCABULARY, bytes=8 * rows * VOCABULARY, tensor_dim=1, token_dim=0,
    )  # fmt: skip
    cost = PassCost(operations=(*head.forward.operations, softmax), workspace_bytes=96)
    head = replace(
        head, tags=(*head.tags, ("TP", 99)), forward=cost, forward_no_grad=cost,
        tensor_layout=(("head.weight", 0),),
    )  # fmt: skip
    return replace(model, segments=(*others, head))


def graph_of(name: str, **changes: Any) -> Graph:
    """Return the graph of a combination, with some fields changed, before the passes."""
    case = CASES[name] | changes
    experts, sizes = case.pop("experts", False), case.pop("sizes", (1,))
    models = [transformer(layers=1, experts=experts, micro_batch=size) for size in sizes]
    model = models[0]
    if case.pop("tied", False):
        model = with_tied_head(model)
    if case.pop("cut_loss", False):
        model = with_cut_loss(model)
    stages = max(case["stages"]) + 1
    case["axes"] = {"pp": stages, **case["axes"]}
    case.setdefault("rows", fused(stages, 2))
    if len(models) > 1:
        case["models"] = tuple(models)
    return placed(model, **case)
