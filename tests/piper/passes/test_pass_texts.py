"""Golden texts: what each pass does with the facts that ask for it, one layer of a small transformer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from piper.graph import dump
from tests.facts import graph_of
from tests.graphs import after

TEXTS = {
    "insert_exchanges": ("tp", "tp_loss", "tp_plain", "tp_asynchronous", "cp_ring", "cp_all_to_all", "ep"),
    "join_segments": (
        "zero0", "zero3", "small_buckets", "recompute_zero3", "tp_recompute", "selective", "cp_selective",
    ),
    "split_backward": ("split", "mixed_zero2", "tp_split"),
    "copy_stages": ("two_directions",),
    "insert_transfers": ("zero0", "tp", "two_directions"),
    "reduce_gradients": (
        "zero0", "zero1", "zero2", "zero3", "hsdp1", "hsdp3", "per_microbatch", "tp", "ep",
        "tied_zero3", "tied_per_microbatch_tp", "two_directions",
    ),
    "insert_update": ("one_replica", "zero1", "zero3"),
    "insert_offloads": ("offload_activations", "offload_state"),
}  # fmt: skip


@pytest.mark.parametrize("name", [(step, case) for step, cases in TEXTS.items() for case in cases])
def test_the_graph_after_a_pass(name: tuple[str, str], golden: Callable[[str, str], None]) -> None:
    step, case = name
    graph = after(graph_of(case), step)
    groups = [f"group {group.name}: {' '.join(map(str, group.members))}" for group in graph.groups]
    buckets = [
        f"bucket {b.name}: {b.kind}, {b.numel} -> {b.padded_numel} elements, 1/{b.shard_count}"
        for held in graph.buckets
        for b in held
    ]
    golden(f"passes/{step}/{case}.txt", "\n".join([dump(graph), *groups, *buckets]).rstrip() + "\n")
