"""Small models of `transformers`, what they are made of, and how their weights are called here."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from piper.models.shape import (
    Attention,
    DecoderShape,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Layer,
    Norm,
    RopeScaling,
    Rotary,
    Router,
    SparseMoE,
)

Weights = dict[str, Tensor]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY, CONTEXT, LAYERS = 32, 4, 2, 8, 48, 40, 32, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One small model.

    Args:
        model_type: of `transformers`.
        config: keyword arguments of its config class.
        shape: what it is made of.
        names: regular expressions over names there, and the names here, tried in order; first match.
        convert: changes the tensors of all weights, after renaming; linear, so that gradients follow.
    """

    model_type: str
    shape: DecoderShape
    config: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    convert: Callable[[Weights], Weights] = lambda weights: weights


LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
RMS = Norm(kind="rms", eps=1e-6)
LAYER_NORM = Norm(kind="layer", eps=1e-5, bias=True)
ROTARY = Rotary(theta=100.0, dims=HEAD_DIM)
HALF = Rotary(theta=100.0, dims=HEAD_DIM // 2)
GQA = Attention(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, rotary=ROTARY)
FUSED = Attention(
    heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, qkv_bias=True, out_bias=True, fused_qkv=True
)
SWIGLU = FeedForward(width=WIDTH)
PLAIN = FeedForward(width=4 * HIDDEN, activation="gelu", gated=False, up_bias=True, down_bias=True)


def decoder(*layers: Layer, **changes: Any) -> DecoderShape:
    repeated = layers if len(layers) > 1 else layers * LAYERS
    return DecoderShape(
        **{
            "family": "test",
            "hidden": HIDDEN,
            "vocabulary": VOCABULARY,
            "layers": repeated,
            "final_norm": layers[0].norm,
            "context_length": CONTEXT,
        }
        | changes
    )


def llama_layer(**changes: Any) -> Layer:
    return Layer(**{"attention": GQA, "feed_forward": SWIGLU, "norm": RMS} | changes)


def by_kv_head(weights: Weights, *, order: str) -> Weights:
    """Reorder fused projections into ours: for each key head its queries, its key, its value.

    Args:
        weights: with "qkv_proj".
        order: "parts": all queries, all keys, all values; "heads": head by head, with one key head for each.
    """
    return {
        name: _by_kv_head(value, order=order) if "qkv_proj" in name else value
        for name, value in weights.items()
    }


def _by_kv_head(value: Tensor, *, order: str) -> Tensor:
    if order == "heads":
        return value
    rest = value.shape[1:]
    kv_heads = (value.shape[0] // HEAD_DIM - HEADS) // 2
    query, key, value = value.split((HEADS * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM))
    parts = (part.view(kv_heads, -1, HEAD_DIM, *rest) for part in (query, key, value))
    return torch.cat([*parts], 1).flatten(0, 2)


def transposed(weights: Weights) -> Weights:
    """Return matrices of linear layers stored as [in, out] the other way round."""
    return {
        name: value.t() if value.dim() > 1 and "_proj" in name else value for name, value in weights.items()
    }


def split_experts(weights: Weights) -> Weights:
    """Cut stacked gates and up projections, [experts, 2 width, hidden], into two."""
    made: Weights = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            made[f"{prefix}w1"], made[f"{prefix}w3"] = value.chunk(2, 1)
        else:
            made[name.replace("experts.down_proj", "experts.w2")] = value
    return made


MOE_NAMES = {
    r"\.mlp\.(experts\..*proj)$": r".block_sparse_moe.\1",
    r"\.mlp\.(gate\.weight|shared_expert_gate\.weight)": r".block_sparse_moe.\1",
    r"\.mlp\.shared_experts?\.": r".block_sparse_moe.shared_expert.",
}
NEOX_NAMES = {
    r"gpt_neox\.embed_in": "model.embed_tokens",
    r"gpt_neox\.final_layer_norm": "model.norm",
    r"gpt_neox\.": "model.",
    r"attention\.query_key_value": "self_attn.qkv_proj",
    r"attention\.dense": "self_attn.o_proj",
    r"dense_h_to_4h": "up_proj",
    r"dense_4h_to_h": "down_proj",
}
GPT2_NAMES = {
    r"transformer\.wte": "model.embed_tokens",
    r"transformer\.wpe": "model.embed_positions",
    r"transformer\.ln_f": "model.norm",
    r"transformer\.h\.": "model.layers.",
    r"attn\.c_attn": "self_attn.qkv_proj",
    r"attn\.c_proj": "self_attn.o_proj",
    r"ln_1": "input_layernorm",
    r"ln_2": "post_attention_layernorm",
    r"c_fc|fc_in": "up_proj",
    r"mlp\.c_proj|mlp\.fc_out": "mlp.down_proj",
    r"\.attn\.(.)_proj": r".self_attn.\1_proj",
    r"\.attn\.out_proj": ".self_attn.o_proj",
}


FALCON = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "ffn_hidden_size": 4 * HIDDEN, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": CONTEXT, "bias": False, "alibi": False, "parallel_attn": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
FALCON_NAMES = {
    r"transformer\.word_embeddings": "model.embed_tokens",
    r"transformer\.ln_f": "model.norm",
    r"transformer\.h\.": "model.layers.",
    "ln_attn": "input_layernorm",
    "ln_mlp": "post_attention_layernorm",
    r"self_attention\.query_key_value": "self_attn.qkv_proj",
    r"self_attention\.dense": "self_attn.o_proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
}


def moe(router: Router, width: int = 24, **changes: Any) -> SparseMoE:
    return SparseMoE(router=router, expert=FeedForward(width=width), **changes)


LATENT = LatentAttention(
    heads=HEADS, query_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6, norm=RMS,
    rotary=Rotary(theta=100.0, dims=4, interleaved=True),
)  # fmt: skip
LATENT_CONFIG = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "num_key_value_heads": HEADS, "head_dim": 4,
}  # fmt: skip

CASES: dict[str, Case] = {
    "llama": Case(model_type="llama", config=LLAMA, shape=decoder(llama_layer())),
    "llama_tied_biases": Case(
        model_type="llama",
        config=LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, qkv_bias=True, out_bias=True),
                feed_forward=FeedForward(width=WIDTH, up_bias=True, down_bias=True),
            ),
            head=Head(tied=True),
        ),
    ),
    "mistral_window": Case(
        model_type="mistral",
        config=LLAMA | {"sliding_window": 5},
        shape=decoder(llama_layer(attention=replace(GQA, window=5))),
    ),
    "mixtral": Case(
        model_type="mixtral",
        config=LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
        shape=decoder(llama_layer(feed_forward=moe(Router(experts=5, top_k=2), width=WIDTH))),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "qwen2": Case(
        model_type="qwen2",
        config=LLAMA,
        shape=decoder(llama_layer(attention=replace(GQA, qkv_bias=True))),
    ),
    "qwen3": Case(
        model_type="qwen3",
        config=LLAMA,
        shape=decoder(llama_layer(attention=replace(GQA, qk_norm=RMS))),
    ),
    "qwen2_moe": Case(
        model_type="qwen2_moe",
        config=LLAMA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                        "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, qkv_bias=True),
                feed_forward=moe(
                    Router(experts=6, top_k=2, normalised=False),
                    shared=FeedForward(width=40),
                    shared_gate=True,
                ),
            )
        ),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "qwen3_moe": Case(
        model_type="qwen3_moe",
        config=LLAMA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                        "norm_topk_prob": True},
        shape=decoder(
            llama_layer(attention=replace(GQA, qk_norm=RMS), feed_forward=moe(Router(experts=6, top_k=2)))
        ),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "gemma2": Case(
        model_type="gemma2",
        config=LLAMA | {"tie_word_embeddings": True, "sliding_window": 5, "query_pre_attn_scalar": 16,
                        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        shape=decoder(
            *(
                llama_layer(
                    attention=replace(GQA, window=window, scale=16**-0.5, softcap=2.0),
                    feed_forward=FeedForward(width=WIDTH, activation="gelu_tanh"),
                    norm=Norm(kind="rms", eps=1e-6, offset=True),
                    placement="sandwich",
                )
                for window in (5, None)
            ),
            embedding=Embedding(scale=HIDDEN**0.5),
            head=Head(tied=True, softcap=3.0),
        ),
    ),
    "gemma3": Case(
        model_type="gemma3_text",
        config=LLAMA | {"tie_word_embeddings": True, "sliding_window": 5, "query_pre_attn_scalar": 16,
                        "layer_types": ["sliding_attention", "full_attention"],
                        "rope_parameters": {
                            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
        shape=decoder(
            *(
                llama_layer(
                    attention=replace(
                        GQA,
                        window=window,
                        scale=16**-0.5,
                        rotary=rotary,
                        qk_norm=Norm(kind="rms", eps=1e-6, offset=True),
                    ),
                    feed_forward=FeedForward(width=WIDTH, activation="gelu_tanh"),
                    norm=Norm(kind="rms", eps=1e-6, offset=True),
                    placement="sandwich",
                )
                for window, rotary in (
                    (5, ROTARY),
                    (
                        None,
                        Rotary(theta=1e6, dims=HEAD_DIM, scaling=RopeScaling(kind="linear", factor=8.0)),
                    ),
                )
            ),
            embedding=Embedding(scale=HIDDEN**0.5),
            head=Head(tied=True),
        ),
    ),
    "nemotron": Case(
        model_type="nemotron",
        config=LLAMA | {"partial_rotary_factor": 0.5, "norm_eps": 1e-5,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0,
                                            "partial_rotary_factor": 0.5}},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, rotary=HALF),
                feed_forward=FeedForward(width=WIDTH, activation="relu2", gated=False),
                norm=Norm(kind="layer", eps=1e-5, bias=True, offset=True),
            )
        ),
    ),
    "deepseek_v2": Case(
        model_type="deepseek_v2",
        config=LLAMA | LATENT_CONFIG | {
            "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4,
            "topk_group": 2, "topk_method": "group_limited_greedy", "norm_topk_prob": False,
            "moe_intermediate_size": 24, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
            "num_hidden_layers": 3},
        shape=decoder(
            llama_layer(attention=LATENT),
            *(
                llama_layer(
                    attention=LATENT,
                    feed_forward=moe(
                        Router(experts=8, top_k=3, normalised=False, scaling=2.5, groups=4, groups_kept=2),
                        shared=FeedForward(width=48),
                    ),
                ),
            )
            * 2,
        ),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "deepseek_v3": Case(
        model_type="deepseek_v3",
        config=LLAMA | LATENT_CONFIG | {
            "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4,
            "topk_group": 2, "norm_topk_prob": True, "moe_intermediate_size": 24,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "num_hidden_layers": 3},
        shape=decoder(
            llama_layer(attention=LATENT),
            *(
                llama_layer(
                    attention=LATENT,
                    feed_forward=moe(
                        Router(
                            experts=8, top_k=3, scores="sigmoid", scaling=2.5, groups=4, groups_kept=2,
                            group_score="top2", correction_bias=True,
                        ),
                        shared=FeedForward(width=24),
                    ),
                ),
            )
            * 2,
        ),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "gpt2": Case(
        model_type="gpt2",
        config={"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT,
                "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2,
                "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        shape=decoder(
            Layer(
                attention=FUSED,
                feed_forward=replace(PLAIN, activation="gelu_tanh"),
                norm=LAYER_NORM,
            ),
            embedding=Embedding(positions=CONTEXT),
            head=Head(tied=True),
        ),
        names=GPT2_NAMES,
        convert=lambda weights: by_kv_head(transposed(weights), order="parts"),
    ),
    "gpt_neox": Case(
        model_type="gpt_neox",
        config={"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                "intermediate_size": 4 * HIDDEN, "vocab_size": VOCABULARY, "bos_token_id": 1,
                "eos_token_id": 2, "max_position_embeddings": CONTEXT,
                "rope_parameters": {"rope_type": "default", "rope_theta": 100.0,
                                    "partial_rotary_factor": 0.5}},
        shape=decoder(
            Layer(
                attention=replace(FUSED, rotary=HALF),
                feed_forward=PLAIN,
                norm=LAYER_NORM,
                placement="parallel",
            ),
        ),
        names=NEOX_NAMES,
    ),
    "mpt": Case(
        model_type="mpt",
        config={"d_model": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "expansion_ratio": 4,
                "max_seq_len": CONTEXT, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2,
                "attn_config": {"clip_qkv": 0.5, "alibi": True}},
        shape=decoder(
            Layer(
                attention=replace(FUSED, qkv_bias=False, out_bias=False, alibi=True, clip_qkv=0.5),
                feed_forward=replace(PLAIN, up_bias=False, down_bias=False),
                norm=Norm(kind="layer", eps=1e-5),
            ),
            head=Head(tied=True),
        ),
        names={
            r"transformer\.wte": "model.embed_tokens",
            r"transformer\.norm_f": "model.norm",
            r"transformer\.blocks\.": "model.layers.",
            r"attn\.Wqkv": "self_attn.qkv_proj",
            r"attn\.out_proj": "self_attn.o_proj",
            r"norm_1": "input_layernorm",
            r"norm_2": "post_attention_layernorm",
            r"ffn\.": "mlp.",
        },
        convert=lambda weights: by_kv_head(weights, order="parts"),
    ),
}  # fmt: skip


def gpt_oss_experts(weights: Weights) -> Weights:
    """Turn [experts, in, out] with gates and ups in turn into ours, gates before ups."""
    made: Weights = {}
    for name, value in weights.items():
        if "experts.gate_up_proj" in name:
            by_row = value if name.endswith("bias") else value.transpose(1, 2)
            new = name.replace("gate_up_proj", "w13")
            made[new] = torch.cat((by_row[:, 0::2], by_row[:, 1::2]), 1)
        elif "experts.down_proj" in name:
            new = name.replace("down_proj", "w2")
            made[new] = value if name.endswith("bias") else value.transpose(1, 2)
        else:
            made[name] = value
    return made


def stacked_norms(weights: Weights) -> Weights:
    """Stack a norm for each head into one weight, [heads, head_dim]."""
    made: Weights = {}
    for name, value in weights.items():
        owner, found, _ = name.partition(".norms.")
        if not found:
            made[name] = value
        elif f"{owner}.weight" not in made:
            count = sum(other.startswith(f"{owner}.norms.") for other in weights)
            rows = [weights[f"{owner}.norms.{head}.weight"] for head in range(count)]
            made[f"{owner}.weight"] = torch.stack(rows)
    return made


def shifted_positions(weights: Weights) -> Weights:
    """Put the two rows that OPT never reads behind those that it reads."""
    return {
        name: value.roll(-2, 0) if "embed_positions" in name else value for name, value in weights.items()
    }


def stretched(scaling: RopeScaling, dims: int = HEAD_DIM) -> DecoderShape:
    """Return Llama with stretched rotary frequencies."""
    return decoder(
        llama_layer(attention=replace(GQA, rotary=Rotary(theta=100.0, dims=dims, scaling=scaling)))
    )


CASES.update({
    "gemma": Case(
        model_type="gemma",
        config=LLAMA | {"tie_word_embeddings": True},
        shape=decoder(
            llama_layer(
                feed_forward=FeedForward(width=WIDTH, activation="gelu_tanh"),
                norm=Norm(kind="rms", eps=1e-6, offset=True),
            ),
            embedding=Embedding(scale=HIDDEN**0.5),
            head=Head(tied=True),
        ),
    ),
    "gpt_oss": Case(
        model_type="gpt_oss",
        config=LLAMA | {
            "attention_bias": True, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0,
                                "beta_slow": 1.0, "truncate": False,
                                "original_max_position_embeddings": 8}},
        shape=decoder(
            *(
                llama_layer(
                    attention=replace(
                        GQA,
                        window=window,
                        qkv_bias=True,
                        out_bias=True,
                        sinks=True,
                        rotary=Rotary(
                            theta=100.0,
                            dims=HEAD_DIM,
                            scaling=RopeScaling(
                                kind="yarn", factor=4.0, original_context=8, beta_fast=2.0, truncate=False,
                                attention_factor=0.1 * math.log(4.0) + 1,
                            ),
                        ),
                    ),
                    feed_forward=SparseMoE(
                        router=Router(experts=6, top_k=2, scores="softmax_of_chosen", bias=True),
                        expert=FeedForward(
                            width=WIDTH, up_bias=True, down_bias=True, fused_gate=True, clamp=7.0,
                            up_offset=1.0, gate_slope=1.702,
                        ),
                    ),
                )
                for window in (5, None)
            )
        ),
        names={r"\.mlp\.router": ".block_sparse_moe.gate", r"\.mlp\.experts": ".block_sparse_moe.experts"},
        convert=gpt_oss_experts,
    ),
    "olmo": Case(
        model_type="olmo",
        config=LLAMA | {"clip_qkv": 0.5},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, clip_qkv=0.5), norm=Norm(kind="layer", eps=1e-5, weight=False)
            )
        ),
    ),
    "olmo2": Case(
        model_type="olmo2",
        config=LLAMA,
        shape=decoder(
            llama_layer(attention=replace(GQA, qk_norm=RMS, qk_norm_over="all"), placement="post")
        ),
    ),
    "olmoe": Case(
        model_type="olmoe",
        config=LLAMA | {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, qk_norm=RMS, qk_norm_over="all"),
                feed_forward=moe(Router(experts=6, top_k=2, normalised=False), width=WIDTH),
            )
        ),
        names=MOE_NAMES,
        convert=split_experts,
    ),
    "phi3_longrope": Case(
        model_type="phi3",
        config=LLAMA | {
            "original_max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 1.0,
                                "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
                                "original_max_position_embeddings": 8}},
        shape=decoder(
            llama_layer(
                attention=replace(
                    GQA,
                    fused_qkv=True,
                    rotary=Rotary(
                        theta=100.0,
                        dims=HEAD_DIM,
                        scaling=RopeScaling(
                            kind="longrope", factor=4.0, original_context=8,
                            attention_factor=math.sqrt(1 + math.log(4.0) / math.log(8)),
                            short_factors=(1.0, 1.1, 1.2, 1.3), long_factors=(1.5, 2.0, 3.0, 4.0),
                        ),
                    ),
                ),
                feed_forward=FeedForward(width=WIDTH, fused_gate=True),
            )
        ),
        convert=lambda weights: by_kv_head(weights, order="parts"),
    ),
    "falcon_7b": Case(
        model_type="falcon",
        config=FALCON | {"multi_query": True},
        shape=decoder(
            Layer(
                attention=replace(FUSED, kv_heads=1, rotary=ROTARY, qkv_bias=False, out_bias=False),
                feed_forward=replace(PLAIN, up_bias=False, down_bias=False),
                norm=LAYER_NORM,
                placement="parallel_shared",
            ),
            head=Head(tied=True),
        ),
        names=FALCON_NAMES,
    ),
    "falcon_40b": Case(
        model_type="falcon",
        config=FALCON | {"new_decoder_architecture": True, "num_kv_heads": KV_HEADS},
        shape=decoder(
            Layer(
                attention=replace(FUSED, kv_heads=KV_HEADS, rotary=ROTARY, qkv_bias=False, out_bias=False),
                feed_forward=replace(PLAIN, up_bias=False, down_bias=False),
                norm=LAYER_NORM,
                placement="parallel",
            ),
            head=Head(tied=True),
        ),
        names=FALCON_NAMES,
    ),
    "starcoder2": Case(
        model_type="starcoder2",
        config={name: value for name, value in LLAMA.items() if name not in {"head_dim", "rms_norm_eps"}}
        | {"sliding_window": 5, "residual_dropout": 0.0, "embedding_dropout": 0.0,
           "tie_word_embeddings": True},
        shape=decoder(
            Layer(
                attention=replace(GQA, qkv_bias=True, out_bias=True, window=5),
                feed_forward=replace(PLAIN, width=WIDTH, activation="gelu_tanh"),
                norm=LAYER_NORM,
            ),
            head=Head(tied=True),
        ),
        names={"c_fc": "up_proj", "c_proj": "down_proj"},
    ),
    "bloom": Case(
        model_type="bloom",
        config={"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCABULARY,
                "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
        shape=decoder(
            Layer(
                attention=replace(FUSED, alibi=True),
                feed_forward=replace(PLAIN, activation="gelu_tanh"),
                norm=LAYER_NORM,
            ),
            embedding=Embedding(norm=LAYER_NORM),
            head=Head(tied=True),
        ),
        names={
            r"transformer\.word_embeddings_layernorm": "model.embed_norm",
            r"transformer\.word_embeddings": "model.embed_tokens",
            r"transformer\.ln_f": "model.norm",
            r"transformer\.h\.": "model.layers.",
            r"self_attention\.query_key_value": "self_attn.qkv_proj",
            r"self_attention\.dense": "self_attn.o_proj",
            "dense_h_to_4h": "up_proj",
            "dense_4h_to_h": "down_proj",
        },
    ),
    "opt": Case(
        model_type="opt",
        config={"hidden_size": HIDDEN, "word_embed_proj_dim": HIDDEN, "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS, "ffn_dim": WIDTH, "vocab_size": VOCABULARY, "dropout": 0.0,
                "max_position_embeddings": CONTEXT, "pad_token_id": None, "bos_token_id": 1,
                "eos_token_id": 2},
        shape=decoder(
            Layer(
                attention=replace(FUSED, fused_qkv=False),
                feed_forward=replace(PLAIN, width=WIDTH, activation="relu"),
                norm=LAYER_NORM,
            ),
            embedding=Embedding(positions=CONTEXT + 2),
            head=Head(tied=True),
        ),
        names={
            r"model\.decoder\.final_layer_norm": "model.norm",
            r"model\.decoder\.": "model.",
            "self_attn_layer_norm": "input_layernorm",
            r"(layers\.\d+)\.final_layer_norm": r"\1.post_attention_layernorm",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
            "out_proj": "o_proj",
        },
        convert=shifted_positions,
    ),
    "granite": Case(
        model_type="granite",
        config=LLAMA | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                        "attention_multiplier": 0.2, "logits_scaling": 2.0},
        shape=decoder(
            llama_layer(attention=replace(GQA, scale=0.2), residual_scale=0.4),
            embedding=Embedding(scale=3.0),
            head=Head(scale=0.5),
        ),
    ),
    "granite_moe": Case(
        model_type="granitemoe",
        config=LLAMA | {"num_local_experts": 6, "num_experts_per_tok": 2},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, scale=1.0),
                feed_forward=moe(Router(experts=6, top_k=2, scores="softmax_of_chosen"), width=WIDTH),
            )
        ),
        names={r"block_sparse_moe\.router": "block_sparse_moe.gate"},
        convert=split_experts,
    ),
    "stablelm": Case(
        model_type="stablelm",
        config=LLAMA | {"use_qkv_bias": True,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0,
                                            "partial_rotary_factor": 0.5}},
        shape=decoder(
            llama_layer(attention=replace(GQA, qkv_bias=True, rotary=HALF), norm=LAYER_NORM)
        ),
    ),
    "cohere": Case(
        model_type="cohere",
        config=LLAMA | {"logit_scale": 0.25, "tie_word_embeddings": True},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, rotary=replace(ROTARY, interleaved=True)),
                norm=Norm(kind="layer", eps=1e-5),
                placement="parallel_shared",
            ),
            head=Head(tied=True, scale=0.25),
        ),
    ),
    "cohere_qk_norm": Case(
        model_type="cohere",
        config=LLAMA | {"logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": True},
        shape=decoder(
            llama_layer(
                attention=replace(
                    GQA,
                    rotary=replace(ROTARY, interleaved=True),
                    qk_norm=Norm(kind="layer", eps=1e-5),
                    qk_norm_over="each",
                ),
                norm=Norm(kind="layer", eps=1e-5),
                placement="parallel_shared",
            ),
            head=Head(tied=True, scale=0.25),
        ),
    ),
    "stablelm_12b": Case(
        model_type="stablelm",
        config=LLAMA | {"qk_layernorm": True, "use_parallel_residual": True,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0,
                                            "partial_rotary_factor": 0.5}},
        shape=decoder(
            llama_layer(
                attention=replace(
                    GQA, rotary=HALF, qk_norm=Norm(kind="layer", eps=1e-5), qk_norm_over="each"
                ),
                norm=LAYER_NORM,
                placement="parallel_shared",
            )
        ),
        names={"q_layernorm": "q_norm", "k_layernorm": "k_norm"},
        convert=stacked_norms,
    ),
    "gptj": Case(
        model_type="gptj",
        config={"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT,
                "rotary_dim": 4, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2},
        shape=decoder(
            Layer(
                attention=replace(
                    FUSED, fused_qkv=False, qkv_bias=False, out_bias=False,
                    rotary=Rotary(theta=10000.0, dims=4, interleaved=True),
                ),
                feed_forward=replace(PLAIN, activation="gelu_tanh"),
                norm=LAYER_NORM,
                placement="parallel_shared",
            ),
            head=Head(bias=True),
        ),
        names=GPT2_NAMES,
    ),
    "phi": Case(
        model_type="phi",
        config={name: value for name, value in LLAMA.items() if name not in {"head_dim", "rms_norm_eps"}}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
        shape=decoder(
            Layer(
                attention=replace(GQA, qkv_bias=True, out_bias=True, rotary=HALF),
                feed_forward=replace(PLAIN, width=WIDTH, activation="gelu_tanh"),
                norm=LAYER_NORM,
                placement="parallel_shared",
            ),
            head=Head(bias=True),
        ),
        names={r"self_attn\.dense": "self_attn.o_proj", "fc1": "up_proj", "fc2": "down_proj",
               r"model\.final_layernorm": "model.norm"},
    ),
    "gpt_bigcode": Case(
        model_type="gpt_bigcode",
        config={"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT,
                "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2,
                "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        shape=decoder(
            Layer(
                attention=replace(FUSED, kv_heads=1),
                feed_forward=replace(PLAIN, activation="gelu_tanh"),
                norm=LAYER_NORM,
            ),
            embedding=Embedding(positions=CONTEXT),
            head=Head(tied=True),
        ),
        names=GPT2_NAMES,
    ),
    "glm4": Case(
        model_type="glm4",
        config=LLAMA | {"attention_bias": False,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0,
                                            "partial_rotary_factor": 0.5}},
        shape=decoder(
            llama_layer(
                attention=replace(GQA, rotary=replace(HALF, interleaved=True)),
                feed_forward=FeedForward(width=WIDTH, fused_gate=True),
                placement="sandwich",
            )
        ),
        names={
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
    ),
    "exaone4": Case(
        model_type="exaone4",
        config=LLAMA | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        shape=decoder(
            llama_layer(attention=replace(GQA, qk_norm=RMS, window=5), placement="post"),
            llama_layer(attention=replace(GQA, qk_norm=RMS, rotary=None), placement="post"),
        ),
    ),
    "llama4": Case(
        model_type="llama4_text",
        config=LLAMA | {
            "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 40, "use_qk_norm": True, "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0], "layer_types": ["full_attention", "full_attention"]},
        shape=decoder(
            llama_layer(
                attention=replace(
                    GQA,
                    rotary=replace(ROTARY, interleaved=True),
                    qk_norm=Norm(kind="rms", eps=1e-6, weight=False),
                ),
                feed_forward=FeedForward(width=40),
            ),
            llama_layer(
                attention=replace(GQA, rotary=None),
                feed_forward=moe(
                    Router(experts=4, top_k=1, scores="sigmoid", normalised=False, weigh_input=True),
                    width=WIDTH,
                    shared=FeedForward(width=WIDTH),
                ),
            ),
        ),
        names={
            r"layers\.0\.feed_forward": "layers.0.mlp",
            r"feed_forward\.router": "block_sparse_moe.gate",
            "feed_forward": "block_sparse_moe",
        },
        convert=lambda weights: split_experts(
            {
                name: value.transpose(1, 2) if "experts." in name else value
                for name, value in weights.items()
            }
        ),
    ),
    "rope_llama3": Case(
        model_type="llama",
        config=LLAMA | {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
        shape=stretched(
            RopeScaling(
                kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16
            )
        ),
    ),
    "rope_yarn": Case(
        model_type="llama",
        config=LLAMA | {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5,
            "original_max_position_embeddings": 8}},
        shape=stretched(
            RopeScaling(
                kind="yarn", factor=4.0, original_context=8, beta_fast=2.0, beta_slow=0.5,
                attention_factor=0.1 * math.log(4.0) + 1,
            )
        ),
    ),
    "rope_dynamic": Case(
        model_type="llama",
        config=LLAMA | {
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}},
        shape=stretched(RopeScaling(kind="dynamic", factor=2.0, original_context=8)),
    ),
    "deepseek_v3_yarn": Case(
        model_type="deepseek_v3",
        config=LLAMA | LATENT_CONFIG | {
            "n_routed_experts": 8, "first_k_dense_replace": 2,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0,
                                "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5,
                                "original_max_position_embeddings": 8}},
        shape=decoder(
            llama_layer(
                attention=replace(
                    LATENT,
                    rotary=Rotary(
                        theta=100.0,
                        dims=4,
                        interleaved=True,
                        scaling=RopeScaling(
                            kind="yarn", factor=4.0, original_context=8, beta_fast=2.0, beta_slow=0.5,
                            attention_factor=(0.1 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1),
                        ),
                    ),
                    scale=12**-0.5 * (0.05 * math.log(4.0) + 1) ** 2,
                )
            )
        ),
    ),
})  # fmt: skip


def ours(case: Case, weights: Weights) -> Weights:
    """Return tensors by the names that they have here."""
    renamed: Weights = {}
    for name, value in weights.items():
        for pattern, replacement in case.names.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return case.convert(renamed)
