"""What the compiler emits: tasks, order, waits, bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.graph.buckets import padded
from simulator.plan import COMPUTE_KINDS, MemoryClass, Plan, TaskKind
from simulator.plan.check import check_plan
from tests.jobs import compiled
from tests.models import HIDDEN, VOCABULARY

LAYER = HIDDEN * HIDDEN + HIDDEN
END = VOCABULARY * HIDDEN


def codes(plan: Plan, rank: int, *kinds: TaskKind) -> list[str]:
    device = plan.device_plans[rank]
    return [c for c, k in zip(device.codes(), device.tasks.kind.tolist(), strict=True) if k in kinds]


def static(plan: Plan, rank: int) -> dict[str, int]:
    table = plan.device_plans[rank].buffers
    return {
        m.name.lower(): int(table.size_bytes[table.persistent & (table.memory_class == m)].sum())
        for m in MemoryClass
    }


def test_1f1b_alternates_after_its_warm_up() -> None:
    plan = compiled("pp=2,dp=1", global_batch=4)
    assert codes(plan, 0, TaskKind.F, TaskKind.B) == ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]
    assert codes(plan, 1, TaskKind.F, TaskKind.B) == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"]


def test_gpipe_runs_all_forwards_first() -> None:
    plan = compiled("pp=2,dp=1,schedule=gpipe", global_batch=3)
    assert codes(plan, 0, TaskKind.F, TaskKind.B)[:3] == ["0F0", "0F1", "0F2"]


def test_recompute_makes_each_layer_again_just_before_its_backward() -> None:
    plan = compiled("pp=1,dp=1,recompute=full", layers=2, global_batch=1)
    assert codes(plan, 0, *COMPUTE_KINDS) == [
        "0F0", "0B0/3", "0R0/2", "0B0/2", "0R0/1", "0B0/1", "0B0/0", "NORM", "0UPDATE@dense0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("pp=1,dp=1", ["NORM", "ALL_REDUCE@norm", "0UPDATE@dense0"]),
        ("pp=1,dp=2", ["0ALL_REDUCE@dense0", "NORM", "ALL_REDUCE@norm", "0UPDATE@dense0"]),
        (
            "pp=1,dp=2,zero=1",
            ["0REDUCE_SCATTER@dense0", "NORM", "ALL_REDUCE@norm", "0UPDATE@dense0", "0ALL_GATHER@dense0"],
        ),
    ],
)
def test_the_step_ends_with_one_reduction_norm_and_update(text: str, kinds: list[str]) -> None:
    assert compiled(text).device_plans[0].codes()[-len(kinds) :] == tuple(kinds)


def test_without_clipping_there_is_no_barrier() -> None:
    plan = compiled("pp=2,dp=2", clip=None)
    assert not codes(plan, 0, TaskKind.NORM)
    assert "world" not in [group.name for group in plan.groups]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dp", [1, 3])
def test_static_bytes_follow_the_formula(zero: int, dp: int) -> None:
    plan = compiled(f"pp=2,dp={dp},zero={zero}", layers=4, global_batch=2 * dp)
    shards = dp if zero else 1
    numel = padded(END + 2 * LAYER, shards)
    expected = {"parameters": 2 * numel, "gradients": 4 * numel, "optimizer": 12 * numel // shards}
    for rank in (0, 1):
        assert expected.items() <= static(plan, rank).items()


def test_padding_reaches_a_multiple_of_eight_per_shard_only_when_sharded() -> None:
    assert padded(401, 1) == 401
    assert padded(401, 3) == 408
    assert padded(408, 3) == 408
    assert padded(400, 2) == 400


@pytest.mark.parametrize(
    ("dtype", "optimizer", "per_parameter"),
    [("bf16", "adamw", 12), ("bf16", "sgd", 4), ("fp32", "adamw", 8), ("fp32", "sgd", 0)],
)
def test_optimizer_state_depends_on_dtype_and_optimizer(
    dtype: str, optimizer: str, per_parameter: int
) -> None:
    found = static(compiled("pp=1,dp=1", dtype=dtype, optimizer=optimizer), 0)
    assert found["optimizer"] == per_parameter * (2 * END + 4 * LAYER)


def test_a_tied_weight_is_reduced_over_its_holders_before_its_bucket() -> None:
    plan = compiled("pp=2,dp=2", tied=True)
    for rank in (0, 1):
        kinds = codes(plan, rank, TaskKind.ALL_REDUCE)
        assert kinds == [f"{rank}ALL_REDUCE@tied0", f"{rank}ALL_REDUCE@dense{rank}", "ALL_REDUCE@norm"]
    tied = next(group for group in plan.groups if group.name == "tied0")
    assert tied.members == ((0, 2), (1, 3))


def test_a_tied_weight_on_one_device_is_stored_once_and_needs_no_reduction() -> None:
    plan = compiled("pp=1,dp=1", tied=True)
    assert plan.device_plans[0].buckets[0].parameters.count("embed.weight") == 1
    assert codes(plan, 0, TaskKind.ALL_REDUCE) == ["ALL_REDUCE@norm"]


def test_uneven_microbatches_move_their_own_bytes() -> None:
    plan = compiled("pp=2,dp=1", global_batch=5, micro_batch=2)
    table = plan.device_plans[0].tasks
    sizes = table.size_bytes[table.kind == TaskKind.SEND_F].tolist()
    assert plan.training.micro_batch_sizes == (2, 2, 1)
    assert sizes == [128, 128, 64]


def test_in_flight_activations_shrink_along_the_pipeline_under_1f1b() -> None:
    plan = compiled("pp=4,dp=1", layers=8, global_batch=8)
    for rank, device in enumerate(plan.device_plans):
        alive, most = 0, 0
        for kind in device.tasks.kind.tolist():
            alive += {TaskKind.F: 1, TaskKind.B: -1}.get(TaskKind(kind), 0)
            most = max(most, alive)
        assert most == 4 - rank


@settings(deadline=None, max_examples=40)
@given(
    pp=st.integers(1, 5),
    dp=st.integers(1, 3),
    zero=st.integers(0, 1),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    recompute=st.sampled_from(["none", "full"]),
    replica_batch=st.integers(1, 7),
    micro_batch=st.integers(1, 3),
    tied=st.booleans(),
    clip=st.sampled_from([None, 1.0]),
)
def test_every_compiled_plan_passes_the_checker(
    pp: int,
    dp: int,
    zero: int,
    schedule: str,
    recompute: str,
    replica_batch: int,
    micro_batch: int,
    tied: bool,
    clip: float | None,
) -> None:
    text = f"pp={pp},dp={dp},zero={zero},schedule={schedule},recompute={recompute}"
    plan = compiled(text, global_batch=replica_batch * dp, micro_batch=micro_batch, tied=tied, clip=clip)
    assert check_plan(plan) == []
    for device in plan.device_plans:
        balance = np.zeros(len(device.buffers.size_bytes), dtype=int)
        for task in device.tasks:
            balance[list(task.allocates)] += 1
            balance[list(task.frees)] -= 1
        assert not balance.any(), "a buffer outlives the step"


def test_compiling_twice_gives_the_same_plan() -> None:
    first, second = (compiled("pp=2,dp=2,zero=1,recompute=full", tied=True) for _ in range(2))
    for a, b in zip(first.device_plans, second.device_plans, strict=True):
        assert a.codes() == b.codes()
        assert (a.tasks.waits.values == b.tasks.waits.values).all()
        assert (a.buffers.owner == b.buffers.owner).all()
