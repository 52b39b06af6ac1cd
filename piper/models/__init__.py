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
    "llama4": Family(reader="piper.models.families.llama4:read"),
    "mistral": Family(reader="piper.models.families.mistral:read"),
    "mixtral": Family(reader="piper.models.families.mixtral:read"),
    "qwen2": Family(reader="piper.models.families.qwen:read_qwen2"),
    "qwen2_moe": Family(reader="piper.models.families.qwen:read_qwen2_moe"),
    "qwen2_vl": Family(reader="piper.models.families.qwen:read_qwen2_vl"),
    "qwen3": Family(reader="piper.models.families.qwen:read_qwen3"),
    "qwen3_moe": Family(reader="piper.models.families.qwen:read_qwen3_moe"),
    "gemma": Family(reader="piper.models.families.gemma:read_gemma"),
    "gemma2": Family(reader="piper.models.families.gemma:read_gemma2"),
    "gemma3": Family(reader="piper.models.families.gemma:read_gemma3"),
    "deepseek_v2": Family(reader="piper.models.families.deepseek:read_v2"),
    "deepseek_v3": Family(reader="piper.models.families.deepseek:read_v3"),
    "gpt_oss": Family(reader="piper.models.families.gpt_oss:read"),
    "grok": Family(reader="piper.models.families.grok:read"),
    "nemotron": Family(reader="piper.models.families.nemotron:read"),
    "gpt2": Family(reader="piper.models.families.gpt2:read"),
    "gptj": Family(reader="piper.models.families.gptj:read"),
    "gpt_neox": Family(reader="piper.models.families.gpt_neox:read"),
    "mpt": Family(reader="piper.models.families.mpt:read"),
    "bloom": Family(reader="piper.models.families.bloom:read"),
    "opt": Family(reader="piper.models.families.opt:read"),
    "falcon": Family(reader="piper.models.families.falcon:read"),
    "phi": Family(reader="piper.models.families.phi:read_phi"),
    "phi3": Family(reader="piper.models.families.phi:read_phi3"),
    "olmo": Family(reader="piper.models.families.olmo:read_olmo"),
    "olmo2": Family(reader="piper.models.families.olmo:read_olmo2"),
    "olmo3": Family(reader="piper.models.families.olmo:read_olmo3"),
    "olmoe": Family(reader="piper.models.families.olmo:read_olmoe"),
    "starcoder2": Family(reader="piper.models.families.starcoder2:read"),
    "stablelm": Family(reader="piper.models.families.stablelm:read"),
    "granite": Family(reader="piper.models.families.granite:read"),
    "granite_moe": Family(reader="piper.models.families.granite:read_moe"),
    "cohere": Family(reader="piper.models.families.cohere:read_cohere"),
    "cohere2": Family(reader="piper.models.families.cohere:read_cohere2"),
    "glm4": Family(reader="piper.models.families.glm4:read"),
    "smollm3": Family(reader="piper.models.families.smollm3:read"),
    "exaone4": Family(reader="piper.models.families.exaone4:read"),
}

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "llama": "llama",
    "Llama4ForCausalLM": "llama4",
    "llama4_text": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "llama4": "llama4",
    "MistralForCausalLM": "mistral",
    "mistral": "mistral",
    "MinistralForCausalLM": "mistral",
    "ministral": "mistral",
    "MixtralForCausalLM": "mixtral",
    "mixtral": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "qwen2": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "qwen2_moe": "qwen2_moe",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "qwen2_vl": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
    "qwen2_5_vl": "qwen2_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_vl",
    "Qwen3ForCausalLM": "qwen3",
    "qwen3": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "qwen3_moe": "qwen3_moe",
    "GemmaForCausalLM": "gemma",
    "gemma": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "gemma2": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "gemma3_text": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "gemma3": "gemma3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "deepseek_v2": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "deepseek_v3": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "gpt_oss": "gpt_oss",
    "Grok1ModelForCausalLM": "grok",
    "Grok1ForCausalLM": "grok",
    "grok-1": "grok",
    "grok": "grok",
    "NemotronForCausalLM": "nemotron",
    "nemotron": "nemotron",
    "GPT2LMHeadModel": "gpt2",
    "gpt2": "gpt2",
    "GPTBigCodeForCausalLM": "gpt2",
    "gpt_bigcode": "gpt2",
    "GPTJForCausalLM": "gptj",
    "gptj": "gptj",
    "GPTNeoXForCausalLM": "gpt_neox",
    "gpt_neox": "gpt_neox",
    "MPTForCausalLM": "mpt",
    "MptForCausalLM": "mpt",
    "mpt": "mpt",
    "BloomForCausalLM": "bloom",
    "bloom": "bloom",
    "OPTForCausalLM": "opt",
    "opt": "opt",
    "FalconForCausalLM": "falcon",
    "falcon": "falcon",
    "RWForCausalLM": "falcon",
    "PhiForCausalLM": "phi",
    "phi": "phi",
    "Phi3ForCausalLM": "phi3",
    "phi3": "phi3",
    "OlmoForCausalLM": "olmo",
    "olmo": "olmo",
    "Olmo2ForCausalLM": "olmo2",
    "olmo2": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "olmo3": "olmo3",
    "OlmoeForCausalLM": "olmoe",
    "olmoe": "olmoe",
    "Starcoder2ForCausalLM": "starcoder2",
    "starcoder2": "starcoder2",
    "StableLmForCausalLM": "stablelm",
    "stablelm": "stablelm",
    "GraniteForCausalLM": "granite",
    "granite": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "granitemoe": "granite_moe",
    "GraniteMoeSharedForCausalLM": "granite_moe",
    "granitemoeshared": "granite_moe",
    "CohereForCausalLM": "cohere",
    "cohere": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "cohere2": "cohere2",
    "Glm4ForCausalLM": "glm4",
    "glm4": "glm4",
    "SmolLM3ForCausalLM": "smollm3",
    "smollm3": "smollm3",
    "Exaone4ForCausalLM": "exaone4",
    "exaone4": "exaone4",
}
"""Class names and `model_type`s of Hugging Face configs -> family."""

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
