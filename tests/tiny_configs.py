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

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 96}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "first_k_dense_replace": 2,
    "num_hidden_layers": 4,
}
GPT2 = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 32,
    "vocab_size": 128,
    "attn_pdrop": 0.0,  # attention that drops is planned, but not run
}
NEEDS_NO_KV_HEADS = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}


def llama_like(architecture: str, **changes: Any) -> dict[str, Any]:
    """Return the config of a family whose keys are Llama's."""
    return LLAMA | {"architectures": [architecture]} | changes


TINY: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama4": llama_like(
        "Llama4ForCausalLM", head_dim=8, num_local_experts=8, intermediate_size_mlp=64,
        interleave_moe_layer_step=2, num_hidden_layers=4, no_rope_layer_interval=2,
    ),
    "mistral": llama_like("MistralForCausalLM", sliding_window=8),
    "mixtral": llama_like("MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2),
    "qwen2": llama_like("Qwen2ForCausalLM"),
    "qwen2_moe": llama_like(
        "Qwen2MoeForCausalLM", **MOE, num_experts=8, shared_expert_intermediate_size=64, num_hidden_layers=4,
        decoder_sparse_step=2,
    ),
    "qwen2_vl": llama_like("Qwen2VLForConditionalGeneration"),
    "qwen3": llama_like("Qwen3ForCausalLM", head_dim=16),
    "qwen3_moe": llama_like("Qwen3MoeForCausalLM", **MOE, num_experts=8, head_dim=16, norm_topk_prob=True),
    "gemma": llama_like("GemmaForCausalLM", head_dim=16),
    "gemma2": llama_like("Gemma2ForCausalLM", head_dim=16, sliding_window=8, num_hidden_layers=4),
    "gemma3": llama_like(
        "Gemma3ForCausalLM", head_dim=16, sliding_window=8, num_hidden_layers=4, sliding_window_pattern=2
    ),
    "deepseek_v2": llama_like(
        "DeepseekV2ForCausalLM", **LATENT, **MOE, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek_v3": llama_like(
        "DeepseekV3ForCausalLM", **LATENT, **MOE, n_group=4, topk_group=2, num_nextn_predict_layers=1
    ),
    "gpt_oss": llama_like(
        "GptOssForCausalLM", num_local_experts=8, num_experts_per_tok=2, head_dim=8, sliding_window=8,
        num_hidden_layers=4,
    ),
    "grok": llama_like("Grok1ModelForCausalLM", num_experts=8),
    "nemotron": llama_like("NemotronForCausalLM"),
    "gpt2": GPT2 | {"architectures": ["GPT2LMHeadModel"]},
    "gptj": GPT2 | {"architectures": ["GPTJForCausalLM"], "rotary_dim": 4},
    "gpt_neox": NEEDS_NO_KV_HEADS | {"architectures": ["GPTNeoXForCausalLM"]},
    "mpt": {
        "architectures": ["MPTForCausalLM"],
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 8,
        "max_seq_len": 32,
        "vocab_size": 128,
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "seq_length": 32,
        "vocab_size": 128,
    },
    "opt": NEEDS_NO_KV_HEADS | {"architectures": ["OPTForCausalLM"], "ffn_dim": 96},
    "falcon": NEEDS_NO_KV_HEADS
    | {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True, "num_kv_heads": 8},
    "phi": llama_like("PhiForCausalLM"),
    "phi3": llama_like("Phi3ForCausalLM"),
    "olmo": llama_like("OlmoForCausalLM"),
    "olmo2": llama_like("Olmo2ForCausalLM"),
    "olmo3": llama_like("Olmo3ForCausalLM", sliding_window=8, num_hidden_layers=8),
    "olmoe": llama_like("OlmoeForCausalLM", num_experts=8, num_experts_per_tok=2),
    "starcoder2": llama_like("Starcoder2ForCausalLM"),
    "stablelm": llama_like("StableLmForCausalLM", use_qkv_bias=True),
    "granite": llama_like("GraniteForCausalLM", residual_multiplier=0.5, logits_scaling=4.0),
    "granite_moe": llama_like("GraniteMoeForCausalLM", num_local_experts=8, num_experts_per_tok=2),
    "cohere": llama_like("CohereForCausalLM"),
    "cohere2": llama_like(
        "Cohere2ForCausalLM", sliding_window=8, sliding_window_pattern=2, num_hidden_layers=4
    ),
    "glm4": llama_like("Glm4ForCausalLM", head_dim=8),
    "glm4_moe": llama_like(
        "Glm4MoeForCausalLM", **MOE, n_routed_experts=8, num_hidden_layers=4, first_k_dense_replace=2,
        attention_bias=True, use_qk_norm=True,
    ),
    "minimax_m2": llama_like(
        "MiniMaxM2ForCausalLM", num_local_experts=8, num_experts_per_tok=2, head_dim=16
    ),
    "smollm3": llama_like("SmolLM3ForCausalLM", no_rope_layer_interval=2, num_hidden_layers=4),
    "generic": {
        "architectures": ["PiperDecoder"],
        "hidden": 64,
        "vocabulary": 128,
        "context_length": 32,
        "layers": [
            {
                "count": 2,
                "attention": {"heads": 8, "kv_heads": 8, "head_dim": 8, "rotary": {"theta": 1e4, "dims": 4}},
                "feed_forward": {"width": 96, "activation": "relu2", "gated": False},
                "norm": {"kind": "layer"},
                "placement": "parallel_shared",
            }
        ],
        "final_norm": {"kind": "layer"},
    },
    "exaone4": llama_like(
        "Exaone4ForCausalLM", sliding_window=8, sliding_window_pattern=2, num_hidden_layers=4
    ),
}  # fmt: skip
"""Family -> `config.json`."""
