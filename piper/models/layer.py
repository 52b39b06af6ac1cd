"""One decoder layer: attention and feed-forward part, and the norms around them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from piper.annotation import annotate
from piper.models import shape as shapes
from piper.models.attention import Attention
from piper.models.experts import SparseMoE
from piper.models.feed_forward import FeedForward
from piper.models.latent_attention import LatentAttention
from piper.models.norms import Norm

NORMS: dict[shapes.Placement, tuple[str, ...]] = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "parallel": ("input_layernorm", "post_attention_layernorm"),
    "parallel_shared": ("input_layernorm",),
}
"""Names of a layer's norms, as Hugging Face's Llama, OLMo 2, Gemma 2 and GPT-NeoX have them."""

_NORMS_AROUND: dict[shapes.Placement, tuple[tuple[str | None, ...], tuple[str | None, ...]]] = {
    "pre": (("input_layernorm", "post_attention_layernorm"), (None, None)),
    "post": ((None, None), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "sandwich": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}
"""Norms before, and after, attention and feed-forward part."""


class Layer(nn.Module):
    """The layer that a `shape.Layer` describes; `lengths` of the documents packed into a sequence.

    The feed-forward part is `mlp`, or `block_sparse_moe` with experts.
    """

    def __init__(self, shape: shapes.Layer, hidden: int, *, lengths: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape = shape
        attention = shape.attention
        self.self_attn = (
            Attention(attention, hidden, lengths=lengths)
            if isinstance(attention, shapes.Attention)
            else LatentAttention(attention, hidden, lengths=lengths)
        )
        if isinstance(shape.feed_forward, shapes.SparseMoE):
            self.block_sparse_moe = SparseMoE(shape.feed_forward, hidden)
        else:
            self.mlp = FeedForward(shape.feed_forward, hidden)
        for name in NORMS[shape.placement]:
            self.add_module(name, Norm(shape.norm, hidden))

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        """Map [microbatch, seq, hidden] to the same shape; `tables` as in `piper.models.attention`."""
        with annotate("PP"), annotate("LAYER"):
            return self.transform(x, tables)

    def transform(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """Do the same inside a scope of the caller."""
        if self.shape.placement in {"parallel", "parallel_shared"}:
            return x + self._dropped(self._both(x, tables))
        before, after = _NORMS_AROUND[self.shape.placement]
        attended = self._attended(self._normed(x, before[0]), tables)
        x = x + self._dropped(self._normed(attended, after[0]))
        transformed = self._transformed(self._normed(x, before[1]))
        return x + self._dropped(self._normed(transformed, after[1]))

    def _attended(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        prepared = self.self_attn.prepare(x)
        with annotate("TP"):
            made = self.self_attn(prepared, tables)
        return self.self_attn.finish(made)

    def _transformed(self, x: Tensor) -> Tensor:
        if isinstance(self.shape.feed_forward, shapes.SparseMoE):
            mixed: Tensor = self.block_sparse_moe(x)
            return mixed
        prepared = self.mlp.prepare(x)
        with annotate("TP"):
            made = self.mlp(prepared)
        return self.mlp.finish(made)

    def _both(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """Return the sum of both parts; inside one scope, so that it is reduced over ranks only once."""
        first = self._normed(x, "input_layernorm")
        second = self._normed(x, "post_attention_layernorm") if self.shape.placement == "parallel" else first
        if isinstance(self.shape.feed_forward, shapes.SparseMoE):
            return self._attended(first, tables) + self._transformed(second)
        for_attention, for_mlp = self.self_attn.prepare(first), self.mlp.prepare(second)
        with annotate("TP"):
            attended, *low = self.self_attn(for_attention, tables)
            transformed, *low_too = self.mlp(for_mlp)
            both = attended + transformed
        return self.mlp.finish((self.self_attn.finish((both, *low)), *low_too))

    def _normed(self, x: Tensor, name: str | None) -> Tensor:
        return x if name is None else self.get_submodule(name)(x)

    def _dropped(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.shape.dropout, self.training) if self.shape.dropout else x
        return x if self.shape.residual_scale == 1.0 else x * self.shape.residual_scale
