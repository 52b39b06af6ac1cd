"""Tracing, cutting, and agreement with capture and the plan."""

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
from piper.runtime.here import Here
from piper.runtime.program import Program, build_program, check_program
from piper.runtime.sources import buffer_values, build
from tests.piper.runtime.jobs import plan_of, program, program_for
from tests.piper.runtime.toy import SEQ, VOCABULARY, toy


def run_all(found: Program, module: nn.Module, inputs: tuple[Tensor, Tensor], keys: DropoutKeys) -> Tensor:
    """Run every segment, one after another."""
    parameters = dict(module.named_parameters())
    tensors = {(-1, 0): inputs[0], (-1, 1): inputs[1]}
    for number, code in enumerate(found.segments[len(inputs[0])]):
        arguments: list[Any] = [tensors[value] for value in code.inputs]
        arguments += [parameters[name] for name in code.parameters]
        arguments += [found.buffers[name] for name in code.buffers]
        arguments += [Here(keys=keys)] if code.keyed else []
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


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"crossing": True}, {"frozen": 2}])
def test_capture_and_trace_see_the_same_segments(options: dict[str, Any]) -> None:
    module = build(toy(**options), dtype="fp32", device="meta", seq_len=SEQ)
    seen = capture(module, micro_batch=1, seq_len=SEQ, dtype="fp32", dedupe=False)
    codes = program(1, tuple(options.items())).segments[1]
    assert [s.inputs for s in seen.segments] == [c.inputs for c in codes]
    assert [s.parameters for s in seen.segments] == [c.parameters for c in codes]
    assert [s.tags for s in seen.segments] == [c.tags for c in codes]
    assert [[(o.shape, o.dtype, o.requires_grad) for o in s.outputs] for s in seen.segments] == [
        [(o.shape, o.dtype, o.requires_grad) for o in c.outputs] for c in codes
    ]


def test_tiny_llama_is_captured_and_traced_alike() -> None:
    source = find_model("tiny-llama")
    seen = capture(source, micro_batch=1, seq_len=64, dtype="fp32")
    codes = build_program(source, seq_len=64, micro_batch_sizes=(1,), dtype="fp32").segments[1]
    assert [s.inputs for s in seen.segments] == [c.inputs for c in codes]
    assert [set(s.parameters) for s in seen.segments] == [set(c.parameters) for c in codes]


class Masked(nn.Module):
    """Every scope makes the same view of a mask; one hands its own on, one views to the shape it has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            x, mask = self.embed(tokens), tokens > 3
        for _ in range(2):
            with annotate("PP"):
                x = (x * 2.0).view(x.shape) * mask.unsqueeze(-1)
        with annotate("PP"):
            viewed, handed_on = x.view(x.shape), mask.unsqueeze(-1)
            x = viewed + 1.0
        with annotate("PP"):
            return F.cross_entropy((x * handed_on).flatten(0, 1), labels.flatten() % 8, reduction="sum")


def test_a_view_that_looks_like_an_earlier_one_belongs_to_the_scope_that_makes_it() -> None:
    seen = capture(Masked(), micro_batch=2, seq_len=6, dtype="fp32")
    found = build_program(Masked, seq_len=6, micro_batch_sizes=(2,), dtype="fp32")
    codes = found.segments[2]
    assert [s.inputs for s in seen.segments] == [c.inputs for c in codes]
    assert [[o.shape for o in s.outputs] for s in seen.segments] == [
        [o.shape for o in c.outputs] for c in codes
    ]
    module = Masked()
    inputs = (torch.randint(VOCABULARY, (2, 6)), torch.randint(VOCABULARY, (2, 6)))
    keys = DropoutKeys(seed=0, step=0, samples=(0, 1))
    assert torch.equal(run_all(found, module, inputs, keys), module(*inputs))


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
    """One or two segments around a function of the embedding."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], extra: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.extra = extra
        self.register_buffer("table", torch.linspace(0.0, 1.0, 8))
        self.columns: Tensor | None = None
        self.body = body

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.embed(tokens)
        with annotate("PP"):
            x = self.body(self, x)
        with annotate("PP"):
            x = x @ self.columns if self.columns is not None else x
            return F.cross_entropy(x.flatten(0, 1), labels.flatten() % 8, reduction="sum")


def wrapped(body: Callable[[Any, Tensor], Tensor]) -> Program:
    return build_program(lambda: Wrapped(body), seq_len=6, micro_batch_sizes=(2,), dtype="fp32")


def without_grad(_: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().max()
    return x / scale


def in_place_on_a_view(_: Any, x: Tensor) -> Tensor:
    x.view(-1, 8)[:, 2:4].mul_(3.0)
    x += 1.0
    return x * x


def by_index(module: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., 1:] = x[..., :-1] * module.table[1:]
    y[:, [0, 1]] = 2.0
    return y + x.flip(dims=[-1])


def several_results(_: Any, x: Tensor) -> Tensor:
    values, _ = x.max(dim=-1, keepdim=True)
    first, second = x.split([3, 5], dim=-1)
    return torch.cat([second, first], dim=-1) - torch.stack((values, values), 0).sum(0)


def nothing_new(_: Any, x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().contiguous().to(x.dtype).transpose(0, 1).float()


def detached(_: Any, x: Tensor) -> Tensor:
    return x * x.detach()


def made_here(_: Any, x: Tensor) -> Tensor:
    position = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril().bool()
    scores = (x @ x.mT).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ x + position[:, None]


def attention_like_hf(_: Any, x: Tensor) -> Tensor:
    heads = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return mixed.contiguous().view(x.shape[0], 2, -1, 4).transpose(1, 2).contiguous().view(x.shape)


def view_of_a_weight(module: Any, x: Tensor) -> Tensor:
    module.columns = module.embed.weight.t()[:, :8]
    return x @ module.columns


@pytest.mark.parametrize(
    "body",
    [
        without_grad, in_place_on_a_view, by_index, several_results, nothing_new, detached, made_here,
        attention_like_hf, view_of_a_weight,
    ],
)  # fmt: skip
def test_whatever_forward_calls_is_called_again(body: Callable[[Any, Tensor], Tensor]) -> None:
    found = wrapped(body)
    module = Wrapped(body)
    inputs = (torch.randint(VOCABULARY, (2, 6)), torch.randint(VOCABULARY, (2, 6)))
    expected = module(*inputs)
    for _ in range(2):  # a segment may run any number of times
        loss = run_all(found, module, inputs, DropoutKeys(seed=0, step=0, samples=(0, 1)))
        assert torch.equal(loss, expected)
        ours, theirs = (
            torch.autograd.grad(value, module.embed.weight, retain_graph=True) for value in (loss, expected)
        )
        assert torch.equal(ours[0], theirs[0])


def test_a_segment_leaves_its_inputs_as_they_are() -> None:
    found = build_program(
        lambda: Wrapped(in_place_on_a_view), seq_len=6, micro_batch_sizes=(2,), dtype="fp32"
    )
    x = torch.randn(2, 6, 8)
    before = x.clone()
    found.segments[2][1].run(x)
    assert torch.equal(x, before)


def test_a_tensor_that_is_used_no_more_is_dropped_inside_a_segment() -> None:
    code = build_program(
        lambda: Wrapped(made_here), seq_len=6, micro_batch_sizes=(2,), dtype="fp32"
    ).segments[2][1]
    assert code.source.count("del ") >= 5


def refused(
    body: Callable[[Any, Tensor], Tensor], extra: Callable[[], nn.Module] | None = None
) -> ModelError:
    def factory() -> nn.Module:
        return Wrapped(body, extra() if extra else None)

    with pytest.raises(ModelError) as caught:
        build_program(factory, seq_len=4, micro_batch_sizes=(2,), dtype="fp32")
    assert caught.value.fix
    return caught.value


def test_random_operations_that_cannot_be_keyed_are_named() -> None:
    error = refused(lambda _, x: x + torch.rand_like(x))
    assert (error.field, error.value) == ("operation", "rand_like")
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


def test_autocast_is_refused() -> None:
    def cast(_: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + 1

    error = refused(cast)
    assert error.field == "autocast"
    assert "--dtype" in error.fix


def test_a_tensor_from_nowhere_is_named() -> None:
    kept = torch.ones(8, device="meta")
    error = refused(lambda _, x: x * kept)
    assert (error.field, error.value) == ("tensor", "[8] torch.float32")
    assert "register_buffer" in error.fix


def test_a_custom_function_is_refused() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    assert "custom autograd.Function" in refused(lambda _, x: Double.apply(x) + 1).rule


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
