"""Models by name: catalogue entries, Hugging Face configs, and factories of annotated modules.

To add a catalogue entry: a YAML file in `catalogue/` (aliases, source, published numbers, config) and one
line in `CATALOGUE`; then `pytest tests/piper/models --update-golden` renews the index and the tables of
docs/models.md.

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
    "glm4_moe": Family(reader="piper.models.families.glm4_moe:read"),
    "minimax_m2": Family(reader="piper.models.families.minimax_m2:read"),
    "smollm3": Family(reader="piper.models.families.smollm3:read"),
    "exaone4": Family(reader="piper.models.families.exaone4:read"),
    "generic": Family(reader="piper.models.families.generic:read"),
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
    "Qwen3VLForConditionalGeneration": "qwen3",
    "qwen3_vl_text": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
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
    "kimi_k2": "deepseek_v3",
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
    "RefinedWeb": "falcon",
    "RefinedWebModel": "falcon",
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
    "Glm4MoeForCausalLM": "glm4_moe",
    "glm4_moe": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "minimax_m2": "minimax_m2",
    "SmolLM3ForCausalLM": "smollm3",
    "smollm3": "smollm3",
    "Exaone4ForCausalLM": "exaone4",
    "exaone4": "exaone4",
    "PiperDecoder": "generic",
}
"""Class names and `model_type`s of Hugging Face configs -> family."""

CATALOGUE: dict[str, str] = {
    "tiny-llama": "tiny-llama.yaml",
    "tiny-moe": "tiny-moe.yaml",
    "llama-7b": "llama-7b.yaml",
    "llama-13b": "llama-13b.yaml",
    "llama-13b-128k": "llama-13b-128k.yaml",
    "llama-30b": "llama-30b.yaml",
    "llama-30b-128k": "llama-30b-128k.yaml",
    "llama-65b": "llama-65b.yaml",
    "llama2-7b": "llama2-7b.yaml",
    "llama2-13b": "llama2-13b.yaml",
    "llama2-70b": "llama2-70b.yaml",
    "llama3.2-1b": "llama3.2-1b.yaml",
    "llama3.2-3b": "llama3.2-3b.yaml",
    "llama3.1-8b": "llama3.1-8b.yaml",
    "llama3-8b": "llama3-8b.yaml",
    "llama3.1-70b": "llama3.1-70b.yaml",
    "llama3.3-70b": "llama3.3-70b.yaml",
    "llama3-70b": "llama3-70b.yaml",
    "llama3.1-405b": "llama3.1-405b.yaml",
    "llama4-scout": "llama4-scout.yaml",
    "llama4-maverick": "llama4-maverick.yaml",
    "tinyllama-1.1b": "tinyllama-1.1b.yaml",
    "yi-6b": "yi-6b.yaml",
    "yi-34b": "yi-34b.yaml",
    "mistral-7b": "mistral-7b.yaml",
    "mistral-nemo-12b": "mistral-nemo-12b.yaml",
    "mistral-large-2": "mistral-large-2.yaml",
    "mixtral-8x7b": "mixtral-8x7b.yaml",
    "mixtral-8x22b": "mixtral-8x22b.yaml",
    "qwen1.5-moe-a2.7b": "qwen1.5-moe-a2.7b.yaml",
    "qwen2.5-0.5b": "qwen2.5-0.5b.yaml",
    "qwen2.5-1.5b": "qwen2.5-1.5b.yaml",
    "qwen2.5-3b": "qwen2.5-3b.yaml",
    "qwen2.5-7b": "qwen2.5-7b.yaml",
    "qwen2.5-14b": "qwen2.5-14b.yaml",
    "qwen2.5-32b": "qwen2.5-32b.yaml",
    "qwen2.5-72b": "qwen2.5-72b.yaml",
    "qwen2-57b-a14b": "qwen2-57b-a14b.yaml",
    "qwen3-0.6b": "qwen3-0.6b.yaml",
    "qwen3-1.7b": "qwen3-1.7b.yaml",
    "qwen3-4b": "qwen3-4b.yaml",
    "qwen3-8b": "qwen3-8b.yaml",
    "qwen3-14b": "qwen3-14b.yaml",
    "qwen3-30b-a3b": "qwen3-30b-a3b.yaml",
    "qwen3-32b": "qwen3-32b.yaml",
    "qwen3-235b-a22b": "qwen3-235b-a22b.yaml",
    "gemma-2b": "gemma-2b.yaml",
    "gemma-7b": "gemma-7b.yaml",
    "gemma2-2b": "gemma2-2b.yaml",
    "gemma2-9b": "gemma2-9b.yaml",
    "gemma2-27b": "gemma2-27b.yaml",
    "gemma3-1b": "gemma3-1b.yaml",
    "gemma3-4b": "gemma3-4b.yaml",
    "gemma3-12b": "gemma3-12b.yaml",
    "gemma3-27b": "gemma3-27b.yaml",
    "deepseek-v2-lite": "deepseek-v2-lite.yaml",
    "deepseek-v2": "deepseek-v2.yaml",
    "deepseek-v3": "deepseek-v3.yaml",
    "gpt-oss-20b": "gpt-oss-20b.yaml",
    "gpt-oss-120b": "gpt-oss-120b.yaml",
    "grok-1": "grok-1.yaml",
    "nemotron4-15b": "nemotron4-15b.yaml",
    "nemotron4-340b": "nemotron4-340b.yaml",
    "gpt2": "gpt2.yaml",
    "gpt2-medium": "gpt2-medium.yaml",
    "gpt2-24l": "gpt2-24l.yaml",
    "gpt2-large": "gpt2-large.yaml",
    "gpt2-xl": "gpt2-xl.yaml",
    "gpt3-175b": "gpt3-175b.yaml",
    "gpt-h768-l12": "gpt-h768-l12.yaml",
    "gpt-h1024-l12": "gpt-h1024-l12.yaml",
    "gpt-h1024-l20": "gpt-h1024-l20.yaml",
    "gpt-h1536-l16": "gpt-h1536-l16.yaml",
    "gpt-h2048-l12": "gpt-h2048-l12.yaml",
    "gpt-760m": "gpt-760m.yaml",
    "gpt-h2048-l20": "gpt-h2048-l20.yaml",
    "gpt-1.3b-tr3m": "gpt-1.3b-tr3m.yaml",
    "gpt-1.3b-alpa": "gpt-1.3b-alpa.yaml",
    "gpt-1.5b": "gpt-1.5b.yaml",
    "gpt-1.7b": "gpt-1.7b.yaml",
    "gpt-h3072-l16": "gpt-h3072-l16.yaml",
    "gpt-2.6b": "gpt-2.6b.yaml",
    "gpt-3.6b": "gpt-3.6b.yaml",
    "gpt-h3072-l32": "gpt-h3072-l32.yaml",
    "gpt-j-6b": "gpt-j-6b.yaml",
    "gpt-6.2b": "gpt-6.2b.yaml",
    "gpt-6.7b": "gpt-6.7b.yaml",
    "gpt-7.5b": "gpt-7.5b.yaml",
    "gpt-13b": "gpt-13b.yaml",
    "gpt-15b": "gpt-15b.yaml",
    "gpt-18.4b": "gpt-18.4b.yaml",
    "gpt-20b": "gpt-20b.yaml",
    "gpt-neox-20b": "gpt-neox-20b.yaml",
    "gpt-22b": "gpt-22b.yaml",
    "gpt-39.1b": "gpt-39.1b.yaml",
    "gpt-76.1b": "gpt-76.1b.yaml",
    "gpt-145.6b": "gpt-145.6b.yaml",
    "gpt-174.6b": "gpt-174.6b.yaml",
    "gpt-310.1b": "gpt-310.1b.yaml",
    "gpt-529.6b": "gpt-529.6b.yaml",
    "gpt-1008b": "gpt-1008b.yaml",
    "mpt-125m": "mpt-125m.yaml",
    "mpt-760m": "mpt-760m.yaml",
    "mpt-3b": "mpt-3b.yaml",
    "mpt-7b": "mpt-7b.yaml",
    "mpt-13b": "mpt-13b.yaml",
    "mpt-30b": "mpt-30b.yaml",
    "mpt-70b": "mpt-70b.yaml",
    "opt-6.7b": "opt-6.7b.yaml",
    "opt-30b": "opt-30b.yaml",
    "opt-175b": "opt-175b.yaml",
    "bloom-7b1": "bloom-7b1.yaml",
    "bloom-176b": "bloom-176b.yaml",
    "falcon-7b": "falcon-7b.yaml",
    "falcon-40b": "falcon-40b.yaml",
    "falcon-180b": "falcon-180b.yaml",
    "phi-2": "phi-2.yaml",
    "phi-3-mini": "phi-3-mini.yaml",
    "phi-3-medium": "phi-3-medium.yaml",
    "phi-4": "phi-4.yaml",
    "olmo2-1b": "olmo2-1b.yaml",
    "olmoe-1b-7b": "olmoe-1b-7b.yaml",
    "olmo2-7b": "olmo2-7b.yaml",
    "olmo2-13b": "olmo2-13b.yaml",
    "olmo2-32b": "olmo2-32b.yaml",
    "starcoder2-3b": "starcoder2-3b.yaml",
    "starcoder2-15b": "starcoder2-15b.yaml",
    "granite-3.1-8b": "granite-3.1-8b.yaml",
    "stablelm-2-1.6b": "stablelm-2-1.6b.yaml",
    "command-r-35b": "command-r-35b.yaml",
    "command-r-plus": "command-r-plus.yaml",
    "glm-4.5-air": "glm-4.5-air.yaml",
    "glm-4.5": "glm-4.5.yaml",
    "kimi-k2": "kimi-k2.yaml",
    "minimax-m2": "minimax-m2.yaml",
    "smollm3-3b": "smollm3-3b.yaml",
    "pythia-1.4b": "pythia-1.4b.yaml",
    "pythia-12b": "pythia-12b.yaml",
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
