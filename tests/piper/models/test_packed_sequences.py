"""Documents packed into one sequence do not see each other, and cost what they would cost alone."""

import json
from dataclasses import replace

import pytest
import torch

from cost_models.ops import OpKind
from piper.capture import capture
from piper.errors import ModelError
from piper.models import find_model
from piper.models.decoder import CausalLM
from tests.piper.models.transformers_cases.case import VOCABULARY
from tests.piper.models.transformers_cases.table import CASES

KINDS = ("llama", "mistral_window", "gpt2", "mpt", "gemma2", "gpt_oss", "deepseek_v3")
PACKINGS = [(4, 4, 4), (5, 1, 6)]


def built(name, **changes):
    torch.manual_seed(0)
    module = CausalLM(replace(CASES[name].shape, **changes), seq_len=12)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return module


@pytest.mark.parametrize("lengths", PACKINGS)
@pytest.mark.parametrize("name", KINDS)
def test_the_loss_is_the_sum_over_the_documents_alone(name, lengths):
    packed, plain = built(name, segment_lengths=lengths), built(name)
    data = torch.randint(0, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(2))
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    loss = packed(tokens, labels)
    alone = sum(
        plain(some, wanted)
        for some, wanted in zip(tokens.split(lengths, 1), labels.split(lengths, 1), strict=True)
    )
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize("lengths", PACKINGS)
def test_attention_costs_the_squares_of_the_documents(lengths):
    model = capture(built("llama", segment_lengths=lengths), micro_batch=2, seq_len=12, dtype="bf16")
    flops = [
        op.flops * op.count
        for segment in model.segments
        for op in segment.forward.operations
        if op.kind is OpKind.ATTENTION
    ]
    layers, heads, head_dim = 2, 4, 8
    assert sum(flops) == layers * 2 * 2 * 2 * heads * head_dim * sum(n * n for n in lengths) // 2


def test_documents_must_fill_the_sequence():
    module = built("llama", segment_lengths=(4, 4))
    with pytest.raises(ModelError) as caught:
        capture(module, micro_batch=1, seq_len=12, dtype="bf16")
    assert caught.value.field == "segment_lengths"
    assert "12 tokens" in caught.value.rule
    assert "set seq_len to 8" in caught.value.fix


def test_the_sequence_is_as_long_as_its_documents_unless_said_otherwise(tmp_path):
    config = dict(find_model("tiny-llama").config) | {"segment_lengths": [16, 24, 8]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert find_model(str(file)).default_seq_len == 48
