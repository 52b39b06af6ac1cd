"""Configs as users have them: exact counts, defaults that a file leaves out, towers beside the decoder."""

import json
from pathlib import Path

import pytest

from piper.models import find_model

FILES = Path(__file__).parent / "published"


@pytest.mark.parametrize(
    ("file", "total", "active"),
    [
        ("hf_qwen3_4b.json", 4_022_468_096, 4_022_468_096),
        ("hf_gemma2_2b.json", 2_614_341_888, 2_614_341_888),
        ("hf_qwen15_moe.json", 14_315_784_192, 2_689_173_504),
        ("hf_qwen2_vl_7b.json", 7_615_616_512, 7_615_616_512),
    ],
)
def test_counts_are_exact(file, total, active):
    source = find_model(str(FILES / file))
    assert source.n_parameters == source.facts.n_parameters == total
    assert source.facts.n_active_parameters == active


def test_a_head_width_that_is_stated_counts_and_queries_are_normed():
    attention = find_model(str(FILES / "hf_qwen3_4b.json")).shape.layers[0].attention
    assert attention.head_dim == 128
    assert attention.qk_norm is not None


def test_gemma_2_ties_its_head_and_slides_in_every_other_layer_without_being_told():
    source = find_model(str(FILES / "hf_gemma2_2b.json"))
    assert source.shape.head.tied
    assert "tie_word_embeddings = True" in source.assumed
    windows = [layer.attention.window for layer in source.shape.layers]
    assert windows == [4096, None] * 13
    assert {layer.norms for layer in source.shape.layers} == {4}


def test_the_shared_expert_has_a_width_and_a_gate_of_its_own():
    part = find_model(str(FILES / "hf_qwen15_moe.json")).shape.layers[0].feed_forward
    assert (part.shared.width, part.shared_gate, part.expert.width) == (5632, True, 1408)


def test_a_vision_tower_is_told_with_its_parameters():
    (notice,) = find_model(str(FILES / "hf_qwen2_vl_7b.json")).shape.notices
    assert notice == "vision tower not planned: 675759104 parameters beside the text decoder"


def nested(folder, outer, text):
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text}))
    return find_model(str(folder))


def test_a_text_decoder_inside_a_larger_config_takes_its_own_class_defaults(tmp_path):
    """Gemma 3 4B states six keys; all else equals the defaults of its text config."""
    source = nested(
        tmp_path,
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
         "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                           "model_type": "siglip_vision_model", "num_attention_heads": 16,
                           "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False}},
        {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
         "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
         "sliding_window": 1024},
    )  # fmt: skip
    assert (source.family, source.shape.vocabulary, source.shape.head.tied) == ("gemma3", 262208, True)
    full, sliding = source.shape.layers[5].attention, source.shape.layers[0].attention
    assert (full.window, full.rotary.theta, full.rotary.scaling.factor) == (None, 1e6, 8.0)
    assert (sliding.window, sliding.rotary.theta, sliding.rotary.scaling) == (1024, 1e4, None)
    tower = 419_816_304  # transformers' module on the meta device: tower and projector
    assert source.shape.notices == (f"vision tower not planned: {tower} parameters beside the text decoder",)
    assert source.n_parameters + tower == 4_300_079_472  # the published checkpoint


def test_the_family_of_a_nested_decoder_is_its_own(tmp_path):
    """A model of two parts names itself outside, and its decoder inside."""
    text = {
        "model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 8, "vocab_size": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}}
    source = nested(tmp_path, outer, text)
    assert source.family == "mistral"
    assert source.shape.notices == ("vision tower not planned: its parameters are not counted",)


GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
MPT = {
    "architectures": ["MPTForCausalLM"], "attn_config": {
        "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
        "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None,
        "prefix_lm": False, "qk_ln": False, "softmax_scale": None},
    "d_model": 4096, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4,
    "init_config": {"gain": 0}, "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None,
    "max_seq_len": 2048, "model_type": "mpt",
    "n_heads": 32, "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16", "transformers_version": "4.28.1",
    "use_cache": False, "verbose": 0, "vocab_size": 50432,
}  # fmt: skip
FIRST_FALCON = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["RWForCausalLM"],
    "attention_dropout": 0.0, "bias": False, "hidden_dropout": 0.0, "hidden_size": 8192,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "RefinedWeb", "n_head": 128,
    "n_head_kv": 8, "n_layer": 60, "new_decoder_architecture": True, "vocab_size": 65024,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "count"), [(GPT2, 124_439_808), (MPT, 6_649_286_656), (FIRST_FALCON, 41_303_293_952)]
)
def test_a_whole_file_is_read_without_a_notice(tmp_path, config, count):
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = find_model(str(tmp_path))
    assert (source.n_parameters, source.shape.notices) == (count, ())


def test_keys_that_the_plan_does_not_follow_are_told(tmp_path):
    text = json.loads((FILES / "hf_qwen3_4b.json").read_text()) | {"num_kv_shared_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert find_model(str(tmp_path)).shape.notices == (
        "config keys that the planned model does not follow: num_kv_shared_layers",
    )


def test_further_token_prediction_is_planned_as_the_file_says_and_told(tmp_path):
    config = find_model("deepseek-v3").config | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = find_model(str(tmp_path))
    extra = source.n_parameters - find_model("deepseek-v3").n_parameters
    assert extra == 11_610_067_968  # a layer, a projection of two streams, three norms
    assert any(notice.startswith(f"{extra} of the parameters belong to") for notice in source.shape.notices)
