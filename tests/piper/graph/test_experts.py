"""Experts of a module's own, however it runs them: a degree that does not divide them is refused."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from piper.annotation import annotate
from piper.capture import capture
from piper.cli import main
from piper.graph.experts import count_experts
from piper.tagging import annotate_modules

EXPERTS, WIDTH, SEQ_LEN = 6, 16, 12


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        rows = x.flatten(0, 1)
        chosen = self.router(rows).topk(1).indices.flatten()
        return self.combine(rows, chosen).view_as(x)

    def combine(self, rows, chosen):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (mine,) = torch.where(chosen == number)
            out = out.index_add(0, mine, expert(rows[mine]))
        return out


class OneScope(Loop):
    def combine(self, rows, chosen):
        with annotate("EP"):
            return super().combine(rows, chosen)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        rows = x.flatten(0, 1).view(EXPERTS, -1, WIDTH)
        with annotate("EP"):
            return torch.bmm(rows, self.weight).view_as(x)


class Model(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(32, WIDTH), nn.ModuleList(part() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten(), reduction="sum")


def tagged(part):
    patterns = {"embed": "PP", "blocks.{i}": "PP", "head": "PP"}
    return annotate_modules(
        Model(part), patterns | ({"blocks.{i}.experts.{j}": "EP"} if part is Loop else {})
    )


def loop():
    return tagged(Loop)


def one_scope():
    return tagged(OneScope)


def stacked():
    return tagged(Stacked)


@pytest.mark.parametrize("part", [Loop, OneScope, Stacked])
def test_experts_are_counted_in_a_loop_in_one_scope_and_in_one_weight(part):
    model = capture(tagged(part), micro_batch=1, seq_len=SEQ_LEN, dtype="bf16")
    regions = [i for i, segment in enumerate(model.segments) if "EP" in dict(segment.tags)]
    assert set(count_experts(model, regions).values()) == {EXPERTS}


def test_one_feed_forward_part_of_two_like_matrices_is_no_list_of_experts():
    part = (nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
    module = annotate_modules(
        Model(lambda: nn.Sequential(*part)), {"embed": "PP", "blocks.{i}": ("PP", "EP"), "head": "PP"}
    )
    model = capture(module, micro_batch=1, seq_len=SEQ_LEN, dtype="bf16")
    assert not count_experts(model, range(len(model.segments)))


@pytest.mark.parametrize("factory", ["loop", "one_scope", "stacked"])
def test_a_degree_that_does_not_divide_them_is_refused_and_one_that_does_is_legal(factory, capsys):
    job = ["check", f"tests.piper.graph.test_experts:{factory}", "--seq-len", str(SEQ_LEN), "--strategy"]
    assert main([*job, "ep=4,dp=4"]) == 2
    error = capsys.readouterr().err
    assert f"shard.degree = 4 does not divide the {EXPERTS} experts of segment" in error
    assert f"fix: use a divisor of {EXPERTS}" in error
    assert main([*job, "ep=3,dp=3"]) == 0


@pytest.mark.parametrize("part", [Loop, OneScope])
def test_a_token_meets_one_of_the_experts_of_a_loop(part):
    facts = capture(tagged(part), micro_batch=1, seq_len=SEQ_LEN, dtype="bf16").facts
    idle = 2 * (EXPERTS - 1) * 2 * (WIDTH * WIDTH + WIDTH)
    assert facts.n_active_parameters == facts.n_parameters - idle


def test_the_description_of_a_module_tells_its_active_parameters(capsys):
    assert main(["models", "tests.piper.graph.test_experts:one_scope", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    idle = 2 * (EXPERTS - 1) * 2 * (WIDTH * WIDTH + WIDTH)
    assert found["n_active_parameters"] == found["n_parameters"] - idle
