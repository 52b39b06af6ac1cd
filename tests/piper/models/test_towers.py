"""Towers that are not planned are counted as transformers builds them."""

import pytest
import torch

from piper.models.reading.towers import COUNTS, tower_notices

transformers = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "pad_token_id": None,
}  # fmt: skip
CONFIGS = {
    "qwen2_vl": (TEXT, {"hidden_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 4}),
    "qwen2_5_vl": (TEXT, {"out_hidden_size": 64, "hidden_size": 96, "depth": 2, "num_heads": 4}),
    "gemma3": (
        TEXT | {"head_dim": 16},
        {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "patch_size": 14, "image_size": 56},
    ),
    "llama4": (
        TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 96},
        {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
         "patch_size": 14, "image_size": 56, "vision_output_dim": 4096},
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", COUNTS)
def test_a_tower_has_the_parameters_that_are_told(model_type):
    text, vision = CONFIGS[model_type]
    config = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    with torch.device("meta"):
        module = transformers.AutoModelForImageTextToText.from_config(config)
    beside = sum(
        parameter.numel()
        for name, parameter in module.named_parameters()
        if "language_model" not in name and "lm_head" not in name
    )
    stated = {"vision_config": config.to_dict()["vision_config"]}
    (notice,) = tower_notices(stated, model_type=model_type, hidden=64, where="t")
    assert notice == f"vision tower not planned: {beside} parameters beside the text decoder"
