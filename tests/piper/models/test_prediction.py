"""Modules for further tokens: what they read, what they are asked for, and where they lie in the pipeline."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from piper.capture import capture
from piper.models.decoder import CausalLM
from piper.models.prediction import LOSS_WEIGHT, ahead
from tests.piper.models.transformers_cases.case import VOCABULARY
from tests.piper.models.transformers_cases.table import CASES

SEQ = 10


def built(depth):
    torch.manual_seed(0)
    module = CausalLM(replace(CASES["deepseek_v3"].shape, prediction_depth=depth), seq_len=SEQ)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2)
    return module


def batch():
    data = torch.randint(0, VOCABULARY, (2, SEQ + 1), generator=torch.Generator().manual_seed(3))
    return data, data[:, :-1].contiguous(), data[:, 1:].contiguous()


def plain_loss(module, data):
    """The sum over depths by the equations of the paper, position by position where a target exists."""
    tokens = data[:, :-1]
    x = module.model(tokens)
    total = F.cross_entropy(
        module.lm_head(module.model.norm(x)).flatten(0, 1), data[:, 1:].flatten(), reduction="sum"
    )
    depths = module.shape.prediction_depth
    for k in range(1, depths + 1):
        part = module.model.predictions[k - 1]
        x = x[:, : SEQ + 1 - k]
        embedded = module.model.embed_tokens(data[:, k : k + x.shape[1]])
        joined = part.eh_proj(torch.cat((part.enorm(embedded), part.hnorm(x)), -1))
        x = part.layer.transform(joined, module.model.tables(module.shape.layers[-1]))
        known = SEQ - k
        logits = module.lm_head(part.norm(x[:, :known]))
        targets = data[:, k + 1 : k + 1 + known]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        total = total + LOSS_WEIGHT / depths * loss
    return total


@pytest.mark.parametrize("depth", [1, 2])
def test_the_loss_is_that_of_the_papers_equations(depth):
    module = built(depth)
    data, tokens, labels = batch()
    loss, expected = module(tokens, labels), plain_loss(module, data)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    parameters = list(module.parameters())
    for ours, plain in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_labels_ahead_end_in_what_is_said():
    labels = torch.tensor([[1, 2, 3, 4]])
    assert ahead(labels, 0, fill=-100) is labels
    assert ahead(labels, 2, fill=-100).tolist() == [[3, 4, -100, -100]]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_module_is_a_layer_behind_the_last_one_that_shares_embedding_and_head(depth):
    module = built(depth)
    assert sum(p.numel() for p in module.parameters()) == module.shape.n_parameters
    model = capture(module, micro_batch=2, seq_len=SEQ, dtype="bf16")
    layers = len(module.shape.layers)
    tags = [dict(segment.tags) for segment in model.segments]
    assert {tag["LAYER"] for tag in tags if "LAYER" in tag} == set(range(layers + depth))
    assert {tag["PP"] for tag in tags} == set(range(1 + layers + depth + 1))
    users = [number for number, s in enumerate(model.segments) if "model.embed_tokens.weight" in s.parameters]
    assert [tags[number].get("LAYER") for number in users] == [None, *range(layers, layers + depth)]
    heads = [s for s in model.segments if "lm_head.weight" in s.parameters]
    assert len(heads) == 1 + depth
    assert model.segments[-1] is heads[-1]
