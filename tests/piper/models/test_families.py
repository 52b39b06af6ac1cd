"""What holds for every family: it is built, counted, trained, captured, and cut without a difference."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cost_models.ops import OpKind
from piper.capture import CapturedModel, KernelChoice, capture
from piper.models import MODELS, ModelSource, build_module
from piper.models.find import from_config
from piper.runtime.dropout import DropoutKeys, KeyedDropout
from piper.runtime.here import Here
from piper.runtime.program import Program, build_program
from tests.tiny_configs import TINY

SEQ = 16


@cache
def source(name: str) -> ModelSource:
    return from_config(TINY[name], name=name, kind="config", where=name)


@cache
def captured(name: str) -> CapturedModel:
    return capture(source(name), micro_batch=2, seq_len=SEQ, dtype="fp32")


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build_module(source(name), dtype="fp32", seq_len=SEQ).train()


def batch(name: str) -> tuple[Tensor, Tensor]:
    vocabulary = captured(name).facts.vocabulary
    data = torch.randint(0, vocabulary, (2, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def test_every_family_has_a_small_config() -> None:
    assert set(TINY) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_module_has_as_many_parameters_as_its_config_says(name: str) -> None:
    module = build_module(source(name), dtype="fp32", device="meta")
    assert sum(parameter.numel() for parameter in module.parameters()) == source(name).n_parameters
    assert sum(parameter.numel for parameter in captured(name).parameters) == source(name).n_parameters


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_trained(name: str) -> None:
    module = built(name)
    loss = module(*batch(name))
    loss.backward()
    assert loss.isfinite()
    without = [n for n, p in module.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not without


@pytest.mark.parametrize("name", MODELS)
def test_one_layer_after_the_other_is_the_whole_module(name: str) -> None:
    """Loss and gradients are equal bit by bit, and capture names the same segments as the trace."""
    found = build_program(source(name), seq_len=SEQ, micro_batch_sizes=(2,), dtype="fp32")
    seen, codes = captured(name).segments, found.segments[2]
    assert [s.tags for s in seen] == [c.tags for c in codes]
    assert [s.inputs for s in seen] == [c.inputs for c in codes]
    assert [set(s.parameters) for s in seen] == [set(c.parameters) for c in codes]
    module, inputs = built(name), batch(name)
    keys = DropoutKeys(seed=0, step=0, samples=(0, 1))
    with KeyedDropout(keys):
        expected = module(*inputs)
    loss = run_all(found, module, inputs, keys)
    assert torch.equal(loss, expected)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    ours, theirs = torch.autograd.grad(loss, trained), torch.autograd.grad(expected, trained)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def run_all(found: Program, module: nn.Module, inputs: tuple[Tensor, Tensor], keys: DropoutKeys) -> Tensor:
    """Run every segment, one after another."""
    parameters = dict(module.named_parameters())
    tensors = {(-1, 0): inputs[0], (-1, 1): inputs[1]}
    number = -1
    for number, code in enumerate(found.segments[len(inputs[0])]):
        arguments: list[Any] = [tensors[value] for value in code.inputs]
        arguments += [parameters[parameter] for parameter in code.parameters]
        arguments += [found.buffers[buffer] for buffer in code.buffers]
        arguments += [Here(keys=keys, segment=number)] if code.keyed else []
        tensors |= {(number, i): tensor for i, tensor in enumerate(code.run(*arguments))}
    return tensors[number, 0]


def grouped_flops(rows: Sequence[int], experts: Sequence[int], *_: Any, **__: Any) -> int:
    """Count a grouped product, which torch's counter does not know: every row meets one expert."""
    return 2 * rows[0] * rows[1] * experts[-1]


@pytest.mark.parametrize("name", MODELS)
def test_captured_flops_are_those_of_torchs_counter(name: str) -> None:
    module, (tokens, labels) = built(name), batch(name)
    known = {torch.ops.aten._grouped_mm: grouped_flops}
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False, custom_mapping=known) as forward:
            loss = module(tokens, labels)
        with FlopCounterMode(display=False, custom_mapping=known) as backward:
            loss.backward()
    kernels = KernelChoice(device="cpu", attention="math")
    model = capture(source(name), micro_batch=2, seq_len=SEQ, dtype="fp32", kernels=kernels)
    products = {OpKind.MATMUL, OpKind.GROUPED_MATMUL}
    for cost, counter in (("forward", forward), ("backward", backward)):
        operations = [op for segment in model.segments for op in getattr(segment, cost).operations]
        counted = sum(op.flops * op.count for op in operations if op.kind in products)
        assert counted == counter.get_total_flops(), cost
