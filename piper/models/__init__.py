"""Models by name: catalogue entries, Hugging Face configs, and factories of annotated modules.

To add a catalogue entry: a YAML file in `catalogue/` (aliases, source, config) and one line in `CATALOGUE`.

To add a family:
1. `piper/models/<family>_config.py`, free of torch: a frozen dataclass with `from_hf(config, *, where)`,
   `n_parameters`, `context_length`, `assumed` and `facts(name)`.
2. `piper/models/<family>.py`: an annotated `nn.Module` taking `(config, seq_len=...)`, with
   `forward(tokens, labels)` returning the summed token loss in fp32; parameter names as in Hugging Face.
3. One line in `MODELS` (`builds_on`: the family whose modules it uses), and its class and `model_type` in
   `ARCHITECTURES`.
The tests over `MODELS` then check parameter count, capture, and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from piper.models.source import ModelSource

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family lives, as "module:name", imported on use.

    Args:
        config: its torch-free configuration class.
        module: its `nn.Module` class.
        builds_on: family whose modules it uses, or "".
    """

    config: str
    module: str
    builds_on: str = ""


MODELS: dict[str, Family] = {
    "llama": Family(
        config="piper.models.llama_config:LlamaConfig", module="piper.models.llama:LlamaForCausalLM"
    ),
    "mixtral": Family(
        config="piper.models.mixtral_config:MixtralConfig",
        module="piper.models.mixtral:MixtralForCausalLM",
        builds_on="llama",
    ),
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
