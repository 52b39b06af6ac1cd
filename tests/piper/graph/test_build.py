"""The first graph of a captured module: data flows straight from who makes a tensor to who takes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper import annotate
from piper.capture import capture
from piper.errors import ModelError
from piper.graph import Graph, stages_of_segments, units_of
from piper.graph.build import build_graph
from simulator.plan import TaskKind

HIDDEN = 8


class Module(nn.Module):
    """A table, four layers and a head; `forward` is the test's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.head = nn.Linear(HIDDEN, 16, bias=False)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten(), reduction="sum")


def graph_of(module: nn.Module) -> Graph:
    model = capture(module, micro_batch=2, seq_len=4, dtype="fp32")
    units = units_of(model)
    stages = stages_of_segments(units, (1,) * units.count)
    return build_graph((model,), stages, replica_batch=2, dtype="fp32", optimizer="sgd", clip_grad_norm=None)


def edges(graph: Graph) -> set[str]:
    return {f"{edge.source} {edge.target}" for edge in graph.edges}


class Branches(Module):
    """Two branches from one tensor, joined at the head; a gate goes past both."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.embed(tokens)
            gate = torch.tanh(x)
        with annotate("PP"):
            left = F.relu(self.layers[0](x))
        with annotate("PP"):
            right = F.relu(self.layers[1](x))
        with annotate("PP"):
            x = (left + right) * gate
        return self.loss(x, labels)


def test_branches_stay_branches_and_a_skip_passes_nobody() -> None:
    graph = graph_of(Branches())
    assert edges(graph) == {
        "F.0 F.1", "F.0 F.2", "F.1 F.3", "F.2 F.3", "F.0 F.3", "F.3 F.4",
        "B.4 B.3", "B.3 B.2", "B.3 B.1", "B.3 B.0", "B.2 B.0", "B.1 B.0",
        *(f"F.{i} B.{i}" for i in range(5)),
    }  # fmt: skip
    assert graph.model.segments[3].inputs == ((1, 0), (2, 0), (0, 1))
    assert len(graph.model.segments[0].outputs) == 2


def test_branches_do_not_depend_on_each_other_in_either_pass() -> None:
    graph = graph_of(Branches())
    for one, other in (("F.1", "F.2"), ("F.2", "F.1"), ("B.1", "B.2"), ("B.2", "B.1")):
        reached, pending = set(), [one]
        while pending:
            for edge in graph.outgoing.get(pending.pop(), ()):
                if edge.target not in reached:
                    reached.add(edge.target)
                    pending.append(edge.target)
        assert other not in reached


class Nested(Module):
    """A layer with a scope inside, the last one with its index given."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.embed(tokens)
        for index, layer in zip((None, None, 9), self.layers[:3], strict=True):
            with annotate("PP"):
                x = x * 2.0
                with annotate("ACT", index):
                    x = layer(x)
                x = x + 1.0
        return self.loss(x, labels)


def test_a_nested_scope_cuts_three_ways_and_only_the_middle_has_its_tag() -> None:
    graph = graph_of(Nested())
    tags = [dict(node.tags) for node in graph.nodes if node.kind is TaskKind.F]
    assert tags[1:4] == [{"PP": 1}, {"PP": 1, "ACT": 0}, {"PP": 1}]
    assert [found.get("ACT") for found in tags] == [None, None, 0, None, None, 1, None, None, 9, None, None]
    assert [graph.model.segments[i].parameters for i in (1, 2, 3)] == [(), ("layers.0.weight",), ()]


class Reopened(Module):
    """One unit in two places of the code, and an inner scope that is opened again later."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP", 0):
            x = self.embed(tokens)
        with annotate("PP", 0):
            x = F.relu(x)
        with annotate("PP"), annotate("EP"):
            x = self.layers[0](x)
        with annotate("PP"), annotate("EP", 0):
            x = self.layers[1](x)
        return self.loss(x, labels)


def test_a_scope_that_is_opened_again_is_the_same_unit_in_a_segment_of_its_own() -> None:
    graph = graph_of(Reopened())
    assert units_of(graph.model).of_segment == (0, 0, 1, 2, 3)
    assert [dict(segment.tags).get("EP") for segment in graph.model.segments] == [None, None, 0, 0, None]
    assert graph.num_stages == 4


class InnerWins(Module):
    """A unit inside a unit: the inner one counts, and the outer one goes on behind it."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.embed(tokens)
            with annotate("PP"):
                x = self.layers[0](x)
        return self.loss(x, labels)


def test_of_two_units_around_an_operation_the_inner_one_wins() -> None:
    assert units_of(graph_of(InnerWins()).model).of_segment == (0, 1, 2)


class Backwards(Module):
    """The first unit goes on behind the second."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.embed(tokens)
            with annotate("PP"):
                x = self.layers[0](x)
            x = self.layers[1](x)
        return self.loss(x, labels)


def test_units_that_run_backwards_are_refused_by_number() -> None:
    with pytest.raises(ModelError) as caught:
        graph_of(Backwards())
    assert (caught.value.field, caught.value.value, caught.value.rule) == ("PP", 0, "comes after PP 1")


class Plain(Module):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.embed(tokens)
        for layer in self.layers:
            with annotate("PP"):
                x = F.relu(layer(x))
        return self.loss(x, labels)


def test_what_comes_before_the_first_trained_parameter_has_no_backward() -> None:
    module = Plain()
    module.embed.weight.requires_grad_(False)
    module.layers[0].weight.requires_grad_(False)
    graph = graph_of(module)
    assert [node.uid for node in graph.nodes if node.kind is TaskKind.B] == ["B.2", "B.3", "B.4", "B.5"]
    assert not any(edge.target in {"B.0", "B.1"} for edge in graph.edges)
    assert "wgrad" not in {op.direction for op in graph.model.segments[1].backward.operations}


def test_a_frozen_layer_in_the_middle_passes_gradients_but_makes_none_of_its_own() -> None:
    module = Plain()
    module.layers[1].weight.requires_grad_(False)
    graph = graph_of(module)
    assert {"B.3 B.2", "B.2 B.1"} <= edges(graph)
    directions = [{op.direction for op in s.backward.operations} for s in graph.model.segments]
    assert "wgrad" not in directions[2]
    assert {"dgrad", "wgrad"} <= directions[3]
    assert [p.name for p in graph.model.parameters if not p.trainable] == ["layers.1.weight"]


def test_a_tied_parameter_belongs_to_every_segment_that_uses_it() -> None:
    module = Plain()
    module.layers[3].weight = module.layers[0].weight
    model = graph_of(module).model
    assert [segment.parameters for segment in model.segments[1:5]] == [
        ("layers.0.weight",), ("layers.1.weight",), ("layers.2.weight",), ("layers.0.weight",),
    ]  # fmt: skip
    assert sum(p.numel for p in model.parameters) == 2 * 16 * HIDDEN + 3 * HIDDEN * HIDDEN
