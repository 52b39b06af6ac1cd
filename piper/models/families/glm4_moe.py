"""GLM 4.5 (Zeng et al. 2025, arXiv 2508.06471): grouped queries, and experts as in DeepSeek V3.

Source of keys and defaults: transformers `Glm4MoeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piper.models.families.deepseek import Defaults, grouped, read_with_experts
from piper.models.fields import Fields
from piper.models.reading.rope import read_rotary
from piper.models.reading.trunk import Sizes, Trunk, read_trunk
from piper.models.shape import Attention, DecoderShape, Norm, Router

ROUTER = Router(experts=128, top_k=8, scores="sigmoid", group_score="top2", correction_bias=True)


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a `config.json` object; raises ModelError naming the field."""
    read = Fields(config, where=where)
    trunk = read_trunk(read, Sizes(context=131072, kv_heads=8))
    router = grouped(read, ROUTER)
    defaults = Defaults(family="glm4_moe", router=router, dense=1, shared=1, width=1408, eps=1e-5)
    return read_with_experts(read, trunk, defaults, attention=_attention)


def _attention(read: Fields, trunk: Trunk, norm: Norm) -> Attention:
    rotary = read_rotary(read, head_dim=trunk.head_dim, context=trunk.context, share=0.5)
    return Attention(
        heads=trunk.heads, kv_heads=trunk.kv_heads, head_dim=trunk.head_dim,
        qkv_bias=read.flag("attention_bias", default=False),
        qk_norm=norm if read.flag("use_qk_norm", default=False) else None, rotary=rotary,
        dropout=read.share("attention_dropout", default=0.0),
    )  # fmt: skip
