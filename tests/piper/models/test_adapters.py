"""Low-rank adapters and frozen parts: what is trained, what is computed, and what tensor parallelism cuts."""

from dataclasses import replace

import pytest
import torch

from piper.capture import capture
from piper.models.decoder import CausalLM
from piper.models.projections import AdaptedLinear
from piper.models.shape import LowRankAdapters
from tests.piper.models.transformers_cases import CASES, VOCABULARY

ALL = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "q_b_proj",
       "q_a_proj", "kv_b_proj")  # fmt: skip
ADAPTERS = LowRankAdapters(rank=4, alpha=6.0, targets=ALL)


def built(name, **changes):
    torch.manual_seed(0)
    module = CausalLM(replace(CASES[name].shape, **changes), seq_len=8)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2)
    return module


def batch():
    data = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def merged(module, plain):
    """Put W + alpha / rank * B A into a module without adapters."""
    weights = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(weights[name])
            owner = name.removesuffix(".weight")
            if f"{owner}.lora_A" in weights:
                parameter += 6.0 / 4 * weights[f"{owner}.lora_B"] @ weights[f"{owner}.lora_A"]
        for router, other in zip(
            (m for m in plain.modules() if hasattr(m, "correction_bias")),
            (m for m in module.modules() if hasattr(m, "correction_bias")),
            strict=True,
        ):
            router.correction_bias.copy_(other.correction_bias)
    return plain


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "deepseek_v3", "qwen2_moe", "phi3_longrope"])
def test_an_adapter_adds_its_product_to_the_frozen_matrix(name):
    module = built(name, adapters=ADAPTERS)
    loss, expected = module(*batch()), merged(module, built(name))(*batch())
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)


def test_only_adapters_are_trained_and_start_without_effect():
    module = CausalLM(replace(CASES["llama"].shape, adapters=ADAPTERS), seq_len=8)
    adapted = [m for m in module.modules() if isinstance(m, AdaptedLinear)]
    assert len(adapted) == 2 * 7
    assert all(m.lora_B.abs().max() == 0 and m.lora_A.abs().max() > 0 for m in adapted)
    assert {n.rpartition(".")[2] for n, p in module.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }


def test_frozen_parts_are_named_by_the_beginning_of_their_parameters():
    module = built("llama", frozen=("model.embed_tokens", "model.layers.0.self_attn"))
    module(*batch()).backward()
    without = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert without == {
        "model.embed_tokens.weight",
        *(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"),
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "deepseek_v3"])
def test_adapters_leave_the_cut_of_the_frozen_matrices_as_it_is(name):
    """By outputs: B is cut with the matrix, A lies outside. By inputs: A is cut with it, B lies outside."""
    plain = capture(built(name), micro_batch=1, seq_len=8, dtype="bf16")
    adapted = capture(built(name, adapters=ADAPTERS), micro_batch=1, seq_len=8, dtype="bf16")
    cut = [
        {name: dim for segment in m.segments for name, dim in segment.tensor_layout} for m in (plain, adapted)
    ]
    assert not any(segment.tensor_refused for segment in adapted.segments)
    assert cut[0].items() <= cut[1].items()
    for added in cut[1].keys() - cut[0].keys():
        owner, _, factor = added.rpartition(".")
        by_outputs = cut[1][f"{owner}.weight"] == 0
        assert (factor, cut[1][added]) == (("lora_B", 0) if by_outputs else ("lora_A", 1)), added
