"""MPT (MosaicML 2023), as its own training code builds it: learned positions or linear biases of the scores.

Source of keys and defaults: transformers `MptConfig`, and llm-foundry's configs, whose `no_bias: false` gives
every projection and norm a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import Names, Sizes, Trunk, assemble, read_trunk
from piper.models.shape import Attention, DecoderShape, Embedding, FeedForward, Layer, Norm

NAMES = Names(
    hidden="d_model", layers="n_layers", heads="n_heads", kv_heads=None, head_dim=None, context="max_seq_len"
)
NORMS = ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm")


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=2048), names=NAMES)
    bias = not read.flag("no_bias", default=True)
    norms = {name: "rms" if "rms" in name else "layer" for name in NORMS}
    kind = read.choice("norm_type", norms, default=NORMS[0])
    eps = read.number("layer_norm_epsilon", default=1e-5)
    norm = Norm(kind="rms", eps=eps) if kind == "rms" else Norm(kind="layer", eps=eps, bias=bias)
    scores = read.inner("attn_config") or Fields({}, where=where, prefix="attn_config.")
    attention = _attention(scores, trunk, bias=bias, norm=norm)
    ratio = read.number("expansion_ratio", default=4)
    read.require(
        (ratio * trunk.hidden).is_integer(), "expansion_ratio", value=ratio,
        rule=f"must make a whole number of {trunk.hidden} features",
    )  # fmt: skip
    layer = Layer(
        attention=attention,
        feed_forward=FeedForward(
            width=int(ratio * trunk.hidden), activation="gelu", gated=False, up_bias=bias, down_bias=bias
        ),
        norm=norm,
        dropout=read.share("resid_pdrop", default=0.0),
    )
    learned = read.flag("learned_pos_emb", default=True) and not (attention.alibi or attention.rotary)
    read.refuse("logit_scale")
    read.refuse("embedding_fraction", unless=1.0)
    return assemble(
        read, trunk, family="mpt", layers=(layer,) * trunk.layers, norm=norm, tied=True,
        embedding=Embedding(
            positions=trunk.context if learned else None, dropout=read.share("emb_pdrop", default=0.0)
        ),
    )  # fmt: skip


def _attention(scores: Fields, trunk: Trunk, *, bias: bool, norm: Norm) -> Attention:
    heads = {"multihead_attention": trunk.heads, "multiquery_attention": 1, "grouped_query_attention": 0}
    kv_heads = scores.choice("attn_type", heads, default="multihead_attention")
    if kv_heads == 0:
        kv_heads = scores.count("kv_n_heads")
        scores.require(
            trunk.heads % kv_heads == 0, "kv_n_heads", value=kv_heads, rule=f"must divide {trunk.heads} heads"
        )
    scores.refuse("prefix_lm", unless=False)
    for name in ("attn_impl", "attn_uses_sequence_id", "alibi_bias_max"):
        scores.raw(name)  # which kernel computes the same
    alibi = scores.flag("alibi", default=True)
    normed = scores.flag("qk_ln", default=False)
    rotary = None
    if scores.flag("rope", default=False):
        rotary = read_rotary(scores, head_dim=trunk.head_dim, context=trunk.context)
    return Attention(
        heads=trunk.heads, kv_heads=kv_heads, head_dim=trunk.head_dim, qkv_bias=bias, out_bias=bias,
        fused_qkv=True, qk_norm=norm if normed else None, qk_norm_over="all" if normed else "head",
        rotary=rotary, alibi=alibi, clip_qkv=scores.number_or_none("clip_qkv"),
        scale=scores.number_or_none("softmax_scale"), dropout=scores.share("attn_pdrop", default=0.0),
    )  # fmt: skip
