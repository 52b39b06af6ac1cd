"""Export, cut, and agreement with the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.annotation import annotate
from piper.capture import capture
from piper.errors import ModelError
from piper.models import find_model
from piper.runtime.dropout import DropoutKeys, KeyedDropout
from piper.runtime.program import Program, build_program, check_program
from piper.runtime.sources import buffer_values, build, canonical_names
from tests.piper.runtime.jobs import plan_of, program, program_for
from tests.piper.runtime.toy import SEQ, VOCABULARY, toy


def run_all(found: Program, module: nn.Module, inputs: tuple[Tensor, Tensor], keys: DropoutKeys) -> Tensor:
    """Run every segment, one after another."""
    canonical = {canonical_names(module)[name]: p for name, p in module.named_parameters()}
    tensors = {(-1, 0): inputs[0], (-1, 1): inputs[1]}
    for number, code in enumerate(found.segments[len(inputs[0])]):
        arguments: list[Any] = [tensors[value] for value in code.inputs]
        arguments += [canonical[name] for name in code.parameters]
        arguments += [found.buffers[name] for name in code.buffers]
        arguments += [keys] if code.keyed else []
        tensors |= {(number, i): t for i, t in enumerate(code.run(*arguments))}
    return tensors[number, 0]


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"dropout": 0.3}])
def test_segments_give_the_modules_loss_and_gradients_bit_by_bit(options: dict[str, Any]) -> None:
    found = program(2, tuple(options.items()))
    module = build(toy(**options), dtype="fp32", device="cpu", seq_len=SEQ)
    data = torch.randint(VOCABULARY, (2, SEQ + 1))
    inputs = (data[:, :-1].contiguous(), data[:, 1:].contiguous())
    keys = DropoutKeys(seed=0, step=0, samples=(0, 1))
    with KeyedDropout(keys):
        expected = module(*inputs)
    loss = run_all(found, module, inputs, keys)
    assert torch.equal(loss, expected)
    parameters = list(module.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tied", [False, True])
def test_capture_and_export_see_the_same_segments(tied: bool) -> None:
    module = build(toy(tied=tied), dtype="fp32", device="meta", seq_len=SEQ)
    seen = capture(module, micro_batch=1, seq_len=SEQ, dtype="fp32", dedupe=False)
    codes = program(1, (("tied", tied),) if tied else ()).segments[1]
    assert [s.inputs for s in seen.segments] == [c.inputs for c in codes]
    assert [s.parameters for s in seen.segments] == [c.parameters for c in codes]
    assert [s.tags for s in seen.segments] == [c.tags for c in codes]
    assert [[(o.shape, o.dtype) for o in s.outputs] for s in seen.segments] == [
        [(o.shape, o.dtype) for o in c.outputs] for c in codes
    ]


def test_tiny_llama_is_captured_and_exported_alike() -> None:
    source = find_model("tiny-llama")
    seen = capture(source, micro_batch=1, seq_len=64, dtype="fp32")
    codes = build_program(source, seq_len=64, micro_batch_sizes=(1,), dtype="fp32").segments[1]
    assert [s.inputs for s in seen.segments] == [c.inputs for c in codes]
    assert [set(s.parameters) for s in seen.segments] == [set(c.parameters) for c in codes]


def test_tied_parameters_have_one_name() -> None:
    names = canonical_names(build(toy(tied=True), dtype="fp32", device="meta", seq_len=SEQ))
    assert names["head.weight"] == "embed.weight"


def test_buffers_have_values_and_parameters_are_never_made() -> None:
    made: list[torch.device] = []

    class Watched(nn.Linear):
        def reset_parameters(self) -> None:
            made.append(self.weight.device)

    def factory() -> nn.Module:
        module = Watched(3, 3)
        module.register_buffer("table", torch.arange(3.0))
        return module

    values = buffer_values(factory, dtype="fp32", seq_len=SEQ)
    assert torch.equal(values["table"], torch.arange(3.0))
    assert made == [torch.device("meta")]
    assert not nn.Linear(2, 2).weight.is_meta


class Wrapped(nn.Module):
    """One segment around a function of the embedding."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor], extra: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.extra = extra
        self.register_buffer("table", torch.ones(8))
        self.body = body

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.body(self, self.embed(tokens))
            return F.cross_entropy(x.flatten(0, 1), labels.flatten() % 8, reduction="sum")


def refused(
    body: Callable[[Any, Tensor], Tensor], extra: Callable[[], nn.Module] | None = None
) -> ModelError:
    with pytest.raises(ModelError) as caught:
        build_program(
            lambda: Wrapped(body, extra() if extra else None), seq_len=4, micro_batch_sizes=(2,), dtype="fp32"
        )
    assert caught.value.fix
    return caught.value


def test_random_operations_that_cannot_be_keyed_are_named() -> None:
    error = refused(lambda _, x: x + torch.rand_like(x))
    assert (error.field, error.value) == ("operation", "aten.rand_like.default")
    assert "torch.nn.Dropout" in error.fix


def test_dropout_inside_attention_is_named() -> None:
    error = refused(lambda _, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1))
    assert "scaled_dot_product_attention" in str(error.value)


def test_running_statistics_are_refused() -> None:
    error = refused(lambda m, x: m.extra(x.transpose(1, 2)).transpose(1, 2), partial(nn.BatchNorm1d, 8))
    assert error.field == "operation"
    assert "changes a parameter or buffer" in error.rule
    assert "RMSNorm" in error.fix


def test_parameters_changed_in_forward_are_refused() -> None:
    def scale(module: Any, x: Tensor) -> Tensor:
        module.embed.weight.detach().mul_(0.5)
        return x * 1

    assert "changes a parameter" in refused(scale).rule


def test_graphs_inside_the_graph_are_named() -> None:
    def without_grad(_: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().max()
        return x / scale

    error = refused(without_grad)
    assert "contains a graph of its own" in error.rule
    assert "detach()" in error.fix


def test_operations_outside_of_annotations_are_named() -> None:
    class Bare(nn.Module):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            return (tokens * labels).float().sum()

    with pytest.raises(ModelError) as caught:
        build_program(Bare, seq_len=4, micro_batch_sizes=(2,), dtype="fp32")
    assert "outside of every annotation" in caught.value.rule
    assert "annotate" in caught.value.fix


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"parameters": ("nobody",)}, "parameters of segment 1"),
        ({"inputs": ((-1, 1),)}, "inputs of segment 1"),
        ({"outputs": ()}, "outputs of segment 1"),
    ],
)
def test_a_plan_of_another_module_is_refused(change: dict[str, Any], field: str) -> None:
    plan = plan_of("dp=1")
    segments = list(plan.segments)
    segments[1] = replace(segments[1], **change)
    with pytest.raises(ModelError) as caught:
        check_program(program_for(plan), replace(plan, segments=tuple(segments)))
    assert caught.value.field.startswith(field)
    assert "not the one that was planned" in caught.value.rule


def test_a_plan_with_other_segments_is_refused() -> None:
    plan = plan_of("dp=1")
    with pytest.raises(ModelError) as caught:
        check_program(program_for(plan), replace(plan, segments=plan.segments[:-1]))
    assert (caught.value.field, caught.value.value) == ("segments", 6)
