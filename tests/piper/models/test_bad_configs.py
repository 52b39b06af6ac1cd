"""What a config can get wrong: one message each, with where, field, value, rule and fix."""

import json

import pytest

from piper.errors import ModelError
from piper.models import find_model
from tests.tiny_configs import TINY

GONE = "gone"
"""A key that is taken out."""

YARN = {"rope_type": "yarn", "factor": 4.0}

CASES = {
    "a missing size": ("qwen3", {"hidden_size": GONE}),
    "a size that is null": ("qwen3", {"num_hidden_layers": None}),
    "a size of the wrong type": ("qwen3", {"vocab_size": "128"}),
    "a size that is no whole number": ("gpt2", {"n_embd": 64.5}),
    "a flag of the wrong type": ("qwen3", {"tie_word_embeddings": "false"}),
    "a dropout of one": ("gpt2", {"resid_pdrop": 1.0}),
    "heads that are not divisible by heads of keys": ("qwen3", {"num_key_value_heads": 3}),
    "a default number of key heads that does not divide": (
        "mistral", {"num_key_value_heads": GONE, "num_attention_heads": 4, "head_dim": 16},
    ),
    "hidden features that are not divisible by heads": ("llama", {"num_attention_heads": 7}),
    "a head that cannot be rotated": ("qwen3", {"head_dim": 15}),
    "a share of the head that is more than all": ("nemotron", {"partial_rotary_factor": 1.5}),
    "more chosen experts than there are": ("mixtral", {"num_experts_per_tok": 9}),
    "groups that do not divide the experts": ("deepseek_v3", {"n_group": 3}),
    "more groups kept than there are": ("deepseek_v3", {"topk_group": 5}),
    "more experts chosen than the kept groups hold": ("deepseek_v3", {"num_experts_per_tok": 5}),
    "scores of another family": ("deepseek_v3", {"scoring_func": "softmax"}),
    "a head width that contradicts latent attention": ("deepseek_v2", {"head_dim": 64}),
    "key heads that latent attention has not": ("deepseek_v3", {"num_key_value_heads": 2}),
    "layer types of another length": (
        "gemma2", {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "a layer type that is not known": ("gemma2", {"layer_types": ["linear_attention"] * 4}),
    "sliding layers without a window": (
        "qwen3", {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": False},
    ),
    "layers that rotate, of another length": ("smollm3", {"no_rope_layers": [1, 0]}),
    "dense layers that are no list": ("qwen3_moe", {"mlp_only_layers": 3}),
    "an activation that is not known": ("llama", {"hidden_act": "gelu_pytorch_tan"}),
    "a rotary scaling that is not known": ("llama", {"rope_scaling": YARN | {"rope_type": "yam"}}),
    "a rotary scaling without its factor": ("llama", {"rope_scaling": {"rope_type": "linear"}}),
    "a rotary scaling of each frequency, too short": (
        "phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
    ),
    "frequencies that are no list": (
        "phi3", {"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [2.0]}},
    ),
    "a rotary scaling that shrinks": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}),
    "a rotary scaling that is no object": ("llama", {"rope_scaling": 8.0}),
    "layer types that are no list": ("gemma2", {"layer_types": "sliding_attention"}),
    "dense layers that the model has not": ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    "sparse layers that the model has not": ("llama4", {"moe_layers": [1, 4]}),
    "a width that is no whole number": ("mpt", {"expansion_ratio": 1.001}),
    "key heads of groups that do not divide": (
        "mpt", {"attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 3}},
    ),
    "more rotated features than a head has": ("gptj", {"rotary_dim": 64}),
    "three norms side by side": ("falcon", {"num_ln_in_parallel_attn": 3}),
    "tie flags that contradict each other": (
        "gemma3",
        {"tie_word_embeddings": True, "text_config": TINY["gemma3"] | {"tie_word_embeddings": False}},
    ),
    "a quantised text decoder": (
        "gemma3", {"text_config": TINY["gemma3"] | {"quantization_config": {"quant_method": "awq"}}},
    ),
    "norms behind the sum of a part": ("opt", {"do_layer_norm_before": False}),
    "an embedding narrower than the stream": ("opt", {"word_embed_proj_dim": 32}),
    "noise in the router": ("mixtral", {"router_jitter_noise": 0.1}),
    "an unknown architecture": ("llama", {"architectures": ["LamaForCausalLM"]}),
    "no architecture at all": ("llama", {"architectures": GONE}),
    "architectures that are no list": ("llama", {"architectures": "LlamaForCausalLM"}),
    "state-space layers": ("llama", {"architectures": ["JambaForCausalLM"], "model_type": "jamba"}),
    "linear attention": ("qwen3_moe", {"architectures": ["Qwen3NextForCausalLM"]}),
    "an encoder": ("llama", {"architectures": ["BertForMaskedLM"], "model_type": "bert"}),
    "an encoder beside a decoder": ("llama", {"architectures": ["T5ForConditionalGeneration"]}),
    "an encoder beside a decoder of an unknown class": (
        "llama", {"architectures": ["OwnForConditionalGeneration"], "is_encoder_decoder": True},
    ),
    "a quantised checkpoint": (
        "deepseek_v3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    ),
    "a text decoder that is no object": ("gemma3", {"text_config": "gemma3_text"}),
    "an adapter on what is not there": (
        "llama", {"adapter_config": {"r": 4, "target_modules": ["q_proj", "c_fc"]}},
    ),
    "an adapter of another kind": ("llama", {"adapter_config": {"peft_type": "IA3"}}),
    "an adapter with a trained part of the model": (
        "llama", {"adapter_config": {"r": 4, "modules_to_save": ["lm_head"]}},
    ),
    "a frozen part that is not there": ("llama", {"frozen": ["transformer.wte"]}),
    "documents without tokens": ("llama", {"segment_lengths": [8, 0]}),
    "a vocabulary padded to nothing": ("llama", {"pad_vocab_size_multiple": 0}),
    "more parameters than are possible": ("llama", {"hidden_size": 2**30, "intermediate_size": 2**30}),
}  # fmt: skip
"""Told as -> family, and what is changed in its small config."""


def refused(name, folder):
    family, changes = CASES[name]
    config = {key: value for key, value in (TINY[family] | changes).items() if value != GONE}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        find_model(str(folder))
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_a_message_names_the_file_and_how_to_mend_it(name, tmp_path):
    error = refused(name, tmp_path)
    assert error.where == str(tmp_path / "config.json")
    assert error.field
    assert error.rule
    assert error.fix


def test_every_message_is_written_down(golden, tmp_path):
    lines = []
    for name in CASES:
        error = refused(name, tmp_path)
        text = error.message().replace(str(tmp_path), "")
        lines += [f"# {name}", f"error: {text}", f"fix: {error.fix}", ""]
    golden("piper/models/bad_configs.txt", "\n".join(lines))
