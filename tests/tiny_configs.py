"""A small config for every family of `piper.models.MODELS`: what the tests over all families build.

Heads, key heads, widths, experts and vocabulary are divisible by 8, so that tensor and expert parallelism of
2, 4 and 8 may cut them; two layers of each kind.
"""

from __future__ import annotations

from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}

TINY: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mixtral": LLAMA
    | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
"""Family -> `config.json`."""
