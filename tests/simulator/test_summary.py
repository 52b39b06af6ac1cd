from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from cost_models.errors import CostModelError, InternalError
from simulator import simulate, summarize
from simulator.conventions import model_flops_per_token
from simulator.plan import MemoryClass, ModelFacts, TaskKind
from tests.plans import Costs, FakeCostModel, PlanBuilder, one_f_one_b_rows, pipeline_plan

K = TaskKind
KEYS = {
    "model", "n_parameters", "n_gpus", "strategy", "schedule", "step_time_s", "makespan_s", "tokens_per_s",
    "tokens_per_s_per_gpu", "model_flops_per_step", "tflops_per_gpu", "mfu", "hfu", "mfu_convention",
    "peak_memory_bytes", "peak_reserved_bytes", "expandable_segments", "context_bytes", "communicator_bytes",
    "needed_memory_bytes", "device_memory_bytes", "fits",
    "bubble_fraction", "idle_fraction", "breakdown_s", "bubble_s", "ranks", "error_band", "provenance",
    "warnings",
}  # fmt: skip
PARTS = [
    "compute", "recompute", "exposed_tp", "exposed_dp", "exposed_pp", "exposed_ep", "exposed_cp",
    "exposed_offload", "bubble", "host", "optimizer", "straggler",
]  # fmt: skip


def result_of(plan, model, steps="auto"):
    return summarize(plan, simulate(plan, model, steps=steps), model)


@pytest.fixture
def plan():
    return pipeline_plan(
        one_f_one_b_rows(4, 8),
        costs=Costs(forward_ns=1000, backward_ns=2000, update_ns=500),
        replicas=2,
        clip=True,
    )


@pytest.fixture
def model():
    return FakeCostModel(transfer_ns=lambda *_: 100, collective_ns=lambda *_: 700, launch_ns=10, band=0.1)


def test_the_result_has_the_keys_of_the_contract_and_is_json(plan, model):
    result = json.loads(json.dumps(result_of(plan, model), allow_nan=False))
    assert set(result) == KEYS
    assert list(result["breakdown_s"]) == PARTS
    assert set(result["ranks"][0]) == {
        "pipeline_rank", "n_devices", "stages", "busy_s", "peak_memory_bytes", "peak_at_s",
        "memory_by_class_bytes", "peak_owners",
    }  # fmt: skip
    assert set(result["provenance"]) == {"measured", "interpolated", "fitted", "datasheet"}


def test_the_largest_owners_at_the_peak_are_named_and_are_part_of_it(plan, model):
    for rank in result_of(plan, model)["ranks"]:
        sizes = [owner["bytes"] for owner in rank["peak_owners"]]
        assert sizes == sorted(sizes, reverse=True)
        assert 0 < sum(sizes) <= rank["peak_memory_bytes"]
        assert all(owner["owner"] for owner in rank["peak_owners"])


def test_the_parts_of_the_breakdown_add_up_to_the_step(plan, model):
    result = result_of(plan, model)
    parts, step_s = result["breakdown_s"], result["step_time_s"]
    assert abs(math.fsum(parts.values()) - step_s) <= 1e-9 * step_s
    assert result["bubble_fraction"] == pytest.approx(parts["bubble"] / step_s)
    idle_s = step_s - parts["compute"] - parts["recompute"] - parts["optimizer"]
    assert sum(result["bubble_s"].values()) == pytest.approx(parts["bubble"])
    assert result["idle_fraction"] == pytest.approx(idle_s / step_s)
    assert result["ranks"][0]["busy_s"] == pytest.approx(8 * 3000e-9 + 1000e-9)


def test_rates_follow_from_tokens_ranks_and_the_step_time(plan, model):
    result = result_of(plan, model)
    tokens, step_s = 16, result["step_time_s"]
    assert result["n_gpus"] == 8
    assert result["tokens_per_s"] == pytest.approx(tokens / step_s)
    assert result["tokens_per_s_per_gpu"] == pytest.approx(tokens / step_s / 8)
    assert result["model_flops_per_step"] == tokens * (6 * 1 + 12 * 2 * 2 * 2 * 8)
    assert result["tflops_per_gpu"] == pytest.approx(result["model_flops_per_step"] / step_s / 8 / 1e12)
    assert result["mfu"] == pytest.approx(result["tflops_per_gpu"] * 1e12 / 1e30)


def test_the_palm_formula_gives_the_published_count_of_palm_540b():
    """PaLM, table 3 and appendix B: 118 layers, 48 heads of 256, sequence 2048, 540.35 B parameters."""
    palm = ModelFacts(
        name="palm", n_parameters=540_350_000_000, n_active_parameters=540_350_000_000, layers=118,
        hidden=18432, heads=48, head_dim=256, vocabulary=256_000,
    )  # fmt: skip
    flops = model_flops_per_token(palm, seq_len=2048)
    tokens_per_s, chips, peak_flops_per_s = 238.3e3, 6144, 275e12
    assert flops * tokens_per_s / (chips * peak_flops_per_s) == pytest.approx(0.462, abs=0.0015)


def test_recomputed_flops_of_all_ranks_raise_hfu_above_mfu():
    builder = PlanBuilder(replicas=4, n_active_parameters=1)
    builder.devices[0].compute("f", 100, microbatch=0, flops=900)
    builder.devices[0].compute("r", 100, K.R, microbatch=0, flops=50, kernels=2)
    model = FakeCostModel(peaks={"bf16": 1e14})
    result = result_of(builder.build(), model)
    available_flops = result["step_time_s"] * 4 * 1e14
    assert result["hfu"] - result["mfu"] == pytest.approx(4 * 2 * 50 / available_flops)


def test_memory_of_the_worst_rank_decides_whether_the_plan_fits(plan, model):
    model.context_bytes = 1000
    result = result_of(plan, model)
    assert result["peak_memory_bytes"] == max(rank["peak_memory_bytes"] for rank in result["ranks"]) == 340
    assert result["peak_reserved_bytes"] == 2 << 20
    for rank in result["ranks"]:
        assert sum(rank["memory_by_class_bytes"].values()) == rank["peak_memory_bytes"]
    model.device_memory_bytes = (2 << 20) + 1000
    assert result_of(plan, model)["fits"] is True
    model.device_memory_bytes -= 1
    tight = result_of(plan, model)
    assert tight["fits"] is False
    assert any(warning.startswith("does not fit") for warning in tight["warnings"])


def test_communicators_take_memory_once_per_group_and_per_transfer_direction(plan, model):
    model.bytes_per_communicator = 100
    result = result_of(plan, model)
    groups = {
        g for d in plan.device_plans for g in d.tasks.group.tolist() if g >= 0 and plan.groups[g].size > 1
    }
    streams = [s for s in plan.device_plans[0].streams if s.startswith(("send", "recv"))]
    assert result["communicator_bytes"] >= 100 * len(streams) > 0
    assert result["communicator_bytes"] <= 100 * (len(streams) + len(groups))
    assert result["needed_memory_bytes"] >= result["peak_reserved_bytes"] + 100 * len(streams)


def test_the_error_band_scales_the_step_by_the_bands_of_its_prices(plan, model):
    result = result_of(plan, model)
    band = result["error_band"]
    assert band["step_time_low_s"] == pytest.approx(0.9 * result["step_time_s"])
    assert band["step_time_high_s"] == pytest.approx(1.1 * result["step_time_s"])
    assert "same direction" in band["basis"]


def test_provenance_is_the_share_of_predicted_busy_time():
    builder = PlanBuilder(pipeline_ranks=2)
    builder.devices[0].compute("a", 60, microbatch=0)
    builder.transfer(0, 1)
    result = result_of(builder.build(), FakeCostModel(transfer_ns=lambda *_: 20))
    assert result["provenance"] == pytest.approx(
        {"measured": 0.6, "interpolated": 0.0, "fitted": 0.0, "datasheet": 0.4}
    )


def test_a_plan_without_any_cost_has_no_rates_and_no_broken_numbers():
    builder = PlanBuilder()
    builder.devices[0].compute("a", 0, microbatch=0)
    result = result_of(builder.build(), FakeCostModel())
    assert (result["step_time_s"], result["tokens_per_s"], result["mfu"]) == (0.0, 0.0, 0.0)
    assert result["error_band"]["step_time_high_s"] == 0.0


def test_a_cost_model_without_hardware_has_no_mfu(plan):
    result = result_of(plan, FakeCostModel(peaks={}))
    assert (result["mfu"], result["hfu"]) == (None, None)
    assert result["tflops_per_gpu"] > 0


def test_a_dtype_without_a_peak_is_refused_by_name(plan):
    with pytest.raises(CostModelError) as caught:
        result_of(plan, FakeCostModel(peaks={"fp32": 1e13, "bf17": 1e14}))
    assert (caught.value.field, caught.value.value) == ("peak_flops_per_s", "bf16")
    assert caught.value.fix == "did you mean 'bf17'?"


def test_mfu_above_one_is_our_own_fault(plan):
    with pytest.raises(InternalError, match=r"MFU = .* > 1"):
        result_of(plan, FakeCostModel(peaks={"bf16": 1.0}))


def test_mfu_above_one_is_a_warning_where_the_devices_execute_fewer_flops_than_the_convention_counts():
    builder = PlanBuilder(n_active_parameters=1)
    builder.devices[0].compute("f", 1000, microbatch=0, flops=900)
    result = result_of(builder.build(), FakeCostModel(peaks={"bf16": 1e9}))
    assert result["mfu"] > 1
    assert any("palm convention" in warning for warning in result["warnings"])


def test_notices_of_the_plan_and_warnings_of_the_timeline_are_passed_on(plan, model):
    noticed = replace(plan, notices=("zero=1 with one shard",))
    timeline = replace(simulate(noticed, model), warnings=("not settled",))
    assert summarize(noticed, timeline, model)["warnings"] == ["zero=1 with one shard", "not settled"]


def exchanging(streams):
    """Return a plan of 2 replicas x 2 ranks of tensor parallelism that gathers on each of `streams`."""
    builder = PlanBuilder(replicas=2, tp=2)
    device = builder.devices[0]
    groups = [builder.group("tp0", "tp", [0]), builder.group("norms", "tp", [0])]
    for part, (stream, group) in enumerate(streams):
        device.task(f"{part}", K.ALL_GATHER, stream, microbatch=0, phase=K.F, part=part, group=groups[group])
    device.compute("f", 100, microbatch=0, flops=10**6)
    device.compute("r", 100, K.R, microbatch=0, flops=10**5)
    return builder.build()


@pytest.mark.parametrize(
    ("streams", "communicators"),
    [
        ([], 0),
        ([("tp", 0)] * 5, 1),
        ([("tp", 0), ("tp", 1)], 1),
        ([("tp", 0), ("async", 0)], 2),
        ([("tp", 0), ("async", 1), ("async", 0)], 2),
    ],
)
def test_groups_of_the_same_ranks_share_a_communicator_on_one_stream_and_never_over_streams(
    streams, communicators
):
    result = result_of(exchanging(streams), FakeCostModel(bytes_per_communicator=100))
    assert result["communicator_bytes"] == 100 * communicators


def test_transfers_to_several_peers_on_one_stream_take_a_communicator_each():
    builder = PlanBuilder(pipeline_ranks=3)
    for peer in (1, 2):
        builder.devices[0].task(f"s{peer}", K.SEND_F, "out", peer=peer, edge=0, microbatch=0, size_bytes=1)
        builder.devices[peer].task("r", K.RECV_F, "in", peer=0, edge=0, microbatch=0, size_bytes=1)
    result = result_of(builder.build(), FakeCostModel(bytes_per_communicator=100))
    assert result["communicator_bytes"] == 200


def test_flops_of_ranks_that_share_a_replica_count_for_each_of_them():
    result = result_of(exchanging([("tp", 0)]), FakeCostModel(peaks={"bf16": 1e14}))
    available_flops = result["step_time_s"] * 4 * 1e14
    assert result["n_gpus"] == 4
    assert result["hfu"] - result["mfu"] == pytest.approx(4 * 10**5 / available_flops)
    assert [rank["n_devices"] for rank in result["ranks"]] == [4]


def test_ranks_list_every_stage_that_they_host():
    builder = PlanBuilder(pipeline_ranks=2)
    for device, stages in zip(builder.devices, ((0, 3), (1, 2)), strict=True):
        device.stages = stages
        for stage in stages:
            device.compute(f"f{stage}", 5, microbatch=0, stage=stage)
    assert [rank["stages"] for rank in result_of(builder.build(), FakeCostModel())["ranks"]] == [
        [0, 3],
        [1, 2],
    ]


def test_gathered_parameters_and_exchanged_activations_are_classes_of_their_own_at_the_peak():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.buffer("weights", 100, MemoryClass.PARAMETERS, persistent=True)
    device.buffer("gathered", 40, MemoryClass.BUCKETS)
    device.buffer("tokens", 7, MemoryClass.COMMUNICATION)
    group = builder.group("ep0", "ep", [0])
    device.task("g", K.ALL_GATHER, "dp", bucket=device.bucket("d"), group=builder.group("dp0", "dp", [0]),
                allocates=["gathered"])  # fmt: skip
    device.task("a", K.ALL_TO_ALL, "ep", microbatch=0, phase=K.F, group=group, allocates=["tokens"])
    device.compute("f", 5, microbatch=0, waits=["g", "a"], frees=["gathered", "tokens"])
    (rank,) = result_of(builder.build(), FakeCostModel(), steps=1)["ranks"]
    classes = {name: size for name, size in rank["memory_by_class_bytes"].items() if size}
    assert classes == {"parameters": 100, "buckets": 40, "communication": 7}
    assert rank["peak_memory_bytes"] == 147
