"""Microbatches on stages with meshes of their own: the sizes at which a model is captured, and defaults."""

from __future__ import annotations

import pytest

from piper.errors import StrategyError
from piper.strategy import Resolved, Strategy, resolve
from piper.strategy.files import parse_directive
from piper.strategy.strategy import facts


def resolved(
    *meshes: dict[str, int], micro_batch: int | None = None, global_batch: int | None = None
) -> Resolved:
    """Return the strategy of the job's mesh and of those of the stages 1, 2, ..."""
    entries = [{"op": "mesh", "axes": {"pp": 4} | meshes[0]}]
    entries += [{"op": "mesh", "axes": axes, "filter": {"PP": s}} for s, axes in enumerate(meshes[1:], 1)]
    listed = tuple(parse_directive(entry, where=f"s.json:{n}") for n, entry in enumerate(entries, 1))
    strategy = Strategy(stated=facts(listed, where="s.json"), directives=listed, where="s.json")
    return resolve(strategy, gpus=None, gpus_per_node=8, global_batch=global_batch, micro_batch=micro_batch)


def test_the_model_is_captured_at_the_sizes_of_every_stage_those_of_the_job_first() -> None:
    found = resolved({"tp": 2, "dp": 4}, {"tp": 1, "dp": 8}, {"tp": 8}, micro_batch=4, global_batch=88)
    assert found.sizes == (4, 4, 4, 4, 4, 2)
    assert found.captured_sizes == (4, 2, 1, 16, 8)


def test_equal_replicas_need_no_further_size() -> None:
    assert resolved({"dp": 4}, {"dp_replicate": 2, "dp_shard": 2}, micro_batch=3).captured_sizes == (3,)


def test_the_default_microbatch_is_the_smallest_that_all_stages_share_out() -> None:
    found = resolved({"tp": 4, "dp": 2}, {"tp": 1, "dp": 8}, {"tp": 2, "dp": 4})
    assert found.sizes == (4,) * 8
    assert (found.defaults["micro_batch"], found.defaults["global_batch"]) == (4, 64)


def test_a_short_last_microbatch_must_be_shared_out_too() -> None:
    with pytest.raises(StrategyError, match=r"does not divide a microbatch of 1 x 2 sequences") as caught:
        resolved({"tp": 2, "dp": 2}, {"dp": 4}, micro_batch=2, global_batch=10)
    assert (caught.value.where, caught.value.field) == ("s.json:2", "mesh.axes.dp")


def test_shards_of_a_stage_with_replicas_are_no_shards_over_one_replica() -> None:
    listed = {"op": "replicate", "filter": {}, "shard_optimizer": True}
    directives = tuple(
        parse_directive(entry, where="s.json")
        for entry in (
            {"op": "mesh", "axes": {"pp": 2, "tp": 2}},
            {"op": "mesh", "axes": {"dp": 2}, "filter": {"PP": 1}},
            listed,
        )
    )
    strategy = Strategy(stated=facts(directives, where="s"), directives=directives, where="s")
    found = resolve(strategy, gpus=None, gpus_per_node=8, global_batch=8, micro_batch=2)
    assert not any("changes nothing" in notice for notice in found.notices)
