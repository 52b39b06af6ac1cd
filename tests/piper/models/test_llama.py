"""The Llama module against a plain implementation written from the papers, and its options."""

import math

import pytest
import torch

from piper.models import build_module
from piper.models.families import llama
from piper.models.find import from_config
from piper.models.positions import rope_tables
from piper.models.shape import RopeScaling, Rotary

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 19,
    "max_position_embeddings": 12,
    "rope_theta": 100.0,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def build(**changes):
    source = from_config(CONFIG | changes, name="test", kind="config", where="test")
    torch.manual_seed(0)
    module = build_module(source, dtype="fp32")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, CONFIG["vocab_size"], (2, 9), generator=generator)
    return data[:, :-1], data[:, 1:]


def plain_loss(weights, tokens, labels, *, config):
    """The summed loss by explicit loops over heads and positions, in float64."""
    weights = {name: value.double() for name, value in weights.items()}
    heads, kv_heads, head_dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    total = 0.0
    for row, wanted in zip(tokens, labels, strict=True):
        x = weights["model.embed_tokens.weight"][row]
        for layer in range(config["num_hidden_layers"]):
            w = {
                name.removeprefix(f"model.layers.{layer}."): value
                for name, value in weights.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            normed = plain_norm(x, w["input_layernorm.weight"])
            mixed = []
            for head in range(heads):
                of_kv = head // (heads // kv_heads)
                query = plain_rope(project(normed, w, "self_attn.q_proj", head, head_dim), config)
                key = plain_rope(project(normed, w, "self_attn.k_proj", of_kv, head_dim), config)
                value = project(normed, w, "self_attn.v_proj", of_kv, head_dim)
                scores = query @ key.T / math.sqrt(head_dim)
                hidden = torch.triu(torch.ones_like(scores), diagonal=1).bool()
                mixed.append(torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ value)
            x = x + linear(torch.cat(mixed, -1), w, "self_attn.o_proj")
            normed = plain_norm(x, w["post_attention_layernorm.weight"])
            gate, up = linear(normed, w, "mlp.gate_proj"), linear(normed, w, "mlp.up_proj")
            x = x + linear(gate * torch.sigmoid(gate) * up, w, "mlp.down_proj")
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        logits = plain_norm(x, weights["model.norm.weight"]) @ head.T
        total = total + sum(
            torch.logsumexp(scores, 0) - scores[label] for scores, label in zip(logits, wanted, strict=True)
        )
    return total


def plain_norm(x, weight, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def project(x, weights, name, head, head_dim):
    return linear(x, weights, name)[:, head * head_dim : (head + 1) * head_dim]


def plain_rope(x, config):
    """Rotate each pair (i, i + d/2) as a complex number."""
    length, head_dim = x.shape
    frequency = plain_frequencies(config, head_dim)
    turned = torch.polar(
        torch.ones(length, head_dim // 2, dtype=torch.float64),
        torch.outer(torch.arange(length).double(), frequency),
    )
    rotated = torch.complex(x[:, : head_dim // 2], x[:, head_dim // 2 :]) * turned
    return torch.cat((rotated.real, rotated.imag), -1)


def plain_frequencies(config, head_dim):
    theta = config["rope_theta"]
    plain = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return plain
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"]
    new = []
    for frequency in plain.tolist():
        wavelength = 2 * math.pi / frequency
        low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
        high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
        if wavelength < high:
            new.append(frequency)
        elif wavelength > low:
            new.append(frequency / scaling["factor"])
        else:
            smooth = (
                scaling["original_max_position_embeddings"] / wavelength - scaling["low_freq_factor"]
            ) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
            new.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return torch.tensor(new, dtype=torch.float64)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"rope_scaling": LLAMA3_SCALING},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=["plain", "tied", "biases", "all_heads", "llama3_rope", "linear_rope"],
)
def test_loss_and_gradients_agree_with_a_plain_implementation(changes):
    config = CONFIG | changes
    module = build(**changes)
    tokens, labels = batch()
    weights = {name: value.detach().clone().requires_grad_() for name, value in module.named_parameters()}
    expected = plain_loss(weights, tokens, labels, config=config)
    gradients = torch.autograd.grad(expected, list(weights.values()))
    loss = module(tokens, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    for (name, parameter), gradient in zip(module.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient.float(), rtol=1e-4, atol=1e-5, msg=name)


def test_parameter_names_are_those_of_hugging_face():
    names = [name for name, _ in build(num_hidden_layers=1, attention_bias=True).named_parameters()]
    assert set(names) == {
        "model.embed_tokens.weight",
        *(f"model.layers.0.self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")),
        *(f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


def test_tied_embeddings_are_one_parameter():
    module = build(tie_word_embeddings=True)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    source = from_config(CONFIG | {"tie_word_embeddings": True}, name="t", kind="config", where="t")
    assert sum(parameter.numel() for parameter in module.parameters()) == source.n_parameters


def test_parameter_count_covers_every_option():
    options = {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    }
    source = from_config(CONFIG | options, name="t", kind="config", where="t")
    assert sum(p.numel() for p in build(**options).parameters()) == source.n_parameters


def test_rotary_tables_are_not_saved_and_can_be_filled_after_materialising():
    source = from_config(CONFIG, name="t", kind="config", where="t")
    module = build_module(source, dtype="fp32", device="meta")
    assert "model.cos" not in module.state_dict()
    module.to_empty(device="cpu")
    module.reset_buffers()
    expected = build()
    torch.testing.assert_close(module.model.cos, expected.model.cos, rtol=0, atol=0)
    torch.testing.assert_close(module.model.sin, expected.model.sin, rtol=0, atol=0)


def test_rotary_tables_reach_to_a_sequence_longer_than_the_context():
    source = from_config(CONFIG, name="t", kind="config", where="t")
    assert build_module(source, dtype="fp32", seq_len=30).model.cos.shape == (30, 4)
    assert build_module(source, dtype="fp32", seq_len=3).model.cos.shape == (12, 4)


def test_version_5_configs_give_theta_inside_rope_parameters():
    new = llama.read(
        {key: value for key, value in CONFIG.items() if key != "rope_theta"}
        | {"rope_parameters": {"rope_theta": 77.0, **LLAMA3_SCALING}},
        where="t",
    )
    assert {layer.attention.rotary for layer in new.layers} == {
        Rotary(
            theta=77.0,
            dims=8,
            scaling=RopeScaling(
                kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16
            ),
        )
    }


def test_tables_hold_cosine_and_sine_of_position_times_frequency():
    cos, sin = rope_tables(Rotary(theta=100.0, dims=8), positions=5, length=5)
    assert cos.shape == sin.shape == (5, 4)
    assert cos[3, 1].item() == pytest.approx(math.cos(3 * 100.0 ** (-2 / 8)), rel=1e-6)
    assert sin[4, 2].item() == pytest.approx(math.sin(4 * 100.0 ** (-4 / 8)), rel=1e-6)


@pytest.mark.parametrize("option", ["attention_dropout", "hidden_dropout"])
def test_dropout_changes_the_loss_only_in_training(option):
    module, reference = build(**{option: 0.5}), build()
    tokens, labels = batch()
    torch.manual_seed(3)
    assert module.train()(tokens, labels).item() != pytest.approx(reference(tokens, labels).item(), rel=1e-4)
    torch.testing.assert_close(module.eval()(tokens, labels), reference(tokens, labels), rtol=0, atol=0)


def test_initial_weights_follow_the_published_standard_deviation():
    source = from_config(CONFIG | {"initializer_range": 0.01}, name="t", kind="config", where="t")
    torch.manual_seed(0)
    module = build_module(source, dtype="fp32")
    assert module.init_std == 0.01
    assert module.lm_head.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert torch.equal(module.model.norm.weight, torch.ones(24))
