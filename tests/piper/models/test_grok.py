"""Grok-1 has no module in `transformers`: loss and gradients against a plain one written from its source.

What the plain one does is what xai-org/grok-1, `model.py`, does: scores are multiplied, then capped, then
masked; weights of the chosen experts are their share of the softmax over all experts; norms stand before and
after each part.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from piper.models import build_module
from piper.models.find import from_config
from tests.tiny_configs import TINY

CONFIG = TINY["grok"] | {"num_key_value_heads": 2, "max_attn_value": 3.0, "attn_output_multiplier": 0.9}
HEADS, KV_HEADS, LAYERS, HIDDEN, TOP_K = 8, 2, 2, 64, 2
HEAD_DIM = HIDDEN // HEADS


def norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def turned(x, theta=10000.0):
    """Rotate each pair (i, i + d/2) of [seq, d] as a complex number."""
    half = x.shape[1] // 2
    angles = torch.outer(torch.arange(len(x)).double(), theta ** (-torch.arange(half).double() / half))
    rotated = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((rotated.real, rotated.imag), -1)


def attended(x, w):
    mixed = []
    for head in range(HEADS):
        of_kv = head // (HEADS // KV_HEADS)
        query, key, value = (
            x @ w[f"self_attn.{part}_proj.weight"][at * HEAD_DIM : (at + 1) * HEAD_DIM].T
            for part, at in (("q", head), ("k", of_kv), ("v", of_kv))
        )
        scores = 3.0 * torch.tanh(turned(query) @ turned(key).T * 0.9 / 3.0)
        hidden = torch.triu(torch.ones_like(scores), diagonal=1).bool()
        mixed.append(torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ value)
    return torch.cat(mixed, -1) @ w["self_attn.o_proj.weight"].T


def of_experts(x, w):
    w1, w2, w3 = (w[f"block_sparse_moe.experts.{name}"] for name in ("w1", "w2", "w3"))
    rows = []
    for token in x:
        shares = torch.softmax(w["block_sparse_moe.gate.weight"] @ token, 0)
        best = sorted(range(len(shares)), key=lambda e: -shares[e].item())[:TOP_K]
        rows.append(
            sum(
                shares[e] * (w2[e] @ (F.gelu(w1[e] @ token, approximate="tanh") * (w3[e] @ token)))
                for e in best
            )
        )
    return torch.stack(rows)


def plain_loss(weights, tokens, labels):
    total = 0.0
    for row, wanted in zip(tokens, labels, strict=True):
        x = weights["model.embed_tokens.weight"][row] * math.sqrt(HIDDEN)
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            w = {n.removeprefix(prefix): value for n, value in weights.items() if n.startswith(prefix)}
            made = attended(norm(x, w["input_layernorm.weight"]), w)
            x = x + norm(made, w["post_attention_layernorm.weight"])
            made = of_experts(norm(x, w["pre_feedforward_layernorm.weight"]), w)
            x = x + norm(made, w["post_feedforward_layernorm.weight"])
        logits = norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T / math.sqrt(3)
        total = total + F.cross_entropy(logits, wanted, reduction="sum")
    return total


def test_loss_and_gradients_are_those_of_the_published_source():
    source = from_config(CONFIG, name="grok", kind="config", where="grok")
    torch.manual_seed(0)
    module = build_module(source, dtype="fp32")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    data = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    tokens, labels = data[:, :-1], data[:, 1:]
    weights = {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}
    expected = plain_loss(weights, tokens, labels)
    gradients = torch.autograd.grad(expected, list(weights.values()))
    loss = module(tokens, labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, parameter), gradient in zip(module.named_parameters(), gradients, strict=True):
        scale = gradient.abs().max().item()
        torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-3, atol=1e-4 * scale, msg=name)
