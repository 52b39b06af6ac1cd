"""Degrees, batch sizes and defaults of the contract."""

from __future__ import annotations

import pytest

from piper.errors import JobError, StrategyError
from piper.strategy import Resolved, Strategy, resolve


def resolved(
    text: str, *, gpus: int | None = None, global_batch: int | None = None, micro_batch: int | None = None
) -> Resolved:
    return resolve(
        Strategy.parse(text), gpus=gpus, gpus_per_node=8, global_batch=global_batch, micro_batch=micro_batch
    )


def test_dp_follows_from_the_gpus() -> None:
    assert str(resolved("pp=4", gpus=64, global_batch=512).shorthand) == (
        "pp=4,dp=16,zero=0,schedule=1f1b,recompute=none,micro_batch=1"
    )


def test_gpus_are_the_product_of_the_degrees_else_one_node() -> None:
    assert resolved("pp=4,dp=2").gpus == 8
    assert resolved("pp=4").gpus == 4
    assert resolved("").gpus == 8


def test_the_default_batch_gives_two_microbatches_per_stage() -> None:
    found = resolved("pp=4,dp=2,micro_batch=3")
    assert found.sizes == (3,) * 8
    assert found.global_batch == 48
    assert found.defaults["global_batch"] == 48


def test_the_last_microbatch_takes_the_rest() -> None:
    assert resolved("pp=2,dp=2", global_batch=14, micro_batch=3).sizes == (3, 3, 1)


def test_a_microbatch_larger_than_the_replica_batch_is_one_microbatch() -> None:
    assert resolved("pp=1,dp=2", global_batch=4, micro_batch=8).sizes == (2,)


@pytest.mark.parametrize(("global_batch", "valid"), [(511, "496 or 512"), (3, "use 16")])
def test_a_global_batch_that_dp_does_not_divide_names_the_nearest_valid_ones(
    global_batch: int, valid: str
) -> None:
    with pytest.raises(JobError) as caught:
        resolved("pp=4,dp=16", global_batch=global_batch)
    assert caught.value.field == "global_batch"
    assert valid in caught.value.fix


def test_degrees_that_are_not_the_gpus_name_both() -> None:
    with pytest.raises(StrategyError) as caught:
        resolved("pp=4,dp=4", gpus=64)
    assert caught.value.value == 16
    assert "64" in caught.value.rule
    assert "dp = 16" in caught.value.fix


def test_a_pipeline_degree_that_does_not_divide_the_gpus_lists_divisors() -> None:
    with pytest.raises(StrategyError) as caught:
        resolved("pp=3", gpus=8)
    assert "1, 2, 4, 8" in caught.value.fix


def test_micro_batch_given_twice_must_agree() -> None:
    assert resolved("pp=1,dp=1,micro_batch=2", micro_batch=2).sizes[0] == 2
    with pytest.raises(JobError) as caught:
        resolved("pp=1,dp=1,micro_batch=2", micro_batch=4)
    assert (caught.value.field, caught.value.value) == ("micro_batch", 4)
    assert "micro_batch = 2" in caught.value.rule


def test_zero_with_one_replica_is_legal_and_noticed() -> None:
    assert "one replica" in resolved("pp=2,dp=1,zero=1").notices[0]


@pytest.mark.parametrize(
    ("text", "counts", "field"),
    [
        ("", {"gpus": 2**20 + 1}, "gpus"),
        ("dp=1000000000000", {}, "gpus"),
        ("pp=1000000000000", {}, "gpus"),
        ("pp=1048576,dp=1048576", {"gpus": 8}, "pp x dp"),
    ],
)
def test_more_gpus_than_any_cluster_has_are_refused(text: str, counts: dict[str, int], field: str) -> None:
    with pytest.raises(JobError) as caught:
        resolved(text, **counts)
    assert caught.value.field == field
    assert str(2**20) in caught.value.rule
    assert caught.value.fix == "use fewer GPUs"


def test_more_microbatches_than_a_plan_can_list_are_refused_with_the_limit() -> None:
    with pytest.raises(JobError) as caught:
        resolved("pp=4,dp=1", global_batch=10**12)
    assert caught.value.value == 10**12
    assert str(2**20) in caught.value.rule
    assert "--micro-batch" in caught.value.fix
    assert resolved("pp=4,dp=1", global_batch=10**12, micro_batch=10**11).sizes == (10**11,) * 10
