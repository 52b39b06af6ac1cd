"""Every form of a filter means the same in every directive that has one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest

from piper.directives import Mesh, Split
from piper.errors import StrategyError
from piper.graph import Graph, build_graph
from piper.graph.directive import Directive, require_tags
from piper.graph.filters import Filter
from piper.strategy.files import parse_directive
from simulator.plan import TaskName
from tests.graphs import transformer

STAGES = 4


@lru_cache
def graph() -> Graph:
    """Two ranks with two stages each, one layer per stage, on a mesh with all axes."""
    model = transformer(layers=STAGES, experts=True)
    stages = [min(max(dict(s.tags)["PP"] - 1, 0), STAGES - 1) for s in model.segments]
    found = build_graph(
        [model], stages, replica_batch=4, dtype="bf16", optimizer="adamw", clip_grad_norm=None
    )
    mesh = Mesh(axes=(("tp", 2), ("cp", 2), ("dp", 2), ("pp", 2)))
    found = Split(num_microbatches=4).apply(mesh.apply(found))
    for stage in range(STAGES):
        found = directive("place", filter={"PP": stage}, at={"pp": stage % 2}).apply(found)
    return found


def directive(op: str, **fields: Any) -> Directive:
    return parse_directive({"op": op, **fields}, where="s.json:1")


def segments_with(holds: Callable[[dict[str, int]], bool]) -> tuple[int, ...]:
    """Return the segments whose tags, PP being the stage, fulfil a condition."""
    tags = [dict(node.tags) for node in graph().nodes if node.kind.name == "F"]
    return tuple(i for i, found in enumerate(tags) if holds(found))


DIRECTIVES: dict[str, tuple[dict[str, Any], str]] = {
    "replicate": ({}, "replications"),
    "shard": ({"degree": 2, "tensor_degree": 1}, "expert_shardings"),
    "shard_tensor": ({}, "tensor_shardings"),
    "shard_sequence": ({}, "sequence_shardings"),
    "recompute": ({}, "recomputations"),
    "offload": ({"what": "optimizer"}, "offloadings"),
}
"""By directive: fields that it needs, and the field of the graph with its facts."""

REGIONS = {"shard": "EP", "shard_tensor": "TP", "shard_sequence": "CP"}
"""Directives about regions of one tag: a filter means those within it."""

FORMS: dict[str, tuple[dict[str, Any], Callable[[dict[str, int]], bool]]] = {
    "everything": ({}, lambda tags: True),
    "exact": ({"PP": 1}, lambda tags: tags["PP"] == 1),
    "exact as text": ({"PP": "1"}, lambda tags: tags["PP"] == 1),
    "any index": ({"EP": "*"}, lambda tags: "EP" in tags),
    "list": ({"PP": [0, 3]}, lambda tags: tags["PP"] in {0, 3}),
    "range": ({"LAYER": "1-2"}, lambda tags: tags.get("LAYER") in {1, 2}),
    "ranges and indices": ({"PP": "0,2-3"}, lambda tags: tags["PP"] != 1),
    "list of ranges": ({"PP": ["0-1", 3]}, lambda tags: tags["PP"] != 2),
    "negation": ({"PP": {"not": [0, 1]}}, lambda tags: tags["PP"] > 1),
    "not tagged": ({"LAYER": None}, lambda tags: "LAYER" not in tags),
    "not tagged, as published": ({"TP": "-"}, lambda tags: "TP" not in tags),
    "not any index": ({"EP": {"not": "*"}}, lambda tags: "EP" not in tags),
    "not untagged": ({"EP": {"not": None}}, lambda tags: "EP" in tags),
    "conjunction": ({"PP": [1, 2], "TP": "*", "CP": None},
                    lambda tags: tags["PP"] in {1, 2} and "TP" in tags and "CP" not in tags),
    "a pass": ({"PP": 2, "PASS": "B"}, lambda tags: tags["PP"] == 2),
    "a half of a pass": ({"PP": 2, "PASS": "BW"}, lambda tags: tags["PP"] == 2),
    "passes": ({"PP": 2, "PASS": ["F", "BI"]}, lambda tags: tags["PP"] == 2),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", DIRECTIVES)
def test_a_filter_claims_the_segments_with_its_tags(op: str, form: str) -> None:
    (which, holds), (fields, facts) = FORMS[form], DIRECTIVES[op]
    tag = REGIONS.get(op)
    expected = segments_with(lambda tags: holds(tags) and (tag is None or tag in tags))
    made = directive(op, filter=which, **fields)
    if not expected:
        with pytest.raises(StrategyError, match=f"means no region tagged {tag}"):
            made.apply(graph())
        return
    (fact,) = getattr(made.apply(graph()), facts)
    assert fact.segments == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", DIRECTIVES)
def test_a_filter_survives_the_file_form(op: str, form: str) -> None:
    first = directive(op, filter=FORMS[form][0], **DIRECTIVES[op][0])
    assert parse_directive(first.to_json(), where="s.json:1") == first


@pytest.mark.parametrize("op", DIRECTIVES)
@pytest.mark.parametrize(
    ("which", "rule", "fix"),
    [
        ({"NOPE": 0}, "names the tag NOPE", "known: CP, EP, LAYER, PP, TP"),
        ({"PP": 4}, "matches nothing in the model", "PP up to 3"),
        ({"PP": 0, "EP": 3}, "matches nothing in the model", "EP up to 3"),
    ],
)
def test_a_filter_that_means_nothing_is_refused(op: str, which: dict[str, Any], rule: str, fix: str) -> None:
    with pytest.raises(StrategyError, match=rule) as caught:
        directive(op, filter=which, **DIRECTIVES[op][0]).apply(graph())
    assert (caught.value.where, caught.value.field) == ("s.json:1", f"{op}.filter")
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("which", "stages"),
    [({"PP": 2}, {2}), ({"PP": "1-2"}, {1, 2}), ({"PP": [0, 3]}, {0, 3}), ({"PP": "0,2-3"}, {0, 2, 3})],
)
def test_place_moves_the_stages_that_its_filter_lists(which: dict[str, Any], stages: set[int]) -> None:
    moved = directive("place", filter=which, at={"pp": 1}).apply(graph())
    assert {node.stage for node in moved.nodes if node.pipeline_rank == 1} == stages | {1, 3}


@pytest.mark.parametrize("which", [{}, {"PP": "*"}, {"PP": {"not": 0}}, {"PP": None}, {"EP": 1}])
def test_place_wants_stages_by_number(which: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match="must name stages"):
        directive("place", filter=which, at={"pp": 0})


@pytest.mark.parametrize("which", [{}, {"PP": "*"}, {"PP": "0-3"}, {"PASS": ["F", "B"]}, {"PP": {"not": 9}}])
def test_split_takes_any_filter_that_means_the_whole_model(which: dict[str, Any]) -> None:
    assert directive("split", filter=which, num_microbatches=4).apply(graph()).micro_batch_sizes == (1,) * 4


@pytest.mark.parametrize("which", [{"PP": [0, 1]}, {"LAYER": "*"}, {"LAYER": None}, {"PASS": "F"}])
def test_split_refuses_a_part_of_the_model(which: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match="the whole model is split"):
        directive("split", filter=which, num_microbatches=2).apply(graph())


@pytest.mark.parametrize(
    ("which", "stages"), [({"PP": 0}, {0}), ({"PP": [1, 2]}, {1, 2}), ({"PP": {"not": 0}}, {1, 2, 3})]
)
def test_a_mesh_of_stages_takes_all_forms_over_stages(which: dict[str, Any], stages: set[int]) -> None:
    (fact,) = directive("mesh", axes={"tp": 4, "cp": 2}, filter=which).apply(graph()).stage_meshes
    assert fact.segments == segments_with(lambda tags: tags["PP"] in stages)


def row(*slots: list[dict[str, Any]]) -> list[str]:
    """Return the tasks that the rows of an order mean, slots with several in brackets."""
    found = directive("order", filters=list(slots)).apply(graph())
    (stated,) = (row for row in found.rows if row)
    return [_text(slot) for slot in stated]


def _text(slot: tuple[TaskName, ...]) -> str:
    return slot[0].code if len(slot) == 1 else "+".join(task.code for task in slot)


def test_order_takes_lists_ranges_and_negations_of_stages_and_microbatches() -> None:
    assert row([{"PP": 0, "MB": 1, "PASS": "F"}]) == ["0F1"]
    assert row([{"PP": "0", "MB": "1-3", "PASS": "F"}]) == ["0F1", "0F2", "0F3"]
    assert row([{"PP": 0, "MB": [3, 0], "PASS": "F"}]) == ["0F0", "0F3"]
    assert row([{"PP": 0, "MB": {"not": [1, 2]}, "PASS": "F"}]) == ["0F0", "0F3"]
    assert row([{"PP": 0, "MB": "*", "PASS": "F"}]) == ["0F0", "0F1", "0F2", "0F3"]
    assert row([{"PP": 0, "PASS": "F"}]) == ["0F0", "0F1", "0F2", "0F3"]


def test_order_takes_sets_of_passes() -> None:
    assert row([{"PP": 3, "MB": 0, "PASS": ["F", "B"]}]) == ["3F0", "3B0"]
    assert row([{"PP": 3, "MB": 0}]) == ["3F0", "3B0"]
    assert row([{"PP": 1, "MB": 0, "PASS": "F"}], [{"PP": 1, "MB": 0, "PASS": ["BI", "BW"]}]) == [
        "1F0", "1BI0", "1BW0",
    ]  # fmt: skip


def test_tasks_of_different_filters_of_a_slot_may_overlap() -> None:
    slot = [{"PP": 0, "MB": [2, 3], "PASS": "F"}, {"PP": 2, "MB": [0, 1], "PASS": "B"}]
    assert row(slot) == ["0F2+2B0", "0F3+2B1"]


def test_a_filter_of_a_whole_layer_means_the_regions_within_it() -> None:
    (fact,) = directive("shard_tensor", filter={"LAYER": 1}).apply(graph()).tensor_shardings
    assert fact.segments == segments_with(lambda tags: tags.get("LAYER") == 1 and "TP" in tags)


def test_a_cut_of_a_model_without_its_tag_says_how_to_tag_it() -> None:
    untagged = SimpleNamespace(model=SimpleNamespace(tag_names=("PP", "LAYER")))
    for tag in ("TP", "EP", "CP"):
        with pytest.raises(StrategyError) as caught:
            require_tags(untagged, Filter.parse({tag: "*"}, where="s"), where="s", field="shard.filter")  # type: ignore[arg-type]
        assert "piper.annotate_modules" in caught.value.fix
        assert f"leave {tag.lower()} at 1" in caught.value.fix
