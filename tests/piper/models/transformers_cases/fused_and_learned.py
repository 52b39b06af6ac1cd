"""The older families: fused projections, learned or no positions, plain feed-forwards."""

from dataclasses import replace

from piper.models.shape import Embedding, Head, Layer, Norm, Rotary
from tests.piper.models.transformers_cases.case import (
    CONTEXT,
    FUSED,
    GQA,
    HALF,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYER_NORM,
    LAYERS,
    LLAMA,
    PLAIN,
    ROTARY,
    VOCABULARY,
    WIDTH,
    Case,
    decoder,
)
from tests.piper.models.transformers_cases.weights import by_kv_head, shifted_positions, transposed

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

FUSED_AND_LEARNED: dict[str, Case] = {
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
}  # fmt: skip
