"""Counts and defaults against the configuration classes and modules of `transformers` themselves."""

import math
from typing import Any

import pytest
import torch

from piper.models import ARCHITECTURES, CATALOGUE, find_model
from piper.models.entries import read_entry
from piper.models.reading.config import read_shape

transformers = pytest.importorskip("transformers")

NOT_IN_TRANSFORMERS = {"grok-1", "mpt-125m", "mpt-760m", "mpt-3b", "mpt-13b", "mpt-70b"}
"""Grok-1, and llm-foundry's MPT with biases, which the module of transformers never has."""

SIZES = {
    "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 32,
    "vocab_size": 128,
}  # fmt: skip
OTHER_NAMES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 256, "n_layer": 8, "n_head": 32, "vocab_size": 128},
    "gptj": {"n_embd": 2048, "n_layer": 8, "n_head": 32, "vocab_size": 128},
    "mpt": {"d_model": 256, "n_layers": 8, "n_heads": 32, "vocab_size": 128},
    "bloom": {"hidden_size": 256, "n_layer": 8, "n_head": 32, "vocab_size": 128},
    "opt": {key: value for key, value in SIZES.items() if key != "intermediate_size"} | {"ffn_dim": 96},
    "deepseek_v2": SIZES | {"num_experts_per_tok": 6},
    "nemotron": SIZES | {"num_key_value_heads": 8},
    "ministral": SIZES | {"head_dim": 8},
}
"""Families that call their sizes otherwise, or whose class leaves a size open."""

INSIDE_OTHERS = {
    "gemma3", "llama4", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text",
    "qwen3_vl_moe_text",
}  # fmt: skip
"""Models with towers, and their text decoders, which have no module of their own there."""

MODEL_TYPES = sorted(
    {name for name in ARCHITECTURES if name[0].islower()} - INSIDE_OTHERS - {"grok-1", "grok", "kimi_k2"}
)


def theirs(model_type: str, config: dict[str, Any]) -> Any:
    stated = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    known = transformers.AutoConfig.for_model(model_type, **stated, pad_token_id=None)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(known)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in NOT_IN_TRANSFORMERS])
def test_every_entry_has_as_many_parameters_as_the_module_of_transformers(name: str) -> None:
    config = read_entry(name)["config"]
    assert count(theirs(config["model_type"], config)) == find_model(name).n_parameters


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_config_of_sizes_alone_takes_the_defaults_of_its_class(model_type: str) -> None:
    """What a file leaves out: heads of keys, head width, biases, norms, experts, tied or not, context."""
    other = OTHER_NAMES.get(ARCHITECTURES[model_type], SIZES)
    config = {"model_type": model_type} | OTHER_NAMES.get(model_type, other)
    shape = read_shape(config, where="t")
    module = theirs(model_type, config)
    assert shape.n_parameters == count(module)
    known = module.config
    context = getattr(known, "max_position_embeddings", getattr(known, "max_seq_len", shape.context_length))
    assert shape.context_length == context
    std = getattr(known, "initializer_range", getattr(known, "init_std", None))
    assert std is None or math.isclose(shape.init_std, std)
    assert shape.head.tied == known.tie_word_embeddings


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_windows_and_rotary_bases_are_those_of_its_class(model_type: str) -> None:
    other = OTHER_NAMES.get(ARCHITECTURES[model_type], SIZES)
    config = OTHER_NAMES.get(model_type, other)
    shape = read_shape({"model_type": model_type} | config, where="t")
    known = transformers.AutoConfig.for_model(model_type, **config)
    attentions = [layer.attention for layer in shape.layers]
    kinds = getattr(known, "layer_types", None)
    if kinds is not None and "chunked_attention" not in kinds:
        slides = [getattr(attention, "window", None) is not None for attention in attentions]
        assert slides == [kind == "sliding_attention" for kind in kinds]
    stated = getattr(known, "rope_parameters", None)
    if not stated or not any(attention.rotary for attention in attentions):
        return
    for kind, attention in zip(kinds or [None] * len(attentions), attentions, strict=True):
        if attention.rotary is None:
            continue
        rope = stated.get(kind, stated)
        assert attention.rotary.theta == rope["rope_theta"]
        scaling = attention.rotary.scaling
        assert rope["rope_type"] == ("default" if scaling is None else scaling.kind)
        assert scaling is None or scaling.factor == rope["factor"]
