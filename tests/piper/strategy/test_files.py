"""Strategy files: ours, the reference's, and broken ones with file, line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piper.errors import StrategyError
from piper.strategy import load_strategy, write_directives
from simulator.plan import DevicePlan
from simulator.plan.check import check_plan
from tests.jobs import compiled

OURS: list[dict[str, Any]] = [
    {"op": "mesh", "axes": {"pp": 2, "dp": 2}},
    {"op": "place", "filter": {"PP": 0}, "at": {"pp": 0}, "units": 2},
    {"op": "place", "filter": {"PP": 1}, "at": {"pp": 1}, "units": 4},
    {"op": "replicate", "filter": {"PP": "*"}, "shard_optimizer": True},
    {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 4},
    {"op": "recompute", "filter": {"LAYER": "0-1"}},
    {"op": "order", "schedule": "gpipe"},
]


def written(tmp_path: Path, entries: object, name: str = "s.json") -> str:
    path = tmp_path / name
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries, indent=1))
    return str(path)


def computed(device: DevicePlan) -> list[str]:
    passes = {"F", "B", "BI", "BW"}
    return [code for task, code in zip(device.tasks, device.codes(), strict=True) if task.kind.name in passes]


def test_a_complete_file_says_everything_itself(tmp_path: Path) -> None:
    plan = compiled(written(tmp_path, OURS), global_batch=8)
    assert [sum(1 for s in plan.segments if s.stage == stage) for stage in (0, 1)] == [2, 4]
    assert plan.schedule == "gpipe"
    assert plan.training.micro_batch_sizes == (1, 1, 1, 1)
    assert plan.device_plans[0].buckets[0].zero == 1
    assert check_plan(plan) == []


def test_the_order_of_directives_in_the_file_does_not_matter(tmp_path: Path) -> None:
    forward = compiled(written(tmp_path, OURS), global_batch=8)
    backward = compiled(written(tmp_path, OURS[::-1], "r.json"), global_batch=8)
    assert forward.device_plans[1].codes() == backward.device_plans[1].codes()


def test_directives_survive_a_round_trip_through_the_plan(tmp_path: Path) -> None:
    plan = compiled("pp=2,dp=2,zero=1,recompute=full", global_batch=8)
    again = compiled(written(tmp_path, write_directives(plan.directives)), global_batch=8)
    assert again.device_plans[0].codes() == plan.device_plans[0].codes()
    assert again.directives == plan.directives


def test_yaml_is_read_too(tmp_path: Path) -> None:
    text = "- {op: mesh, axes: {pp: 2}}\n- {op: order, schedule: 1f1b}\n"
    assert load_strategy(written(tmp_path, text, "s.yaml")).stated.pp == 2


def test_a_reference_file_with_device_lists_loads(tmp_path: Path) -> None:
    slots = [[{"PP": 0, "MB": m, "PASS": p}] for m in range(2) for p in ("F", "B")]
    entries = [
        {"op": "place", "filter": {"PP": 0}, "devices": [0, 2], "stream": "pp_stream"},
        {"op": "place", "filter": {"PP": 1}, "devices": [1, 3]},
        {"op": "replicate", "filter": {"PP": 0}, "devices": [0, 2], "reduce_stream": "dp"},
        {"op": "replicate", "filter": {"PP": 1}, "devices": [1, 3], "reduce_stream": "dp"},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
        {"op": "order", "filters": slots},
        {"op": "order", "filters": [[{"PP": 1, "MB": m, "PASS": p}] for m in range(2) for p in ("F", "B")]},
    ]
    plan = compiled(written(tmp_path, entries))
    assert (plan.mesh.size("pp"), plan.mesh.size("dp")) == (2, 2)
    assert computed(plan.device_plans[0]) == ["0F0", "0B0", "0F1", "0B1"]
    assert check_plan(plan) == []


@pytest.mark.parametrize(
    ("change", "field", "fix"),
    [
        ({"op": "plase"}, "op", "did you mean 'place'"),
        ({"op": "mesh", "axes": {"pp": 0}}, "mesh.axes.pp", "such as 1"),
        ({"op": "mesh", "axes": {"zz": 2}}, "mesh.axes", "known: tp"),
        ({"op": "mesh", "axes": []}, "mesh.axes", '"pp": 4'),
        ({"op": "place", "filter": {"PP": "*"}, "at": {"pp": 0}}, "place.filter", '{"PP": 0}'),
        ({"op": "place", "filter": {"PP": 0}}, "place.at", '"at"'),
        ({"op": "place", "filter": {"PP": 0}, "at": {"dp": 0}}, "place.at", '"at"'),
        (
            {"op": "place", "filter": {"PP": 0}, "at": {"pp": 0}, "unit": 2},
            "place.unit",
            "did you mean 'units'",
        ),
        ({"op": "place", "at": {"pp": 0}}, "place.filter", '{"PP": 0}'),
        ({"op": "place", "filter": {"PP": 0}, "devices": []}, "place.devices", "[0, 1]"),
        (
            {"op": "replicate", "filter": {}, "shard_optimizer": 1},
            "replicate.shard_optimizer",
            "true or false",
        ),
        ({"op": "replicate", "filter": {}, "prefetch": 2}, "replicate.prefetch", "shard_params"),
        ({"op": "replicate", "filter": {}, "axis": "tp"}, "replicate.axis", "dp"),
        ({"op": "split", "filter": {}}, "split.num_microbatches", "8"),
        ({"op": "split", "num_microbatches": "8"}, "split.num_microbatches", "number"),
        ({"op": "split", "num_microbatches": 2, "microbatches": 2}, "split.microbatches", "keep"),
        ({"op": "recompute", "filter": {}, "ops": ["attention"]}, "recompute.ops", "selective"),
        ({"op": "recompute", "filter": {}, "mode": "all"}, "recompute.mode", "full"),
        ({"op": "order"}, "order.schedule", "1f1b"),
        ({"op": "order", "schedule": 3}, "order.schedule", "piper schedules"),
        ({"op": "order", "filters": [[]]}, "order.filters", "PASS"),
        ("text", "op", "op"),
    ],
)
def test_a_bad_directive_names_line_field_and_fix(
    tmp_path: Path, change: object, field: str, fix: str
) -> None:
    path = written(tmp_path, [OURS[0], change])
    with pytest.raises(StrategyError) as caught:
        load_strategy(path)
    assert caught.value.field == field
    assert fix in caught.value.fix
    assert caught.value.where.startswith(path + ":")
    assert int(caught.value.where.rpartition(":")[2]) > 1


def test_broken_json_names_line_and_column(tmp_path: Path) -> None:
    path = written(tmp_path, '[\n {"op": "mesh",,}\n]')
    with pytest.raises(StrategyError) as caught:
        load_strategy(path)
    assert caught.value.where == f"{path}:2:16"


def test_broken_yaml_names_line(tmp_path: Path) -> None:
    path = written(tmp_path, "- {op: mesh\n- x", "s.yaml")
    with pytest.raises(StrategyError) as caught:
        load_strategy(path)
    assert f"{path}:2" in caught.value.where


@pytest.mark.parametrize("text", ["{}", "[]", "3", ""])
def test_a_file_that_is_no_list_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(StrategyError):
        load_strategy(written(tmp_path, text))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(StrategyError, match="does not exist") as caught:
        load_strategy("nowhere.json")
    assert caught.value.value == "nowhere.json"


def test_two_meshes_conflict(tmp_path: Path) -> None:
    path = written(tmp_path, [OURS[0], {"op": "mesh", "axes": {"pp": 4}}])
    with pytest.raises(StrategyError, match="conflicts with the one at"):
        load_strategy(path)


def test_a_stage_on_replicas_must_be_replicated(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="no replicate claims it"):
        compiled(written(tmp_path, [d for d in OURS if d["op"] != "replicate"]), global_batch=8)


def test_a_stage_claimed_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"claims segment 0, which the replicate at .* already claims"):
        compiled(written(tmp_path, [*OURS, {"op": "replicate", "filter": {"PP": 0}}]), global_batch=8)


def test_unit_counts_must_add_up(tmp_path: Path) -> None:
    entries = [dict(d, units=2) if d["op"] == "place" else d for d in OURS]
    with pytest.raises(StrategyError, match="add up to the model's 6 units"):
        compiled(written(tmp_path, entries), global_batch=8)


def test_an_unknown_tag_lists_those_of_the_model(tmp_path: Path) -> None:
    entries = [*OURS[:-2], {"op": "recompute", "filter": {"LAYR": "*"}}, OURS[-1]]
    with pytest.raises(StrategyError) as caught:
        compiled(written(tmp_path, entries), global_batch=8)
    assert "LAYER" in caught.value.fix


def test_an_order_row_that_leaves_tasks_out_is_completed(tmp_path: Path) -> None:
    """One F on each rank is stated; the plan is that of 1F1B, which those do not contradict."""
    rows = [{"op": "order", "filters": [[{"PP": r, "MB": 0, "PASS": "F"}]]} for r in range(2)]
    found = compiled(written(tmp_path, [*OURS[:-1], *rows]), global_batch=8)
    whole = compiled(written(tmp_path, [*OURS[:-1], {"op": "order", "schedule": "1f1b"}]), global_batch=8)
    for plan, want in zip(found.device_plans, whole.device_plans, strict=True):
        assert plan.codes() == want.codes()


@pytest.mark.parametrize("homes", [[0, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]])
def test_without_an_order_stages_anywhere_run_in_an_order_that_the_data_give(
    tmp_path: Path, homes: list[int]
) -> None:
    """In a V, in blocks, uneven: no default schedule has these stages together."""
    places = [{"op": "place", "filter": {"PP": s}, "at": {"pp": rank}} for s, rank in enumerate(homes)]
    found = compiled(written(tmp_path, [OURS[0], *places, *OURS[3:5]]), global_batch=8)
    assert found.schedule == "custom"
    passes = [[code for code in plan.codes() if code[1] in "FB"] for plan in found.device_plans]
    for rank, codes in enumerate(passes):
        held = [stage for stage, home in enumerate(homes) if home == rank]
        assert sorted(codes) == sorted(f"{s}{kind}{m}" for s in held for kind in "FB" for m in range(4))


def test_without_an_order_the_default_is_1f1b_or_interleaved_1f1b(tmp_path: Path) -> None:
    for homes, name in [([0, 1], "1f1b"), ([1, 0], "1f1b"), ([0, 1, 0, 1], "interleaved_1f1b")]:
        places = [{"op": "place", "filter": {"PP": s}, "at": {"pp": rank}} for s, rank in enumerate(homes)]
        assert compiled(written(tmp_path, [OURS[0], *places, *OURS[3:5]]), global_batch=8).schedule == name


def test_an_order_that_contradicts_the_data_is_refused_at_its_line(tmp_path: Path) -> None:
    slots = [[{"PP": 0, "MB": 0, "PASS": kind}] for kind in ("B", "F")]
    with pytest.raises(StrategyError, match="0B0 of rank 0 -> 0F0 of rank 0") as caught:
        compiled(written(tmp_path, [*OURS[:-1], {"op": "order", "filters": slots}]), global_batch=8)
    assert "each waits for the next" in caught.value.rule


def test_an_order_row_that_names_another_ranks_stage_is_refused(tmp_path: Path) -> None:
    row = {"op": "order", "filters": [[{"PP": r, "MB": 0, "PASS": "F"}] for r in range(2)]}
    with pytest.raises(StrategyError, match="crosses device placement"):
        compiled(written(tmp_path, [*OURS[:-1], row]), global_batch=8)


@pytest.mark.parametrize(
    ("first", "second", "rule"),
    [
        ([0, 1], [1, 3], "shares device 1 with [0, 1]"),
        ([0, 1], [1, 0], "shares device 1 with [0, 1]"),
        ([0, 1], [2, 2], "repeats a device"),
    ],
)
def test_device_lists_that_are_no_groups_are_refused(
    first: list[int], second: list[int], rule: str, tmp_path: Path
) -> None:
    entries = [{"op": "place", "filter": {"PP": n}, "devices": d} for n, d in enumerate((first, second))]
    with pytest.raises(StrategyError) as caught:
        load_strategy(written(tmp_path, entries))
    assert (caught.value.field, caught.value.value) == ("place.devices", second)
    assert caught.value.rule == rule
    assert "devices of its own" in caught.value.fix


@pytest.mark.parametrize("name", ["", "  ", 3, None])
def test_an_order_without_a_name_is_refused(name: object, tmp_path: Path) -> None:
    with pytest.raises(StrategyError) as caught:
        load_strategy(written(tmp_path, [{"op": "order", "schedule": name}]))
    assert caught.value.field == "order.schedule"
    assert "piper schedules" in caught.value.fix


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "interleaved_zb"])
def test_a_schedule_may_split_backwards(name: str) -> None:
    plan = compiled(f"pp=2,dp=1,schedule={name}", global_batch=4)
    assert any(code.startswith("0BW") for code in plan.device_plans[0].codes())


def test_rows_that_split_backwards_split_them_where_they_say(tmp_path: Path) -> None:
    row = [[{"PP": 0, "MB": m, "PASS": letter}] for m, letters in enumerate(("F B", "F BI BW"))
           for letter in letters.split()]  # fmt: skip
    path = written(tmp_path, [
        {"op": "mesh", "axes": {"pp": 1}}, {"op": "place", "filter": {"PP": 0}, "at": {"pp": 0}},
        {"op": "split", "num_microbatches": 2}, {"op": "order", "filters": row},
    ])  # fmt: skip
    plan = compiled(path, global_batch=2)
    assert computed(plan.device_plans[0]) == ["0F0", "0B0", "0F1", "0BI1", "0BW1"]
    assert check_plan(plan) == []
