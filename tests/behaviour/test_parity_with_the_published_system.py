"""What the published system's parity list asks of directives, passes and plans, where no other test holds it.

Refusals of the language are in `tests/piper/strategy/test_error_texts.py`, whole files of that system in
`test_reference_files.py` there; its lowering checks in
`test_lowering_checks.py`, rows in `tests/piper/schedules`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from piper.graph import CapturedModel
from simulator.plan import DevicePlan, Parameter, Plan, Task, TaskKind
from simulator.plan.check import check_plan
from tests.graphs import transformer
from tests.jobs import compiled
from tests.models import captured
from tests.strategies import Draft, compile_drawn

K = TaskKind
Entry = dict[str, Any]
PASSES = (K.F, K.B, K.BI, K.BW)
REPLICATE: Entry = {"op": "replicate", "filter": {"PP": "*"}}
ROW = ("0F0", "0F1", "0BI0", "0B1", "0BW0")


def lowered(*directives: Entry, model: CapturedModel | None = None, **job: Any) -> Plan:
    """Compile a hand-made model, two replicas with two microbatches each; the plan is legal."""
    job = {"dp": 2, "global_batch": 4} | job
    draft_of = Draft if model is None else _with(model)
    plan = compile_drawn(draft_of(choose=Random(0), clip=None, directives=list(directives), **job))
    assert check_plan(plan) == []
    return plan


def _with(model: CapturedModel) -> type[Draft]:
    class Given(Draft):
        def model(self, micro_batch: int) -> CapturedModel:
            assert micro_batch == model.micro_batch
            return model

    return Given


def places(*groups: list[int], **fields: Any) -> list[Entry]:
    return [
        {"op": "place", "filter": {"PP": stage}, "devices": group, **fields}
        for stage, group in enumerate(groups)
    ]


def split(count: int = 2) -> Entry:
    return {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": count}


def order(*codes: str) -> Entry:
    def named(code: str) -> Entry:
        return {"PP": int(code[0]), "MB": int(code[-1]), "PASS": code[1:-1]}

    return {"op": "order", "filters": [[named(code)] for code in codes]}


def tasks(device: DevicePlan, *kinds: TaskKind) -> list[tuple[str, Task]]:
    pairs = zip(device.codes(), device.tasks, strict=True)
    return [(code, task) for code, task in pairs if task.kind in (kinds or tuple(K))]


def counted(device: DevicePlan, kind: TaskKind) -> int:
    return len(tasks(device, kind))


# place


def test_pipeline_ranks_are_numbered_by_their_devices_not_by_their_stages() -> None:
    plan = lowered(*places([2, 3], [0, 1]), split(), REPLICATE, pp=2, homes=(1, 0))
    assert [device.stages for device in plan.device_plans] == [(1,), (0,)]
    assert {task.peer for _, task in tasks(plan.device_plans[0], K.RECV_F, K.SEND_B)} == {1}


def test_stages_with_one_device_list_exchange_nothing_and_others_one_pair_per_value_and_direction() -> None:
    plan = lowered(*places([0, 1], [0, 1], [2, 3]), split(), REPLICATE, pp=2, homes=(0, 0, 1))
    moved = Counter(
        task.kind
        for device in plan.device_plans
        for _, task in tasks(device, K.SEND_F, K.RECV_F, K.SEND_B, K.RECV_B)
    )
    assert moved == dict.fromkeys((K.SEND_F, K.RECV_F, K.SEND_B, K.RECV_B), 2)


def test_the_stream_that_place_names_is_all_streams_of_transfers_in_rules() -> None:
    """Sends and receives keep streams of their own: on one, 1F1B hangs when sends are rendezvous."""
    rule = {"op": "priority", "stream": "boundary", "level": 1}
    plan = lowered(*places([0, 1], [2, 3], stream="boundary"), split(), REPLICATE, rule, pp=2, homes=(0, 1))
    device = plan.device_plans[0]
    streams = {task.stream for _, task in tasks(device, K.SEND_F, K.RECV_B)}
    assert len(streams) == 2
    assert {found.stream for found in device.stream_rules} == streams


def test_a_value_used_two_stages_later_goes_there_directly() -> None:
    """Sends that are not grouped: a rank between them never waits for both ends."""
    model = captured(layers=6)
    segments = list(model.segments)
    segments[4] = replace(
        segments[4], inputs=((3, 0), (0, 0)), inputs_saved=(True, True), inputs_saved_for_weights=(True, True)
    )
    model = replace(model, segments=tuple(segments))
    plan = compiled("pp=4", global_batch=4, model=lambda _: model)
    assert check_plan(plan) == []
    peers = {task.peer for _, task in tasks(plan.device_plans[0], K.SEND_F)}
    assert peers == {1, 2}
    assert {task.peer for _, task in tasks(plan.device_plans[2], K.SEND_B)} == {0, 1}


# replicate


@pytest.mark.parametrize(
    ("state", "gathers", "scatters", "reductions"),
    [
        ({}, 0, 0, 1),
        ({"reduce": "microbatch"}, 0, 0, 2),
        ({"shard_optimizer": True}, 1, 1, 0),
        ({"shard_grads": True}, 1, 2, 0),
        ({"shard_params": True, "bucket_mb": 1}, 1, 2, 0),
    ],
)
def test_replicas_reduce_and_gather_as_often_as_their_state_is_cut(
    state: Entry, gathers: int, scatters: int, reductions: int
) -> None:
    """One bucket, F and B of two microbatches in turn; with cut parameters all four passes share a gather."""
    row = order("0F0", "0B0", "0F1", "0B1")
    device = lowered(*places([0, 1]), split(), REPLICATE | state, row).device_plans[0]
    assert len(device.buckets) == 1
    found = [counted(device, kind) for kind in (K.ALL_GATHER, K.REDUCE_SCATTER, K.ALL_REDUCE)]
    assert found == [gathers, scatters, reductions]


CUT = {"shard_params": True, "shard_grads": True}


def test_passes_of_a_bucket_that_follow_each_other_share_its_gather_and_backwards_its_scatter() -> None:
    """All forwards, then all backwards: one gather and one scatter. In turn: a scatter for each backward."""
    one_bucket = REPLICATE | CUT | {"bucket_mb": 1000}
    job: dict[str, Any] = {"layers": 4, "global_batch": 6}
    for codes, scatters in [
        (("0F0", "0F1", "0F2", "0B0", "0B1", "0B2"), 1),
        (("0F0", "0B0", "0F1", "0B1", "0F2", "0B2"), 3),
    ]:
        device = lowered(*places([0, 1]), split(3), one_bucket, order(*codes), **job).device_plans[0]
        assert counted(device, K.ALL_GATHER) == 1
        assert counted(device, K.REDUCE_SCATTER) == scatters


def test_of_several_buckets_only_the_last_forward_and_its_backward_share_a_gather() -> None:
    """F, F, B, B of six units: two forwards in a row begin and end with different buckets."""
    row = order("0F0", "0F1", "0B0", "0B1")
    device = lowered(*places([0, 1]), split(), REPLICATE | CUT, row, layers=4).device_plans[0]
    assert len(device.buckets) == 6
    gathers = Counter(code[1:].partition(":")[2].partition("/")[0] for code, _ in tasks(device, K.ALL_GATHER))
    assert gathers == {"F0": 6, "F1": 6, "B0": 5, "B1": 6}
    assert counted(device, K.REDUCE_SCATTER) == 12


def weighty(kibibytes: int, embedding: int) -> CapturedModel:
    """The toy model with layers, and an embedding, of so many KiB of fp32 gradients."""
    model = captured(layers=6)

    def sized(parameter: Parameter) -> Parameter:
        size = embedding if parameter.name == "embed.weight" else kibibytes
        return parameter if parameter.name.endswith("bias") else replace(parameter, shape=(size * 256,))

    return replace(model, parameters=tuple(map(sized, model.parameters)))


@pytest.mark.parametrize("count", [1, 2])
def test_buckets_are_filled_to_their_size_and_do_not_depend_on_microbatches(count: int) -> None:
    """Six layers of 400 KiB, two in a bucket of 1 MiB; an embedding of 3 MiB has one of its own."""
    stated = REPLICATE | {"bucket_size": 1, "reduce_stream": "r"}
    model = weighty(400, 3000)
    plan = lowered(*places([0, 1]), split(count), stated, model=model, global_batch=2 * count, layers=6)
    device = plan.device_plans[0]
    held = [bucket.parameters for bucket in device.buckets]
    assert sorted(len([name for name in names if "bias" not in name]) for names in held) == [1, 1, 2, 2, 2]
    assert ("embed.weight",) in held
    assert len({name for names in held for name in names}) == sum(map(len, held)) == len(model.parameters)
    assert counted(device, K.ALL_REDUCE) == counted(device, K.UPDATE) == 5


def test_buckets_live_together_with_split_backwards() -> None:
    stated = REPLICATE | CUT | {"bucket_size": 1}
    device = lowered(*places([0, 1]), split(), stated, order(*ROW), model=weighty(400, 3000)).device_plans[0]
    scattered = Counter(task.bucket for _, task in tasks(device, K.REDUCE_SCATTER))
    assert set(scattered) == set(range(len(device.buckets)))
    assert all(count in {1, 2} for count in scattered.values())


def test_buckets_whose_state_is_cut_and_others_on_one_rank_are_all_updated() -> None:
    cut = {"op": "replicate", "filter": {"PP": 0}, "shard_grads": True}
    whole = {"op": "replicate", "filter": {"PP": 1}}
    device = lowered(*places([0, 1], [0, 1]), split(), cut, whole).device_plans[0]
    assert sorted(task.bucket for _, task in tasks(device, K.UPDATE)) == [0, 1]
    assert [counted(device, kind) for kind in (K.REDUCE_SCATTER, K.ALL_REDUCE, K.ALL_GATHER)] == [2, 1, 1]


# shard, shard_tensor


EXPERTS: Entry = {"op": "shard", "filter": {"EP": "*"}, "devices": [0, 1], "stream": "a2a"}


def test_experts_exchange_on_both_sides_in_forward_and_in_whole_and_input_backwards_only() -> None:
    job: dict[str, Any] = {"regions": "experts", "layers": 2}
    plan = lowered(*places([0, 1]), split(), REPLICATE, EXPERTS, order(*ROW), **job)
    device = plan.device_plans[0]
    exchanges = [code for code, _ in tasks(device, K.ALL_TO_ALL)]
    assert Counter(code.partition("/")[0] for code in exchanges) == dict.fromkeys(
        ("0ALL_TO_ALL:F0", "0ALL_TO_ALL:F1", "0ALL_TO_ALL:B0", "0ALL_TO_ALL:B1"), 4
    )
    assert counted(device, K.BW) == 1


def test_gradients_of_owned_experts_are_not_reduced_wherever_shard_stands_in_the_file() -> None:
    job: dict[str, Any] = {"regions": "experts", "layers": 1}
    behind = lowered(*places([0, 1]), split(), REPLICATE, EXPERTS, **job)
    before = lowered(EXPERTS, *places([0, 1]), split(), REPLICATE, **job)
    for plan in (behind, before):
        device = plan.device_plans[0]
        assert {device.buckets[task.bucket].kind for _, task in tasks(device, K.ALL_REDUCE)} == {"dense"}
        assert {device.buckets[task.bucket].kind for _, task in tasks(device, K.UPDATE)} == {
            "dense",
            "expert",
        }
    assert behind.device_plans[0].codes() == before.device_plans[0].codes()


def test_experts_that_begin_a_stage_exchange_on_that_side_too() -> None:
    model = transformer(layers=1, experts=True)
    units = [0, 1, 1, 1, 1, 1, 2, 2, 3]
    retagged = tuple(
        replace(segment, tags=tuple(sorted((dict(segment.tags) | {"PP": unit}).items())))
        for segment, unit in zip(model.segments, units, strict=True)
    )
    stage = [p | {"units": 2} for p in places([0, 1], [2, 3])]
    shards = {"op": "shard", "filter": {"EP": "*"}, "degree": 2}
    model = replace(model, segments=retagged)
    plan = lowered(*stage, split(), REPLICATE, shards, model=model, pp=2, homes=(0, 1), layers=1)
    assert [counted(device, K.ALL_TO_ALL) for device in plan.device_plans] == [0, 2 * 2 * 2]


def test_tensor_regions_reduce_in_whole_and_input_backwards_and_not_for_weights() -> None:
    cut = {"op": "shard_tensor", "filter": {"TP": "*"}, "sequence_parallel": False}
    mesh = {"op": "mesh", "axes": {"tp": 2}}
    job: dict[str, Any] = {"regions": "dense", "layers": 1, "dp": 1, "global_batch": 2}
    device = lowered(mesh, split(), cut, order(*ROW), **job).device_plans[0]
    codes = [code for code, _ in tasks(device, K.ALL_REDUCE)]
    assert Counter(code.partition("/")[0] for code in codes) == dict.fromkeys(
        ("0ALL_REDUCE:F0", "0ALL_REDUCE:F1", "0ALL_REDUCE:B0", "0ALL_REDUCE:B1"), 2
    )


# split, order, split backwards


def test_microbatches_share_parameters_gradients_and_one_update() -> None:
    one, four = (
        lowered(*places([0, 1]), split(count), REPLICATE, global_batch=2 * count).device_plans[0]
        for count in (1, 4)
    )
    assert [counted(device, K.F) for device in (one, four)] == [1, 4]
    assert [counted(device, K.UPDATE) for device in (one, four)] == [1, 1]
    assert one.buckets == four.buckets


def test_whole_and_split_backwards_stand_in_one_row_in_its_order() -> None:
    device = lowered(*places([0, 1]), split(), REPLICATE, order(*ROW)).device_plans[0]
    assert tuple(code for code, _ in tasks(device, *PASSES)) == ROW
    last = [code for code, _ in tasks(device)]
    assert last.index("0BW0") < last.index("0ALL_REDUCE@dense0") < last.index("0UPDATE@dense0")


def test_transfers_do_not_hold_back_the_passes_of_the_next_slot() -> None:
    """No pass waits for a send, and a receive is posted before the slot that stands before its own."""
    named = {"op": "order", "schedule": "dualpipe_v"}
    groups = places([0, 1], [2, 3], [2, 3], [0, 1])
    plan = lowered(*groups, split(4), REPLICATE, named, pp=2, homes=(0, 1, 1, 0), global_batch=8)
    for device in plan.device_plans:
        listed = list(device.tasks)
        before: list[int] = []
        for number, task in enumerate(listed):
            if task.kind in PASSES:
                kinds = {wait: listed[wait].kind for wait in task.waits}
                assert not {K.SEND_F, K.SEND_B} & set(kinds.values())
                received = [wait for wait, kind in kinds.items() if kind in {K.RECV_F, K.RECV_B}]
                assert all(wait < before[-1] for wait in received if len(before) > 1)
                before.append(number)


def test_a_row_orders_single_segments_so_that_microbatches_take_turns_within_a_stage() -> None:
    """Of a model of an embedding, four layers and a head: rows as the published system writes them."""

    def named(layer: int, microbatch: int, letter: str) -> Entry:
        return {"PP": 0, "LAYER": layer, "MB": microbatch, "PASS": letter}

    turns = [[named(layer, m, "F")] for layer in range(4) for m in (0, 1)]
    overlap = [[named(layer, 0, "B"), named(layer, 1, "BI")] for layer in (3, 2, 1, 0)]
    late = [[{"PP": 0, "MB": 1, "PASS": "BW"}]]
    row = {"op": "order", "filters": turns + overlap + late}
    device = lowered(*places([0, 1]), split(), REPLICATE, row).device_plans[0]
    codes = [code for code, _ in tasks(device, *PASSES)]
    layers = [code for code in codes if code.partition("/")[2] in set("1234")]
    assert layers == [
        *(f"0F{m}/{layer}" for layer in (1, 2, 3, 4) for m in (0, 1)),
        *(f"0{code}/{layer}" for layer in (4, 3, 2, 1) for code in ("B0", "BI1")),
    ]
    assert codes.index("0F0/0") < codes.index("0F0/1")
    assert codes.index("0F0/4") < codes.index("0F0/5") < codes.index("0B0/5") < codes.index("0B0/4")
    assert codes.index("0BI1/0") < codes.index("0BW1")


def test_slots_of_parts_hide_the_exchanges_of_one_microbatch_behind_the_compute_of_another() -> None:
    """The published way to overlap all-to-alls: experts of one microbatch beside attention of the other."""

    def expert(layer: int, microbatch: int, letter: str) -> Entry:
        return {"PP": 0, "EP": layer, "MB": microbatch, "PASS": letter}

    row = {
        "op": "order",
        "filters": [[expert(0, 0, "F")], [expert(1, 0, "F"), expert(0, 1, "F")], [expert(1, 1, "F")]],
    }
    job: dict[str, Any] = {"regions": "experts", "layers": 2}
    device = lowered(*places([0, 1]), split(), REPLICATE, EXPERTS, row, **job).device_plans[0]
    codes = [code for code, _ in tasks(device)]
    both = [codes.index(code) for code in ("0F0/13", "0F1/6")]
    assert codes.index("0F0/6") < min(both) < max(both) < codes.index("0F1/13")
    assert counted(device, K.ALL_TO_ALL) == 2 * 2 * 2 * 2


def test_tasks_of_one_slot_do_not_wait_for_each_other() -> None:
    slot = [{"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "B"}]
    alone = [[{"PP": 0, "MB": 0, "PASS": "F"}], [{"PP": 0, "MB": 1, "PASS": "B"}]]
    row = {"op": "order", "filters": [alone[0], slot, alone[1]]}
    device = lowered(*places([0, 1]), split(), REPLICATE, row).device_plans[0]
    at = {code: number for number, (code, _) in enumerate(tasks(device))}
    assert at["0F0"] < min(at["0F1"], at["0B0"]) < max(at["0F1"], at["0B0"]) < at["0B1"]
    for one, other in (("0F1", "0B0"), ("0B0", "0F1")):
        assert at[other] not in list(device.tasks)[at[one]].waits


# plans


def test_a_shared_parameter_is_summed_over_the_stages_on_other_devices_only() -> None:
    apart = lowered(*places([0, 1], [2, 3], [4, 5]), split(), REPLICATE, tied=True, pp=3, homes=(0, 1, 2))
    sums = [[code for code, _ in tasks(device) if "@tied" in code] for device in apart.device_plans]
    assert sums == [["0ALL_REDUCE@tied0"], [], ["2ALL_REDUCE@tied0"]]
    assert ("pp", ((0, 4), (1, 5))) in [(group.axis, group.members) for group in apart.groups]
    together = lowered(*places([0, 1], [0, 1]), split(), REPLICATE, tied=True, homes=(0, 0))
    assert not [code for code in together.device_plans[0].codes() if "@tied" in code]


def test_a_device_list_over_which_regions_are_cut_is_the_tensor_axis_of_every_stage() -> None:
    """As in the published system's files: equal inputs on both members, no reduction over replicas."""
    cuts = [
        {"op": "shard_tensor", "filter": {"PP": stage, "TP": "*"}, "devices": group, "stream": "tp_stream"}
        for stage, group in enumerate(([0, 1], [2, 3]))
    ]
    job: dict[str, Any] = {"regions": "dense", "layers": 2, "pp": 2, "dp": 1, "global_batch": 2}
    plan = lowered(*places([0, 1], [2, 3]), *cuts, split(), homes=(0, 1), **job)
    assert dict(plan.mesh.axes) == {"tp": 2, "cp": 1, "dp": 1, "pp": 2}
    for device in plan.device_plans:
        streams = {device.streams[task.stream] for _, task in tasks(device, K.ALL_REDUCE)}
        assert streams == {"tp_stream"}
        assert counted(device, K.ALL_REDUCE) == 2 * 2 * 2


def test_sends_follow_their_pass_at_once_and_reductions_the_last_backward_of_their_bucket() -> None:
    """The order of dispatch, the same on all members of a group as they share one device plan."""
    named = {"op": "order", "schedule": "interleaved_1f1b"}
    groups = places([0, 1], [2, 3], [0, 1], [2, 3])
    plan = lowered(*groups, split(), REPLICATE, named, pp=2, homes=(0, 1, 0, 1), global_batch=4)
    assert plan.replicas == 2
    assert len(plan.device_plans) == 2
    for device in plan.device_plans:
        listed = tasks(device)
        for number, (_, task) in enumerate(listed):
            if task.kind in {K.SEND_F, K.SEND_B}:
                before = listed[number - 1][1]
                assert (before.stage, before.microbatch) == (task.stage, task.microbatch)
        reduced = [number for number, (_, task) in enumerate(listed) if task.kind is K.ALL_REDUCE]
        backward = [number for number, (_, task) in enumerate(listed) if task.kind is K.B]
        assert reduced[0] < backward[-1] < reduced[1]
