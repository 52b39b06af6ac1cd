"""Decoders that scale, cap or norm where Llama does not, or run attention beside the feed-forward."""

from dataclasses import replace

from piper.models.shape import Embedding, FeedForward, Head, Layer, Norm, RopeScaling, Rotary
from tests.piper.models.transformers_cases.case import (
    GQA,
    HALF,
    HEAD_DIM,
    HIDDEN,
    LAYER_NORM,
    LLAMA,
    PLAIN,
    RMS,
    ROTARY,
    WIDTH,
    Case,
    decoder,
    llama_layer,
)
from tests.piper.models.transformers_cases.weights import stacked_norms

SCALED_AND_NORMED: dict[str, Case] = {
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
    "exaone4": Case(
        model_type="exaone4",
        config=LLAMA | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        shape=decoder(
            llama_layer(attention=replace(GQA, qk_norm=RMS, window=5), placement="post"),
            llama_layer(attention=replace(GQA, qk_norm=RMS, rotary=None), placement="post"),
        ),
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
    "stablelm": Case(
        model_type="stablelm",
        config=LLAMA | {"use_qkv_bias": True,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0,
                                            "partial_rotary_factor": 0.5}},
        shape=decoder(
            llama_layer(attention=replace(GQA, qkv_bias=True, rotary=HALF), norm=LAYER_NORM)
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
}  # fmt: skip
