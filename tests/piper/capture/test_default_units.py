"""Models without any annotation get pipeline units from their repeated blocks, and say so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from of_transformers import llama
from torch import Tensor, nn

from piper.capture import capture
from piper.errors import ModelError
from piper.predict import Job, predict
from piper.runtime.program import build_program, check_program
from piper.strategy import load_strategy

HIDDEN, VOCABULARY = 16, 32
SIZES = {"micro_batch": 2, "seq_len": 8, "dtype": "fp32"}


class Block(nn.Module):
    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Plain(nn.Module):
    """Embedding, blocks in a list or sequence, norm, head; beside them a smaller list."""

    def __init__(self, blocks: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.stem = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.blocks = nn.ModuleList(Block() for _ in range(4)) if blocks is None else blocks
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.stem:
            x = layer(x)
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x)).float()
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")


def tags(module: nn.Module) -> list[dict[str, int]]:
    return [dict(segment.tags) for segment in capture(module, **SIZES).segments]


def test_each_block_is_a_unit_and_so_is_what_runs_before_and_after() -> None:
    model = capture(Plain(), **SIZES)
    assert [dict(segment.tags) for segment in model.segments] == [
        {"PP": 0},
        {"LAYER": 0, "PP": 1},
        {"LAYER": 1, "PP": 2},
        {"LAYER": 2, "PP": 3},
        {"LAYER": 3, "PP": 4},
        {"PP": 5},
    ]
    assert model.segments[0].parameters[0] == "embed.weight"
    assert {"stem.0.weight", "stem.1.weight"} <= set(model.segments[0].parameters)
    assert {"norm.weight", "head.weight"} <= set(model.segments[5].parameters)
    assert model.facts.layers == 4
    assert model.notices[0].startswith("the model has no annotations: each of the 4 blocks of blocks is")


def test_blocks_found_by_default_are_recorded_once_with_the_same_result() -> None:
    assert capture(Plain(), **SIZES) == capture(Plain(), **SIZES, dedupe=False)


def test_what_runs_between_two_blocks_belongs_to_the_one_before() -> None:
    class Between(Plain):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x) * 2
            return self.head(x)[..., 0].float().sum() + labels.sum() * 0

    module = Between()
    model = capture(module, **SIZES)
    assert [dict(s.tags)["PP"] for s in model.segments] == [0, 1, 2, 3, 4, 5]
    products = [sum("mul" in op.name for op in s.forward.operations) for s in model.segments]
    assert products == [0, 1, 1, 1, 0, 2]  # after the last block: the last unit


def test_a_sequence_called_as_one_is_cut_between_its_children() -> None:
    class Whole(Plain):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            scores = self.head(self.blocks(self.embed(tokens))).float()
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")

    module = Whole(nn.Sequential(*(Block() for _ in range(3))))
    assert [found["PP"] for found in tags(module)] == [0, 1, 2, 3, 4]


def test_blocks_of_other_widths_in_the_same_list_are_units_too() -> None:
    assert len(tags(Plain(nn.ModuleList([Block(8), Block(), Block()])))) == 5


def test_one_block_called_in_a_loop_is_a_unit_each_time() -> None:
    shared = Block()
    found = tags(Plain(nn.ModuleList([shared, shared, shared])))
    assert [(tag["PP"], tag.get("LAYER")) for tag in found] == [(0, None), (1, 0), (2, 1), (3, 2), (4, None)]


def test_a_model_where_nothing_repeats_is_refused_with_how_to_annotate() -> None:
    class Single(Plain):
        def __init__(self) -> None:
            super().__init__(nn.ModuleList([Block()]))
            self.stem = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN)])

    with pytest.raises(ModelError) as caught:
        capture(Single(), **SIZES)
    assert caught.value.field == "unannotated operators"
    assert "no blocks repeat" in caught.value.rule
    assert "piper.annotate_modules(model" in caught.value.fix


def plain() -> nn.Module:
    return Plain()


def untagged_llama() -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(llama().config)


@pytest.mark.parametrize("name", ["plain", "untagged_llama"])
def test_it_is_planned_with_a_notice_and_the_runtime_cuts_it_alike(name: str) -> None:
    factory = f"test_default_units:{name}"
    job = Job(
        model=factory, strategy=load_strategy("pp=2,dp=2"), gpus=4, seq_len=8, global_batch=8, dtype="fp32"
    )
    found = predict(job)
    plan = found.compiled.plan
    assert any(notice.startswith("the model has no annotations") for notice in plan.notices)
    stages = [segment.stage for segment in plan.segments]
    assert stages == [0, 0, 0, 1, 1, 1]
    program = build_program(globals()[name], seq_len=8, micro_batch_sizes=(1,), dtype="fp32")
    check_program(program, plan)


def test_a_stack_of_transformers_is_found_by_itself() -> None:
    model = capture(untagged_llama(), **SIZES)
    assert [dict(segment.tags)["PP"] for segment in model.segments] == [0, 1, 2, 3, 4, 5]
    assert "model.norm.weight" in model.segments[-1].parameters
    assert torch.Size((1, 8, 8)) in [spec.shape for spec in model.segments[0].outputs]
