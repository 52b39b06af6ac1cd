"""Parameters of towers beside a text decoder (vision, audio), which are not planned: told, never dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from piper.models.fields import Fields

TOWERS = {"vision_config": "vision", "audio_config": "audio", "speech_config": "speech"}
"""Keys that state a tower."""


def tower_notices(config: Mapping[str, Any], *, model_type: str, hidden: int, where: str) -> list[str]:
    """Return a sentence for each tower of a config, with its parameters where we can count them.

    Args:
        config: the whole config.
        model_type: of the whole.
        hidden: features of the text decoder that the tower is projected to.
        where: for messages.
    """
    outer = Fields(config, where=where)
    found = []
    for name, kind in TOWERS.items():
        tower = outer.inner(name)
        if tower is None:
            continue
        count = COUNTS.get(model_type)
        if kind == "vision" and count is not None:
            found.append(
                f"vision tower not planned: {count(tower, hidden)} parameters beside the text decoder"
            )
        else:
            found.append(f"{kind} tower not planned: its parameters are not counted")
    return found


def _linear(inputs: int, outputs: int, *, bias: bool = True) -> int:
    return inputs * outputs + outputs * bias


def _qwen2_vl(tower: Fields, hidden: int) -> int:
    """Return what transformers' `Qwen2VisionTransformerPretrainedModel` holds: patches, layers, merger."""
    width, depth = tower.count("embed_dim", default=1280), tower.count("depth", default=32)
    ratio = tower.count("mlp_ratio", default=4)
    out = tower.count("hidden_size", default=hidden)
    layer = 2 * 2 * width + _linear(width, 3 * width) + _linear(width, width)
    layer += _linear(width, ratio * width) + _linear(ratio * width, width)
    merged = width * tower.count("spatial_merge_size", default=2) ** 2
    merger = 2 * width + _linear(merged, merged) + _linear(merged, out)
    return _patches(tower, width) + depth * layer + merger


def _qwen2_5_vl(tower: Fields, hidden: int) -> int:
    """Return what transformers' `Qwen2_5_VisionTransformerPretrainedModel` holds: RMS norms, gated layers."""
    width, depth = tower.count("hidden_size", default=1280), tower.count("depth", default=32)
    inner = tower.count("intermediate_size", default=3420)
    layer = 2 * width + _linear(width, 3 * width) + _linear(width, width)
    layer += 2 * _linear(width, inner) + _linear(inner, width)
    merged = width * tower.count("spatial_merge_size", default=2) ** 2
    merger = width + _linear(merged, merged) + _linear(merged, tower.count("out_hidden_size", default=hidden))
    return _patches(tower, width) + depth * layer + merger


def _patches(tower: Fields, width: int) -> int:
    channels = "in_chans" if tower.has("in_chans") else "in_channels"
    pixels = tower.count("temporal_patch_size", default=2) * tower.count("patch_size", default=14) ** 2
    return tower.count(channels, default=3) * pixels * width


def _gemma3(tower: Fields, hidden: int) -> int:
    """Return what transformers' `SiglipVisionModel` and Gemma 3's projector hold."""
    width, depth = tower.count("hidden_size", default=768), tower.count("num_hidden_layers", default=12)
    inner = tower.count("intermediate_size", default=3072)
    patch = tower.count("patch_size", default=16)
    positions = (tower.count("image_size", default=224) // patch) ** 2
    embedding = _linear(tower.count("num_channels", default=3) * patch**2, width) + positions * width
    mlp = _linear(width, inner) + _linear(inner, width)
    layer = 4 * _linear(width, width) + mlp + 4 * width
    head = 0
    if tower.flag("vision_use_head", default=True):
        head = width + 4 * _linear(width, width) + 2 * width + mlp
    projector = width + width * hidden
    return embedding + depth * layer + 2 * width + head + projector


def _llama4(tower: Fields, hidden: int) -> int:
    """Return what transformers' `Llama4VisionModel` and Llama 4's projector hold."""
    width, depth = tower.count("hidden_size", default=768), tower.count("num_hidden_layers", default=34)
    inner = tower.count("intermediate_size", default=5632)
    patch = tower.count("patch_size", default=14)
    positions = (tower.count("image_size", default=448) // patch) ** 2 + 1
    embedding = tower.count("num_channels", default=3) * patch**2 * width + width + positions * width
    layer = 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width) + 4 * width
    between = tower.count("projector_output_dim", default=4096)
    entry = tower.count("projector_input_dim", default=4096)
    adapter = _linear(inner, entry, bias=False) + _linear(between, between, bias=False)
    projector = _linear(tower.count("vision_output_dim", default=7680), hidden, bias=False)
    return embedding + depth * layer + 4 * width + adapter + projector


COUNTS: dict[str, Callable[[Fields, int], int]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "gemma3": _gemma3,
    "llama4": _llama4,
}
"""`model_type` of the whole -> the tower's parameters."""
