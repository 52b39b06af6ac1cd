"""Plan files: exact both ways, one canonical form, and an error that names the place for every fault."""

import gzip
import json
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.ops import Operation, OpKind
from simulator.errors import PlanError
from simulator.plan import (
    BufferTable,
    Mesh,
    Parameter,
    Plan,
    StreamRuleFacts,
    Task,
    TaskKind,
    TaskTable,
    Work,
)
from simulator.plan.codec import bytes_to_plan, load_plan, plan_hash, plan_to_bytes, save_plan
from simulator.plan.plan import SCHEMA_VERSION
from tests.simulator.plan.pipelines import pipeline_plan

FORMAT = Path(__file__).parents[3] / "docs" / "plan-format.md"


def assert_same(one: object, other: object, path: str = "plan") -> None:
    """Compare field by field, arrays with their dtype."""
    assert type(one) is type(other), path
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, path
        assert one.tolist() == other.tolist(), path
    elif is_dataclass(one):
        for item in fields(one):
            assert_same(getattr(one, item.name), getattr(other, item.name), f"{path}.{item.name}")
    elif isinstance(one, tuple):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    else:
        assert one == other, path


texts = st.text(max_size=8)
numbers = st.integers(0, 2**40)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
operations = st.builds(
    Operation,
    kind=st.sampled_from(OpKind),
    name=texts,
    shape=st.lists(numbers, max_size=4).map(tuple),
    dtype=texts,
    flops=numbers,
    bytes=numbers,
    count=st.integers(1, 99),
    causal=st.booleans(),
    direction=texts,
)


def _some_of(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, count - 1), max_size=2).map(tuple) if count else st.just(())


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans that need not be legal, but whose indices are in range."""
    base = pipeline_plan(draw(st.integers(1, 3)), draw(st.integers(1, 3)), clip=draw(st.booleans()))
    works = draw(
        st.lists(st.builds(Work, label=texts, operations=st.lists(operations, max_size=2).map(tuple)))
    )
    named = st.builds(
        Parameter, name=texts, shape=st.lists(numbers, max_size=3).map(tuple), trainable=st.booleans()
    )
    num_buffers = draw(st.integers(0, 4))
    some_buffers = (
        st.lists(st.integers(0, num_buffers - 1), max_size=2).map(tuple) if num_buffers else st.just(())
    )
    num_tasks = draw(st.integers(0, 4))
    some_tasks = _some_of(num_tasks)
    tasks = st.builds(
        Task,
        kind=st.sampled_from([TaskKind.NORM, TaskKind.UPDATE]),
        stream=st.integers(0, 1),
        work=st.integers(-1, len(works) - 1),
        size_bytes=numbers,
        waits=some_tasks,
        previous_step_waits=some_tasks,
        allocates=some_buffers,
        reads=some_buffers,
        frees=some_buffers,
    )
    columns = {
        "size_bytes": draw(st.lists(numbers, min_size=num_buffers, max_size=num_buffers)),
        "memory_class": draw(st.lists(st.integers(0, 6), min_size=num_buffers, max_size=num_buffers)),
        "persistent": draw(st.lists(st.booleans(), min_size=num_buffers, max_size=num_buffers)),
    }
    device = replace(
        base.device_plans[0],
        buffers=BufferTable.of(
            size_bytes=columns["size_bytes"],
            memory_class=columns["memory_class"],
            persistent=columns["persistent"],
            owners=tuple(draw(st.lists(texts, min_size=num_buffers, max_size=num_buffers))),
        ),
        tasks=TaskTable.from_tasks(draw(st.lists(tasks, min_size=num_tasks, max_size=num_tasks))),
    )
    optional = st.none() | st.integers(1, 99)
    rules = st.builds(StreamRuleFacts, stream=st.integers(0, 1), priority=optional, sms=optional)
    device = replace(
        device,
        stream_rules=tuple(draw(st.lists(rules, max_size=2, unique_by=lambda rule: rule.stream))),
    )
    others = tuple(
        replace(other, tasks=TaskTable.from_tasks([replace(task, work=-1) for task in other.tasks]))
        for other in base.device_plans[1:]
    )
    clip = draw(st.none() | st.floats(1e-6, 1e6))
    return replace(
        base,
        strategy=draw(texts),
        directives=tuple(draw(st.lists(st.dictionaries(texts, json_values, max_size=3), max_size=2))),
        training=replace(base.training, clip_grad_norm=clip),
        parameters=tuple(draw(st.lists(named, max_size=3))),
        works=tuple(works),
        device_plans=(device, *others),
        notices=tuple(draw(st.lists(texts, max_size=2))),
    )


@given(plan=plans())
@settings(max_examples=60)
def test_a_plan_survives_its_file_form_exactly(plan):
    data = plan_to_bytes(plan)
    again = bytes_to_plan(data)
    assert_same(again, plan)
    assert plan_to_bytes(again) == data
    assert plan_hash(again) == plan_hash(plan)


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_a_hand_built_plan_survives_the_disk_and_equal_plans_give_equal_bytes(tmp_path, name):
    plan = pipeline_plan(3, 5)
    save_plan(plan, tmp_path / name)
    assert_same(load_plan(tmp_path / name), plan)
    first = (tmp_path / name).read_bytes()
    save_plan(pipeline_plan(3, 5), tmp_path / name)
    assert (tmp_path / name).read_bytes() == first
    assert first.startswith(b"\x1f\x8b") == name.endswith(".gz")


def test_the_file_is_one_json_document_with_a_key_a_line_that_begins_with_its_kind():
    lines = plan_to_bytes(pipeline_plan()).decode().splitlines()
    assert lines[:3] == ["{", '"kind":"piper-plan",', f'"schema_version":{SCHEMA_VERSION},']
    document = json.loads("\n".join(lines))
    assert document["device_plans"][0]["tasks"]["kind"][:2] == [0, 5]
    assert len(lines) == len(document) + 2


def test_the_hash_ignores_the_order_of_keys_and_sees_every_change():
    plan = pipeline_plan()
    swapped = replace(
        plan, directives=tuple(dict(reversed(directive.items())) for directive in plan.directives)
    )
    assert swapped.directives[0] == plan.directives[0]
    assert list(swapped.directives[0]) != list(plan.directives[0])
    assert plan_hash(swapped) == plan_hash(plan)
    assert re.fullmatch(r"[0-9a-f]{64}", plan_hash(plan))
    others = [replace(plan, notices=()), pipeline_plan(2, 5), pipeline_plan(clip=False)]
    assert len({plan_hash(other) for other in (plan, *others)}) == 4


def refused(data: bytes | str, where: str = "plan.json") -> PlanError:
    with pytest.raises(PlanError) as caught:
        bytes_to_plan(data.encode() if isinstance(data, str) else data, where=where)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    return caught.value


ABSENT = object()


def edited(path: str, value: object) -> str:
    """The file of a legal plan with the value at `path` changed, or taken out."""
    document = json.loads(plan_to_bytes(pipeline_plan()))
    keys = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", path)]
    target = document
    for key in keys[:-1]:
        target = target[key]
    if value is ABSENT:
        del target[keys[-1]]
    else:
        target[keys[-1]] = value
    return json.dumps(document)


def test_a_missing_file_a_folder_and_a_missing_folder_are_named(tmp_path):
    with pytest.raises(PlanError) as caught:
        load_plan(tmp_path / "absent.json")
    assert (caught.value.field, caught.value.value) == ("file", "absent.json")
    assert caught.value.rule == "does not exist"
    assert "--plan-out" in caught.value.fix
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path)
    with pytest.raises(PlanError, match="cannot be written") as caught:
        save_plan(pipeline_plan(), tmp_path / "no" / "plan.json")
    assert "existing folder" in caught.value.fix


def test_broken_json_tells_line_and_column():
    error = refused('{\n"kind":"piper-plan",\n"schema_version":}')
    assert error.where == "plan.json:3:18"
    assert "line 3, column 18" in error.rule


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"\xff\xfe\x00", "neither JSON text nor gzip"),
        (gzip.compress(b"{}", mtime=0)[:-4], "neither JSON text nor gzip"),
        (b'{"kind": NaN}', "NaN is not a JSON number"),
        (b'{"kind": "piper-plan", "kind": "piper-plan"}', "key 'kind' appears twice"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_clean_json_is_refused(data, rule):
    error = refused(data)
    assert error.field == "file"
    assert rule in error.rule


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_json_that_is_no_object_is_no_plan(text):
    error = refused(text)
    assert error.field == "plan"
    assert error.rule == "must be a JSON object"


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("kind", ABSENT, "must be 'piper-plan'"),
        ("kind", "piper-timeline", "must be 'piper-plan'"),
        ("schema_version", 7, f"reads version {SCHEMA_VERSION}"),
        ("schema_version", True, f"reads version {SCHEMA_VERSION}"),
        ("schema_version", ABSENT, f"reads version {SCHEMA_VERSION}"),
        ("schedule", ABSENT, "is missing"),
        ("training.seq_len", ABSENT, "is missing"),
        ("colour", "red", "is an unknown key"),
        ("device_plans[1].tasks.priority", [], "is an unknown key"),
        ("model", [], "must be a JSON object"),
        ("model.layers", 2.5, "must be a whole number"),
        ("model.layers", True, "must be a whole number"),
        ("model.layers", "2", "must be a whole number"),
        ("model.name", 3, "must be text"),
        ("training.clip_grad_norm", "1", "must be a finite number"),
        ("training.micro_batch_sizes[1]", "2", "must be a whole number"),
        ("segments", {}, "must be a list"),
        ("directives[0]", 5, "must be a JSON object"),
        ("parameters[0].trainable", 1, "must be true or false"),
        ("mesh.axes[0]", ["tp"], "must be a list of 2"),
        ("works[0].operations[0].kind", "magic", "must be one of matmul"),
        ("device_plans[0].tasks.kind", 3, "must be a list of whole numbers"),
        ("device_plans[0].tasks.kind[2]", 1.0, "does not belong in a list of whole numbers"),
        ("device_plans[0].tasks.kind[2]", True, "does not belong in a list of whole numbers"),
        ("device_plans[0].buffers.persistent[0]", 1, "does not belong in a list of true and false"),
        ("device_plans[0].buffers.memory_class[0]", 300, "must fit into 8 bits"),
        ("device_plans[0].tasks.size_bytes[0]", 2**63, "must fit into 64 bits"),
        ("device_plans[0].tasks.waits", [], "must be a JSON object"),
    ],
)
def test_a_wrong_key_or_type_is_named_by_its_path(path, value, rule):
    error = refused(edited(path, value))
    assert error.field == path
    assert rule in error.rule
    assert error.where == "plan.json"


@pytest.mark.parametrize(
    ("path", "value", "field", "rule"),
    [
        ("works[0].operations[0].count", 0, "works[0].operations[0]", "must be >= 0, >= 0 and >= 1"),
        ("device_plans[0].tasks.waits.counts[0]", 4, "device_plans[0].tasks.waits.counts", "whose sum is"),
        ("device_plans[0].tasks.stream", [0], "device_plans[0].tasks.stream", "one entry per task"),
        ("device_plans[0].buffers.owner", [], "device_plans[0].buffers.owner", "one entry per buffer"),
        ("device_plans[0].stages", [0, 0], "device_plans[0].stages", "must differ"),
        ("device_plans[0].stages", [0, 5], "device_plans.stages", "without gaps"),
        ("segments[1].inputs[0]", [1, 0], "segments[1].inputs", "an output of an earlier segment"),
        ("edges[0].values[0]", [1, 3], "edges[0].values", "must be an output of a segment"),
        ("groups[0].members", [[0], [1, 2]], "groups[0].members", "must be sets of one size"),
        ("groups[0].members", [[0, 0]], "groups[0].members", "must be disjoint"),
        ("groups[0].members", [[0, 9]], "groups[0].members", "must be in 0..3"),
        ("groups[0].pipeline_ranks", [2], "groups[0].pipeline_ranks", "must be in 0..1"),
        ("mesh.axes[2]", ["dp", 0], "mesh.axes.dp", "must be >= 1"),
        ("training.seq_len", 0, "training.seq_len", "must be >= 1"),
        ("training.micro_batch_sizes[0]", -1, "training.micro_batch_sizes[0]", "must be >= 1"),
        ("training.global_batch", 10**9, "training.global_batch", "replicas x"),
        ("model.layers", -1, "model.layers", "must be >= 0"),
        ("groups[0].axis", "x", "groups[0].axis", "must be one of tp, cp, ep, dp, pp, world"),
        ("mesh.axes[3]", ["pp", 4], "mesh.axes.pp", "must be the number of device plans, 2"),
    ],
)
def test_tables_that_contradict_each_other_are_named(*, path, value, field, rule):
    error = refused(edited(path, value))
    assert error.field == field
    assert rule in error.rule


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("tasks.kind[0]", 18, "must be in 0..17"),
        ("tasks.stage[0]", 2, "must be in -1..1"),
        ("tasks.microbatch[0]", 4, "must be in -1..3"),
        ("tasks.microbatch[0]", -1, "is needed by a task of this kind"),
        ("tasks.last_segment[0]", 4, "must be in -1..3"),
        ("tasks.first_segment[0]", 3, "must be <= last_segment"),
        ("tasks.stream[0]", -1, "must be in 0..3"),
        ("tasks.work[0]", 9, "must be in -1..3"),
        ("tasks.peer[1]", 0, "must be another pipeline rank"),
        ("tasks.edge[1]", -1, "is needed by a task of this kind"),
        ("tasks.part[0]", 4, "must be in -1..3"),
        ("tasks.size_bytes[1]", -1, "must be >= 0"),
        ("tasks.waits.values[0]", 99, "must be in 0..21"),
        ("tasks.reads.values[0]", -1, "must be in 0.."),
        ("buffers.size_bytes[0]", -4, "must be >= 0"),
        ("buffers.memory_class[0]", 7, "must be in 0..6"),
        ("buckets[0].group", 9, "must be in 0..3"),
        ("buckets[0].stage", 1, "must be a stage of this device plan"),
        ("pipeline_rank", 1, "must be 0"),
    ],
)
def test_an_index_that_points_nowhere_is_named_by_its_path(path, value, rule):
    error = refused(edited(f"device_plans[0].{path}", value))
    assert error.field == f"device_plans[0].{path}"
    assert rule in error.rule


def _rule(**fields: object) -> dict[str, object]:
    return {"stream": 1, "priority": None, "sms": None} | fields


@pytest.mark.parametrize(
    ("rules", "place", "rule"),
    [
        ([_rule(stream=4)], "[0].stream", "must be in 0..3"),
        ([_rule(stream=-1)], "[0].stream", "must be in 0..3"),
        ([_rule(sms=0)], "[0].sms", "must be >= 1"),
        ([_rule(), _rule(stream=2), _rule(priority=3)], "[2].stream", "must have one rule at most"),
        ([_rule(priority="high")], "[0].priority", "must be a whole number"),
        ([{"stream": 1}], "[0].priority", "is missing"),
    ],
)
def test_a_rule_of_a_stream_must_name_one_stream_of_the_device_once(rules, place, rule):
    error = refused(edited("device_plans[0].stream_rules", rules))
    assert error.field == f"device_plans[0].stream_rules{place}"
    assert rule in error.rule


def test_ranks_that_share_a_replica_do_not_multiply_the_batch():
    plan = pipeline_plan()
    wide = replace(plan, mesh=Mesh(axes=(("tp", 2), ("cp", 3), ("dp", 2), ("pp", 2))))
    assert (wide.replicas, wide.batch_shares) == (12, 2)
    assert bytes_to_plan(plan_to_bytes(wide)).training == plan.training


@pytest.mark.parametrize(
    ("path", "value"), [("segments[0].stage", 7), ("edges[0].target_stage", -1), ("edges[0].source_stage", 2)]
)
def test_a_stage_that_no_device_hosts_is_named(path, value):
    error = refused(edited(path, value))
    assert (error.field, error.rule) == (path, "must be in 0..1")


def test_directives_that_are_no_json_cannot_be_saved():
    with pytest.raises(PlanError) as caught:
        plan_to_bytes(replace(pipeline_plan(), directives=({"op": "order", "cap": float("nan")},)))
    assert caught.value.field == "directives"
    assert "finite numbers" in caught.value.fix


def test_the_format_description_names_every_key_of_the_file():
    described = set(re.findall(r"`([a-z_]+)`", FORMAT.read_text()))

    def keys(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {key for inner in value.values() for key in keys(inner)}
        return {key for inner in value for key in keys(inner)} if isinstance(value, list) else set()

    document = json.loads(plan_to_bytes(pipeline_plan()))
    document["directives"] = []
    assert keys(document) <= described


def test_a_number_with_more_digits_than_python_converts_is_no_plan():
    error = refused('{"kind": "piper-plan", "schema_version": ' + "9" * 5000 + "}")
    assert error.field == "file"
    assert "is not valid JSON" in error.rule
