"""One small model of `transformers`: its config, what it is made of, and how its weights are called here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from piper.models.shape import Attention, DecoderShape, FeedForward, Layer, Norm, Rotary

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
