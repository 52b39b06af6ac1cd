"""Two layers of several families, small enough to train on one core in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4,
              "tie_word_embeddings": False, **_SIZES},
    "mixtral": {"model_type": "mixtral", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4,
                "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
                "tie_word_embeddings": False, **_SIZES},
    "gpt2": {"model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 32, "n_layer": 2,
             "n_head": 4, "n_positions": 32, "vocab_size": 64, "layer_norm_epsilon": 1e-5,
             "attn_pdrop": 0.0, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4,
              "head_dim": 8, "attention_bias": False, "use_sliding_window": False,
              "tie_word_embeddings": True, **_SIZES},
    "falcon": {"model_type": "falcon", "vocab_size": 64, "num_kv_heads": 2, "multi_query": True,
               "parallel_attn": True, "new_decoder_architecture": True, "bias": False, "alibi": False,
               "layer_norm_epsilon": 1e-5, "hidden_size": 32, "num_hidden_layers": 2,
               "num_attention_heads": 4, "max_position_embeddings": 32},
    "deepseek_v2": {**_SIZES, "model_type": "deepseek_v2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
                    "rope_theta": 1e4, "num_key_value_heads": 4, "moe_intermediate_size": 24,
                    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
                    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
                    "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1,
                    "topk_group": 1, "scoring_func": "softmax", "norm_topk_prob": False,
                    "routed_scaling_factor": 1.0, "tie_word_embeddings": False},
    "gpt_oss": {**_SIZES, "model_type": "gpt_oss", "hidden_act": "silu", "rms_norm_eps": 1e-5,
                "rope_theta": 1e4, "head_dim": 8, "sliding_window": 8, "attention_bias": True,
                "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0,
                "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False},
    "llama with adapters": {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
                            "rope_theta": 1e4, "tie_word_embeddings": False, **_SIZES,
                            "adapter_config": {"peft_type": "LORA", "r": 4, "lora_alpha": 8,
                                               "lora_dropout": 0.1, "target_modules": "all-linear"}},
    "phi3": {"model_type": "phi3", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4,
             "sliding_window": None, "tie_word_embeddings": False, "original_max_position_embeddings": 32,
             **_SIZES},
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64,
              "seq_length": 32, "layer_norm_epsilon": 1e-5, "attention_dropout": 0.0, "hidden_dropout": 0.0},
}  # fmt: skip


def small_model(family: str, folder: Path) -> str:
    """Write the config of a family and return its path."""
    file = folder / f"{family.replace(' ', '_')}.json"
    file.write_text(json.dumps(CONFIGS[family]))
    return str(file)
