"""Small random models of the transformers library, tagged from outside; each function is a factory."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3MoeConfig
from transformers.utils import logging

from piper import annotate_modules

logging.set_verbosity_error()

VOCABULARY, LAYERS, EXPERTS = 64, 4, 4
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_TAGS = {
    "model.embed_tokens": ("PP", "TP"),
    "model.layers.{i}": "PP",
    "model.layers.{i}.self_attn": "TP",
    "lm_head": ("PP", "TP"),
}


def llama(**changes: Any) -> nn.Module:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(_SHAPE | changes)))
    return annotate_modules(model, _TAGS | {"model.layers.{i}.mlp": "TP"})


def mixtral(**changes: Any) -> nn.Module:
    config = MixtralConfig(**(_SHAPE | {"num_local_experts": EXPERTS} | changes))
    model = AutoModelForCausalLM.from_config(config)
    return annotate_modules(model, _TAGS | {"model.layers.{i}.mlp.experts": "EP"})


def qwen3_moe(**changes: Any) -> nn.Module:
    shape = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**(_SHAPE | shape | changes)))
    return annotate_modules(model, _TAGS | {"model.layers.{i}.mlp.experts": "EP"})


def gpt2(**changes: Any) -> nn.Module:
    shape = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
    options = {"attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    model = AutoModelForCausalLM.from_config(GPT2Config(**(shape | options | changes)))
    tags = {
        "transformer.wte": ("PP", "TP"),
        "transformer.h.{i}": "PP",
        "transformer.h.{i}.attn": "TP",
        "transformer.h.{i}.mlp": "TP",
        "lm_head": ("PP", "TP"),
    }
    return annotate_modules(model, tags)
