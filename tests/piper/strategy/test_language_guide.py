"""The language guide: its graphs are what is printed, its files compile, its figures are derived here."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import piper
from piper.cli import main
from piper.directives import DIRECTIVES
from piper.strategy.shorthand import KEYS
from simulator.plan import Plan, TaskKind
from simulator.plan.check import check_plan
from tests.piper.strategy.test_error_texts import LIFTED

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
FILES = sorted((ROOT / "examples" / "strategies").glob("*.json"))
GRAPHS = re.findall(r"^```text\n\$ piper (check .*)\n((?:.*\n)*?)```$", GUIDE, flags=re.MULTILINE)
REWRITES = re.findall(r"^### (\w+)\n\n```text\n((?:.*\n)*?)```$", GUIDE, flags=re.MULTILINE)
SNIPPETS = re.findall(r"^```json\n((?:.*\n)*?)```$", GUIDE, flags=re.MULTILINE)
WITH_EXPERTS = {"moe_ep_folded", "dualpipe_v_ep"}

EMBEDDING, NORM, HEADS = 256 * 64, 64, 2 * (64 * 64 + 32 * 64)
"""Elements of both toy models: hidden 64, vocabulary 256, 8 query and 4 key heads of 8."""
DENSE_LAYER = HEADS + 3 * 192 * 64
EXPERT, ROUTER = 3 * 96 * 64, 8 * 64


def section(title: str) -> str:
    return re.split(r"^##+ ", GUIDE.partition(f"{title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


@cache
def plan_of(name: str) -> Plan:
    model = "tiny-moe" if name in WITH_EXPERTS else "tiny-llama"
    return piper.compile_plan(model, str(ROOT / "examples" / "strategies" / f"{name}.json"), seq_len=64)


@cache
def result_of(name: str) -> piper.Result:
    return piper.simulate(plan_of(name))


def exchanges(plan: Plan) -> dict[str, Counter[str]]:
    """Return how many exchanges of each kind the first rank has in a step, by stream."""
    device = plan.device_plans[0]
    found: dict[str, Counter[str]] = {}
    for task in device.tasks:
        if task.group >= 0 or task.peer >= 0:
            found.setdefault(device.streams[task.stream], Counter())[task.kind.name] += 1
    return found


def test_every_directive_has_a_section_with_its_rewrite_from_the_docstring() -> None:
    assert [op for op, _ in REWRITES] == list(dict.fromkeys(op for op, _ in REWRITES))
    assert {op for op, _ in REWRITES} == DIRECTIVES.keys()
    for op, shown in REWRITES:
        documented = (inspect.getdoc(DIRECTIVES[op]) or "").split()
        assert " ".join(["rewrite:", *shown.split()]) in " ".join(documented), op


@pytest.mark.parametrize("op", DIRECTIVES)
def test_every_field_of_a_directive_is_in_its_table(op: str) -> None:
    text = section(f"### {op}")
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in row.split("`")[1::2]
    }
    aliases = {"bucket_size", "prefetch_distance", "regather", "device", "microbatches"}
    assert set(DIRECTIVES[op].keys) - aliases <= named
    assert named <= set(DIRECTIVES[op].keys)
    assert "Conflicts: " in text


@pytest.mark.parametrize("op", DIRECTIVES)
def test_what_a_table_says_of_fields_left_out_is_their_default(op: str) -> None:
    defaults = {field.name: field.default for field in fields(DIRECTIVES[op])}
    stated = {name: value for name, value in defaults.items() if isinstance(value, str | int | float)}
    for names, told in re.findall(r"^\| (`.*?`.*?) \|.*\| (.*?) \|$", section(f"### {op}"), re.MULTILINE):
        for name in names.split("`")[1::2]:
            if name in stated:
                default = stated[name]
                text = default if isinstance(default, str) else f"{default:g}"
                text = str(default).lower() if isinstance(default, bool) else text
                assert told.replace("`", "").split(";")[0] == text, name


def test_every_key_of_the_shorthand_is_in_its_table() -> None:
    assert re.findall(r"^\| `(\w+)` \|", section("## Shorthand"), re.MULTILINE) == list(KEYS)


def test_everything_that_only_the_published_system_refuses_is_listed() -> None:
    for name, (meaning, _) in LIFTED.items():
        assert f"| {name} | {meaning} |\n" in GUIDE


@pytest.mark.parametrize(("command", "shown"), GRAPHS, ids=[command for command, _ in GRAPHS])
def test_every_graph_is_what_its_command_prints(
    command: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.partition("\n\n")[0].splitlines()]
    pieces = re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)
    pattern = r"\n(?:.*\n)*?".join(re.escape(piece.strip("\n")) for piece in pieces if piece)
    before = "" if pieces[0] else r"(?:.*\n)+"
    after = "" if pieces[-1] else r"(?:\n.*)+"
    assert re.fullmatch(before + pattern + after, "\n".join(printed)), command


def test_there_are_graphs_before_and_after() -> None:
    assert len(GRAPHS) >= 20
    assert len(REWRITES) == len(DIRECTIVES)


@pytest.mark.parametrize("text", SNIPPETS)
def test_every_snippet_is_read_and_says_only_what_it_means(text: str) -> None:
    read = json.loads(text)
    for entry in read if isinstance(read, list) else [read]:
        directive = DIRECTIVES[entry["op"]].from_json(entry, where="docs/language.md")
        assert DIRECTIVES[entry["op"]].from_json(directive.to_json(), where="docs/language.md") == directive


def test_the_parts_of_a_row_run_as_the_guide_says() -> None:
    path = ROOT / "examples" / "one-layer" / "parts.json"
    assert f"```json\n{path.read_text(encoding='utf-8')}```\n" in GUIDE
    plan = piper.compile_plan(str(path.with_name("config.json")), str(path), gpus=1, seq_len=64)
    assert check_plan(plan) == []
    device = plan.device_plans[0]
    passes = [code for code, task in zip(device.codes(), device.tasks, strict=True) if task.microbatch >= 0]
    assert f"It runs as `{' '.join(passes)}`" in GUIDE


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_example_is_in_the_guide_line_by_line(path: Path) -> None:
    assert f"`{path.relative_to(ROOT)}`" in GUIDE
    assert f"```json\n{path.read_text(encoding='utf-8')}```\n" in GUIDE
    lines = path.read_text(encoding="utf-8").splitlines()[1:-1]
    assert [json.loads(line.removesuffix(","))["op"] for line in lines] == [
        entry["op"] for entry in json.loads(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_example_is_legal_and_simulates(path: Path) -> None:
    assert [str(violation) for violation in check_plan(plan_of(path.stem))] == []
    result = result_of(path.stem)
    assert result.step_time_s > 0
    assert result.summary["fits"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_tables_of_the_guide_are_counted_in_the_plan(path: Path) -> None:
    text = GUIDE.partition(f"`{path.relative_to(ROOT)}`")[2].partition("\n### ")[0]
    rows = dict(re.findall(r"^\| `?(.+?)`? \| (.*) \|$", text, flags=re.MULTILINE))
    memory = result_of(path.stem).summary["ranks"][0]["memory_by_class_bytes"]
    assert rows.pop("bytes") == ", ".join(
        f"{memory[kind]} {kind}" for kind in ("parameters", "gradients", "optimizer")
    )
    counted = {stream: dict(kinds) for stream, kinds in exchanges(plan_of(path.stem)).items()}
    told = {
        stream: {kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", told)}
        for stream, told in rows.items()
        if stream not in {"stream", "---"}
    }
    assert told == counted


LAYERS, MOE_LAYERS, MICROBATCHES = 16, 8, 2
UNITS = LAYERS + 2

COUNTS = {
    "ddp": {"dp": {"ALL_REDUCE": 4 + 1}},
    "fsdp": {
        "gather": {"ALL_GATHER": 2 * UNITS * MICROBATCHES - MICROBATCHES - (MICROBATCHES - 1)},
        "reduce": {"REDUCE_SCATTER": UNITS * MICROBATCHES},
    },
    "hsdp": {"reduce": {"REDUCE_SCATTER": UNITS * MICROBATCHES, "ALL_REDUCE": UNITS}},
    "megatron_3d": {"tp": {"ALL_GATHER": 8 * (16 + 17 + 16), "REDUCE_SCATTER": 8 * (17 + 16)}},
    "stage_meshes": {"pp": {"ALL_TO_ALL": 8}, "send_f>1": {"SEND_F": 8}},
    "interleaved_zero1": {
        "dp": {"ALL_GATHER": 2, "ALL_REDUCE": 1, "REDUCE_SCATTER": 2},
        "send_f>1": {"SEND_F": 2 * 8},
    },
    "moe_ep_folded": {"ep": {"ALL_TO_ALL": MOE_LAYERS // 2 * 2 * 2 * 4}},
    "dualpipe_v_ep": {"ep": {"ALL_TO_ALL": MOE_LAYERS // 2 * 2 * 2 * 8}},
    "context_parallel": {"cp": {"RING_SHIFT": 3 * LAYERS * MICROBATCHES}},
}
"""Exchanges as the texts of the guide derive them."""


@pytest.mark.parametrize("name", COUNTS)
def test_the_exchanges_are_as_many_as_the_strategy_asks_for(name: str) -> None:
    found = exchanges(plan_of(name))
    assert {stream: dict(found[stream]) for stream in COUNTS[name]} == COUNTS[name]


def test_every_example_has_its_counts() -> None:
    assert COUNTS.keys() == {path.stem for path in FILES} == BUCKETS.keys()


_LLAMA = [EMBEDDING, *[DENSE_LAYER + 2 * NORM] * LAYERS, NORM + EMBEDDING]
_MOE_WHOLE = ROUTER + 2 * NORM
BUCKETS: dict[str, list[tuple[int, int, int, int]]] = {
    "ddp": [(sum(_LLAMA), 1, 1, 1)],
    "fsdp": [(unit, 8, 8, 8) for unit in _LLAMA],
    "hsdp": [(unit, 4, 4, 4) for unit in _LLAMA],
    "megatron_3d": [((EMBEDDING + 8 * DENSE_LAYER) // 2, 1, 1, 2), (8 * 2 * NORM, 1, 1, 2)],
    "stage_meshes": [((EMBEDDING + 8 * DENSE_LAYER) // 2, 1, 1, 4), (8 * 2 * NORM, 1, 1, 4)],
    "interleaved_zero1": [(sum(_LLAMA[:3]), 1, 1, 2), (sum(_LLAMA[9:11]), 1, 1, 2)],
    "moe_ep_folded": [
        ((EMBEDDING + 4 * HEADS) // 2, 1, 1, 2),
        (4 * _MOE_WHOLE, 1, 1, 2),
        (4 * 2 * EXPERT, 1, 1, 1),
    ],
    "dualpipe_v_ep": [
        (EMBEDDING + 2 * (HEADS + _MOE_WHOLE), 1, 1, 2),
        (NORM + EMBEDDING + 2 * (HEADS + _MOE_WHOLE), 1, 1, 2),
        *[(2 * 4 * EXPERT, 1, 1, 1)] * 2,
    ],
    "context_parallel": [(sum(_LLAMA), 1, 1, 8)],
}
"""Per bucket of the first rank: elements, and over how many ranks its parameters, gradients and optimizer
state are cut."""


@pytest.mark.parametrize("name", BUCKETS)
def test_the_bytes_follow_from_the_shapes_of_the_model_and_the_cuts(name: str) -> None:
    expected = Counter[str]()
    for numel, parameters, gradients, optimizer in BUCKETS[name]:
        multiple = 8 * optimizer if optimizer > 1 else 1
        padded = -(-numel // multiple) * multiple
        expected["parameters"] += 2 * padded // parameters
        expected["gradients"] += 4 * padded // gradients
        expected["optimizer"] += 12 * padded // optimizer
    memory = result_of(name).summary["ranks"][0]["memory_by_class_bytes"]
    assert {kind: memory[kind] for kind in expected} == expected


def test_groups_of_the_examples_are_those_that_the_texts_name() -> None:
    def groups(name: str, axis: str) -> set[tuple[int, ...]]:
        return {ranks for group in plan_of(name).groups if group.axis == axis for ranks in group.members}

    assert {(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (3, 7)} <= groups("hsdp", "dp")
    assert groups("moe_ep_folded", "ep") == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert groups("context_parallel", "cp") == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert (0, 1, 2, 3, 4, 5, 6, 7) in groups("context_parallel", "dp")
    assert [device.stages for device in plan_of("dualpipe_v_ep").device_plans] == [(0, 3), (1, 2)]


def test_a_rank_of_a_stage_cut_twice_as_fine_holds_half_of_its_parameters() -> None:
    file = str(ROOT / "examples" / "strategies" / "stage_meshes.json")
    ranks = piper.simulate(piper.compile_plan("llama3-8b", file, seq_len=1024)).summary["ranks"]
    for kind, share in (("parameters", 0.5), ("gradients", 0.5), ("optimizer", 1.0)):
        first, second = (rank["memory_by_class_bytes"][kind] for rank in ranks)
        assert second == pytest.approx(first * share, rel=0.01)


def test_buckets_of_ddp_are_reduced_while_the_backward_of_others_goes_on() -> None:
    device = plan_of("ddp").device_plans[0]
    tasks = list(device.tasks)
    last = max(at for at, task in enumerate(tasks) if task.kind is TaskKind.B)
    waited = [task.waits for task in tasks if task.kind is TaskKind.ALL_REDUCE and task.bucket >= 0]
    assert [last in waits for waits in waited] == [False, False, False, True]
    assert min(task.size_bytes for task in tasks if task.kind is TaskKind.ALL_REDUCE) == 4


def test_rules_of_streams_reach_the_plan_of_dualpipe_v() -> None:
    for device in plan_of("dualpipe_v_ep").device_plans:
        (rule,) = [rule for rule in device.stream_rules if device.streams[rule.stream] == "ep"]
        assert (rule.priority, rule.sms) == (1, 20)


def overlappable_share(name: str) -> float:
    """Return behind which part of the all-to-alls of the first rank another microbatch computes next."""
    device = plan_of(name).device_plans[0]
    tasks = list(device.tasks)
    followed = []
    for at, task in enumerate(tasks):
        if task.kind is TaskKind.ALL_TO_ALL:
            later = (other for other in tasks[at + 1 :] if device.streams[other.stream] == "compute")
            following = next(later)
            waits = at in following.waits
            followed.append(not waits and following.microbatch != task.microbatch)
    return sum(followed) / len(followed)


def test_in_slots_of_dualpipe_v_one_microbatch_computes_while_the_tokens_of_another_travel() -> None:
    assert overlappable_share("moe_ep_folded") == 0
    assert overlappable_share("dualpipe_v_ep") > 0.6


def hidden_share(name: str) -> float:
    """Return during which part of the time of all-to-alls the first rank computes, for Mixtral 8x7B."""
    file = str(ROOT / "examples" / "strategies" / f"{name}.json")
    frame = piper.simulate(piper.compile_plan("mixtral-8x7b", file, seq_len=2048)).to_frame()
    mine = frame[(frame["rank"] == 0) & (frame["step"] == frame["step"].max())]
    compute = mine[mine["stream"] == "compute"]
    busy = list(zip(compute["start_ns"], compute["end_ns"], strict=True))
    spans = mine[mine["kind"] == "ALL_TO_ALL"]
    hidden = sum(
        max(0, min(end, stop) - max(start, begin))
        for start, end in zip(spans["start_ns"], spans["end_ns"], strict=True)
        for begin, stop in busy
    )
    return float(hidden / (spans["end_ns"] - spans["start_ns"]).sum())


def test_most_of_the_time_of_all_to_alls_is_hidden_by_dualpipe_v_and_none_by_1f1b() -> None:
    assert hidden_share("dualpipe_v_ep") > 0.5
    assert hidden_share("moe_ep_folded") == 0
