"""`annotate_modules`: patterns, indices, what lies between tagged modules, and what is refused."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper import annotate_modules
from piper.capture import CapturedModel, capture
from piper.errors import ModelError

HIDDEN, VOCABULARY = 16, 32


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mix = Mix()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(self.norm(x))
        return out


class Plain(nn.Module):
    """No scope anywhere; a table of positions before, a norm and the loss after what can be tagged."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) * 2 + self.places(positions)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x)).float()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")


UNITS = {"embed": "PP", "blocks.{i}": "PP", "head": "PP"}


def captured(module: nn.Module, **changes: Any) -> CapturedModel:
    return capture(module, **({"micro_batch": 2, "seq_len": 8, "dtype": "fp32"} | changes))


def tags(model: CapturedModel) -> list[dict[str, int]]:
    return [dict(segment.tags) for segment in model.segments]


def refused(model: nn.Module, given: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        annotate_modules(model, given)
    assert caught.value.where == "piper.annotate_modules" or caught.value.where == "piper.annotate"
    return caught.value


def test_units_count_in_the_order_of_calls_and_a_numbered_pattern_makes_layers() -> None:
    model = captured(annotate_modules(Plain(), UNITS))
    assert tags(model) == [
        {"PP": 0},
        {"LAYER": 0, "PP": 1},
        {"LAYER": 1, "PP": 2},
        {"LAYER": 2, "PP": 3},
        {"PP": 4},
    ]
    assert model.facts.layers == 3


def test_what_lies_between_tagged_modules_joins_the_one_before_and_before_the_first_the_first() -> None:
    model = captured(annotate_modules(Plain(), UNITS))
    assert model.segments[0].parameters == ("embed.weight", "places.weight")
    assert any(op.name.startswith("aten.arange") for op in model.segments[0].forward.operations)
    assert "norm.weight" in model.segments[3].parameters
    assert model.segments[4].parameters == ("head.weight",)
    assert any("nll_loss" in op.name for op in model.segments[4].forward.operations)


def test_the_same_module_with_scopes_in_its_forward_gives_the_same_segments() -> None:
    from piper import annotate

    class Inside(Plain):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            with annotate("PP"):
                positions = torch.arange(tokens.shape[1], device=tokens.device)
                x = self.embed(tokens) * 2 + self.places(positions)
            for i, block in enumerate(self.blocks):
                with annotate("PP"), annotate("LAYER"):
                    x = block(x)
                    if i == len(self.blocks) - 1:
                        x = self.norm(x)
            with annotate("PP"):
                scores = self.head(x).float()
                return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")

    from_outside, inside = captured(annotate_modules(Plain(), UNITS)), captured(Inside())
    assert [s.tags for s in from_outside.segments] == [s.tags for s in inside.segments]
    assert [s.forward for s in from_outside.segments] == [s.forward for s in inside.segments]
    assert [s.backward for s in from_outside.segments] == [s.backward for s in inside.segments]
    assert [s.saved_bytes for s in from_outside.segments] == [s.saved_bytes for s in inside.segments]


def test_a_tag_of_one_numbered_pattern_takes_the_number_and_of_several_patterns_counts() -> None:
    given = UNITS | {"blocks.{i}.mix": "MIX", "blocks.{layer}.norm": "NORM", "norm": "NORM"}
    found = tags(captured(annotate_modules(Plain(), given)))
    assert [t["MIX"] for t in found if "MIX" in t] == [0, 1, 2]
    assert [t["NORM"] for t in found if "NORM" in t] == [0, 1, 2, 3]
    assert next(t for t in found if t.get("MIX") == 1) == {"LAYER": 1, "MIX": 1, "PP": 2}


def test_a_star_stands_for_a_part_of_a_name() -> None:
    model = captured(annotate_modules(Plain(), {"embed": "PP", "blocks.*": "PP", "*ead": "PP"}))
    assert [t["PP"] for t in tags(model)] == [0, 1, 2, 3, 4]
    assert all("LAYER" not in t for t in tags(model))


def test_several_patterns_may_tag_one_module_outer_to_inner() -> None:
    given = {"embed": "PP", "blocks.{i}": "PP", "blocks.1": "MIDDLE", "head": ("PP", "TP")}
    found = tags(captured(annotate_modules(Plain(), given)))
    assert found[2] == {"LAYER": 1, "MIDDLE": 0, "PP": 2}
    assert found[-1] == {"PP": 4, "TP": 0}


def test_a_module_that_is_called_twice_opens_its_scopes_twice() -> None:
    class Shared(Plain):
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks.append(self.blocks[0])

    model = captured(annotate_modules(Shared(), UNITS))
    assert [t["PP"] for t in tags(model)] == [0, 1, 2, 3]
    assert model.segments[1].parameters == model.segments[2].parameters[:4]


def test_the_model_itself_stays_as_it_was() -> None:
    torch.manual_seed(0)
    plain = Plain()
    tagged = annotate_modules(copy.deepcopy(plain), UNITS | {"blocks.{i}.mix": "TP"})
    assert list(tagged.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in tagged.modules()] == [type(m) for m in plain.modules()]
    assert inspect.signature(tagged.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)
    tokens = torch.randint(VOCABULARY, (2, 8))
    assert torch.equal(tagged(tokens, tokens), plain(tokens, tokens))


def test_a_copy_is_tagged_too_and_runs_its_own_parameters() -> None:
    model = annotate_modules(Plain(), UNITS)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    tokens = torch.randint(VOCABULARY, (2, 8))
    assert twin(tokens, tokens).item() == pytest.approx(16 * math.log(VOCABULARY))
    assert captured(twin).segments == captured(model).segments


def test_blocks_tagged_from_outside_are_recorded_once_with_the_same_result() -> None:
    given = {"embed": "PP", "blocks.{i}": "PP", "norm": "PP", "head": "PP"}
    model = annotate_modules(Plain(blocks=4), given)
    assert captured(model) == captured(model, dedupe=False)


@pytest.mark.parametrize(
    ("given", "field", "fix"),
    [
        ({"block.{i}": "PP"}, "pattern", "did you mean 'blocks.{i}'"),
        ({"blocks.{i}.mlp": "PP"}, "pattern", "'blocks.{i}.mix'"),
        ({"blocks.7": "PP"}, "pattern", "did you mean"),
        ({"blocks": "PP"}, "blocks", 'tag its children: "blocks.{i}"'),
        ({"blocks.{i}": "PP", "blocks.0": "PP"}, "tags", "let one pattern give it"),
        ({"head": ("PP", "PP")}, "head", "give it once"),
        ({"head": ()}, "name", "use a tag"),
        ({"head": "PASS"}, "name", "use a tag"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(given: Any, field: str, fix: str) -> None:
    error = refused(Plain(), given)
    assert error.field == field
    assert fix in error.fix


def test_a_refused_call_tags_nothing() -> None:
    model = Plain()
    refused(model, {"embed": "PP", "nothing": "PP"})
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_second_call_is_refused() -> None:
    model = annotate_modules(Plain(), UNITS)
    error = refused(model, {"norm": "PP"})
    assert (error.field, error.rule) == ("model", "is tagged already")


def test_a_model_whose_tagged_modules_never_run_is_refused() -> None:
    class Unused(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 2)

    with pytest.raises(ModelError) as caught:
        captured(annotate_modules(Unused(), {"spare": "PP"}))
    assert caught.value.field == "annotate_modules"
    assert "spare" in str(caught.value.value)
