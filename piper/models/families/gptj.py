"""GPT-J (Wang and Komatsuzaki 2021): one norm feeds attention and feed-forward part, the head has a bias.

Source of keys and defaults: transformers `GPTJConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.families.gpt2 import NAMES
from piper.models.fields import Fields
from piper.models.reading.trunk import ACTIVATIONS, Sizes, assemble, read_trunk
from piper.models.shape import Attention, DecoderShape, Embedding, FeedForward, Head, Layer, Norm, Rotary


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=2048), names=NAMES)
    dims = read.count("rotary_dim", default=64, null=trunk.head_dim)
    read.require(
        dims % 2 == 0 and dims <= trunk.head_dim, "rotary_dim", value=dims,
        rule=f"must be even and at most {trunk.head_dim} (features of a head)",
    )  # fmt: skip
    norm = Norm(kind="layer", eps=read.number("layer_norm_epsilon", default=1e-5), bias=True)
    layer = Layer(
        attention=Attention(
            heads=trunk.heads, kv_heads=trunk.heads, head_dim=trunk.head_dim,
            dropout=read.share("attn_pdrop", default=0.0),
            rotary=Rotary(theta=10000.0, dims=dims, interleaved=True),
        ),
        feed_forward=FeedForward(
            width=read.count("n_inner", default=4 * trunk.hidden), gated=False, up_bias=True, down_bias=True,
            activation=read.choice("activation_function", ACTIVATIONS, default="gelu_new"),
        ),
        norm=norm,
        placement="parallel_shared",
        dropout=read.share("resid_pdrop", default=0.0),
    )  # fmt: skip
    return assemble(
        read, trunk, family="gptj", layers=(layer,) * trunk.layers, norm=norm, tied=False,
        embedding=Embedding(dropout=read.share("embd_pdrop", default=0.0)), head=Head(bias=True),
    )  # fmt: skip
