"""Every combination of facts compiles to a plan without fault, and a plan file of it reads back equal."""

from __future__ import annotations

from typing import Any

import pytest

from cost_models.ops import Operation
from cost_models.price import Price
from piper.compiler.compile import emit_plan
from piper.graph import Offloading, StreamRule
from simulator import simulate
from simulator.plan import MemoryClass, Plan
from simulator.plan.check import check_plan
from simulator.plan.codec import bytes_to_plan, plan_to_bytes
from tests.facts import CASES, FULL, MIXED, every, graph_of
from tests.graphs import after, fused
from tests.plans import FakeCostModel, exact_price


def plan_of(name: str, **changes: Any) -> Plan:
    return emit_plan(after(graph_of(name, **changes), "check_order"), [], strategy=name)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_legal(name: str) -> None:
    assert [str(violation) for violation in check_plan(plan_of(name))] == []


@pytest.mark.parametrize("name", CASES)
def test_the_plan_file_reads_back_equal(name: str) -> None:
    data = plan_to_bytes(plan_of(name))
    assert plan_to_bytes(bytes_to_plan(data)) == data


def static_bytes(plan: Plan) -> dict[str, int]:
    """Return the bytes that live through all steps on pipeline rank 0, by class."""
    buffers = plan.device_plans[0].buffers
    return {
        kind.name: int(buffers.size_bytes[buffers.persistent & (buffers.memory_class == kind)].sum())
        for kind in (MemoryClass.PARAMETERS, MemoryClass.GRADIENTS, MemoryClass.OPTIMIZER)
    }


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [(0, 1, 1, 1), (1, 1, 1, 4), (2, 1, 4, 4), (3, 4, 4, 4)],
)
def test_state_is_cut_as_far_as_its_level_says(
    zero: int, parameters: int, gradients: int, optimizer: int
) -> None:
    units = [512 + 16 + 256 + 256 + 16 + 1024 + 512]
    if zero == 3:
        units = [512, 16 + 256 + 256 + 16 + 1024, 512]
    padded = sum(units) if zero == 0 else sum(-(-unit // 32) * 32 for unit in units)
    plan = plan_of("zero3_one_stage", replications=every(zero=zero))
    assert static_bytes(plan) == {
        "PARAMETERS": 2 * padded // parameters,
        "GRADIENTS": 4 * padded // gradients,
        "OPTIMIZER": 12 * padded // optimizer,
    }


def test_what_waits_on_the_host_takes_no_memory_between_its_uses() -> None:
    assert static_bytes(plan_of("offload_all"))["PARAMETERS"] == 0
    assert static_bytes(plan_of("offload_all"))["OPTIMIZER"] == 0


def peak_activations(plan: Plan, rank: int) -> int:
    """Return the most bytes of activations that tasks hold at one time, in dispatch order."""
    device = plan.device_plans[rank]
    size = device.buffers.size_bytes * (device.buffers.memory_class == MemoryClass.ACTIVATIONS)
    held = peak = 0
    for task in device.tasks:
        held += sum(int(size[buffer]) for buffer in task.allocates)
        peak = max(peak, held)
        held -= sum(int(size[buffer]) for buffer in task.frees)
    return peak


def test_sequence_parallel_halves_the_activations_of_two_tensor_ranks() -> None:
    plans = [plan_of(name) for name in ("one_replica", "tp")]
    training = plans[0].training
    tokens = sum(training.micro_batch_sizes) * training.seq_len * 8  # int64; each rank looks up all of them
    whole, cut = (peak_activations(plan, 0) - tokens for plan in plans)
    assert cut == whole // 2, "gathered tensors are not kept but gathered again"


def test_offloading_and_recomputing_lower_the_peak_of_activations() -> None:
    plain = peak_activations(plan_of("zero0"), 1)
    assert peak_activations(plan_of("zero0", recomputations=(FULL,)), 1) < plain
    offloaded = (Offloading(segments=(4, 5, 6, 7, 8), what="activations"),)
    many = {"microbatches": 4, "rows": fused(2, 4)}
    plain = peak_activations(plan_of("zero0", **many), 1)
    assert peak_activations(plan_of("zero0", offloadings=offloaded, **many), 1) < plain


def test_rules_about_streams_reach_each_device_that_has_them() -> None:
    stated = (
        StreamRule(stream="dp", sms=16),
        StreamRule(stream="dp", priority=2),
        StreamRule(stream="pp", priority=1),
        StreamRule(stream="ep", priority=3),
    )
    plan = plan_of("zero0", stream_rules=stated)
    for device in plan.device_plans:
        rules = {device.streams[rule.stream]: (rule.priority, rule.sms) for rule in device.stream_rules}
        transfers = [name for name in device.streams if name.startswith(("send_", "recv_"))]
        assert rules == {"dp": (2, 16), **dict.fromkeys(transfers, (1, None))}


class ByFlops(FakeCostModel):
    """One ns per 100 FLOPs and one more; collectives and copies by size."""

    def operation(self, operation: Operation) -> Price:
        return exact_price(1 + operation.flops // 100)


def step_ns(name: str, *, collective: int = 0, host: int = 0, **changes: Any) -> int:
    """Return the time of two steps of a combination; `collective`, `host`: ns per byte."""
    cost_model = ByFlops(
        collective_ns=lambda kind, size, ranks: collective * size,
        host_copy_ns=lambda size: host * size,
    )
    timeline = simulate(plan_of(name, **changes), cost_model, steps=2)
    return max(end for *_, end in timeline.rows())


@pytest.mark.parametrize("name", CASES)
def test_the_plan_runs_to_its_end(name: str) -> None:
    assert step_ns(name, collective=3, host=2) >= step_ns(name, collective=0) > 0


def test_asynchronous_tensor_parallelism_hides_its_collectives() -> None:
    assert step_ns("tp_asynchronous", collective=1, rows=MIXED) < step_ns("tp", collective=1, rows=MIXED)


def test_a_small_ring_shift_hides_behind_attention_and_a_large_one_does_not() -> None:
    assert step_ns("cp_ring") < step_ns("cp_ring", collective=100)
