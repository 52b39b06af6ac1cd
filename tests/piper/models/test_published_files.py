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


def test_keys_that_the_plan_does_not_follow_are_told(tmp_path):
    text = json.loads((FILES / "hf_qwen3_4b.json").read_text()) | {"num_kv_shared_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert find_model(str(tmp_path)).shape.notices == (
        "config keys that the planned model does not follow: num_kv_shared_layers",
    )
