"""Models by name: catalogue entries, Hugging Face configs, and factories of annotated modules.

To add a catalogue entry: a YAML file in `catalogue/` (aliases, source, config) and one line in `CATALOGUE`.

To add a family:
1. `piper/models/families/<family>.py`, free of torch: `read(config, *, where) -> DecoderShape`, which turns
   the published config into parts that `piper.models.shape` describes.
2. One line in `MODELS`, and its class and `model_type` in `ARCHITECTURES`.
3. A small config in `tests/tiny_configs.py`.
The module is the same for all: `piper.models.decoder.CausalLM`, whose `forward(tokens, labels)` returns the
summed token loss in fp32. A part that no shape can say yet is a new option of `piper.models.shape` and of
the file that builds that part, not a module of its own.
The tests over `MODELS` then check parameter count, capture, and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from piper.models.source import ModelSource

if TYPE_CHECKING:
    from torch import nn


DECODER = "piper.models.decoder:CausalLM"
"""The module of every decoder."""


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family lives, as "module:name", imported on use.

    Args:
        reader: its torch-free `(config, *, where) -> DecoderShape`.
        module: `(shape, *, seq_len) -> nn.Module`.
    """

    reader: str
    module: str = DECODER


MODELS: dict[str, Family] = {
    "llama": Family(reader="piper.models.families.llama:read"),
    "mixtral": Family(reader="piper.models.families.mixtral:read"),
}

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "llama": "llama",
    "MixtralForCausalLM": "mixtral",
    "mixtral": "mixtral",
}

CATALOGUE: dict[str, str] = {
    "tiny-llama": "tiny-llama.yaml",
    "tiny-moe": "tiny-moe.yaml",
    "llama2-7b": "llama2-7b.yaml",
    "llama3-8b": "llama3-8b.yaml",
    "llama3-70b": "llama3-70b.yaml",
    "llama3.1-405b": "llama3.1-405b.yaml",
    "mixtral-8x7b": "mixtral-8x7b.yaml",
}


def find_model(text: str) -> ModelSource:
    """Return the model that `text` names; raises ModelError.

    Args:
        text: a catalogue name or alias (any case), a `config.json` (file or folder), or
            `package.module:function`.
    """
    from piper.models.find import find

    return find(text)


def build_module(
    source: ModelSource, *, dtype: str, device: str = "cpu", seq_len: int | None = None
) -> nn.Module:
    """Return the annotated module of `source`.

    Args:
        source: from `find_model`.
        dtype: "fp32", "bf16" or "fp16", of parameters and floating buffers.
        device: "cpu", "cuda", "meta", ...
        seq_len: longest sequence to prepare for; default: the model's context.
    Raises: ModelError when a factory fails or returns no module.
    """
    from piper.models.build import build_module as build

    return build(source, dtype=dtype, device=device, seq_len=seq_len)


__all__ = ["ARCHITECTURES", "CATALOGUE", "MODELS", "Family", "ModelSource", "build_module", "find_model"]
