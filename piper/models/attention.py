"""Causal self-attention with grouped keys and values (Ainslie et al. 2023, arXiv 2305.13245)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from piper.capture.mixing import Extras, Mixing
from piper.models import shape as shapes
from piper.models.norms import Norm
from piper.models.positions import rotate
from piper.models.projections import Linear, by_inputs, by_outputs, compressed, expanded
from piper.models.token_mixing import mix_tokens


class Attention(nn.Module):
    """The attention that a `shape.Attention` describes.

    A fused projection holds for each key head its queries, its key and its value, one after the other
    (Megatron's order), so that tensor parallelism may cut its rows.
    """

    def __init__(self, shape: shapes.Attention, hidden: int, *, lengths: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape = shape
        self.lengths = lengths
        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        if shape.fused_qkv:
            self.qkv_proj = Linear(hidden, query + 2 * key_value, bias=shape.qkv_bias)
        else:
            self.q_proj = Linear(hidden, query, bias=shape.qkv_bias)
            self.k_proj = Linear(hidden, key_value, bias=shape.qkv_bias)
            self.v_proj = Linear(hidden, key_value, bias=shape.qkv_bias)
        self.o_proj = Linear(query, hidden, bias=shape.out_bias)
        if shape.qk_norm is not None:
            whole, each = shape.qk_norm_over == "all", shape.qk_norm_over == "each"
            widths = (query, key_value) if whole else (shape.head_dim, shape.head_dim)
            self.q_norm = Norm(shape.qk_norm, widths[0], heads=shape.heads if each else 0)
            self.k_norm = Norm(shape.qk_norm, widths[1], heads=shape.kv_heads if each else 0)
        if shape.sinks:
            self.sinks = nn.Parameter(torch.empty(shape.heads))

    def prepare(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what `forward` takes, made outside of the scope that tensor parallelism cuts."""
        return x, *compressed(x, *self._projections)

    def finish(self, made: tuple[Tensor, ...]) -> Tensor:
        """Return [microbatch, seq, hidden], outside of that scope."""
        return expanded(self.o_proj, made)

    def forward(self, prepared: tuple[Tensor, ...], tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what `finish` takes.

        Args:
            prepared: by `prepare` from [microbatch, seq, hidden].
            tables: cosine and sine, the slopes of the heads, or nothing.
        """
        shape, seq = self.shape, prepared[0].shape[1]
        query, key, value = self._projected(*prepared)
        if shape.qk_norm is not None:
            query, key = self._normed(query, self.q_norm), self._normed(key, self.k_norm)
        if shape.rotary is not None:
            between = (None,) * (query.dim() - 3)
            cos, sin = (table[(slice(seq), *between)] for table in tables)
            query, key = (
                rotate(part, cos, sin, interleaved=shape.rotary.interleaved) for part in (query, key)
            )
        if shape.fused_qkv:
            query, key, value = query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)
        mixed = mix_tokens(
            query,
            key,
            value,
            Mixing(
                scale=shape.scale,
                window=shape.window,
                softcap=shape.softcap,
                dropout=shape.dropout if self.training else 0.0,
                lengths=self.lengths,
            ),
            Extras(
                slopes=tables[0] if shape.alibi else None,
                sinks=self.sinks if shape.sinks else None,
            ),
        )
        return by_inputs(self.o_proj, mixed.flatten(2))

    @property
    def _projections(self) -> tuple[nn.Linear, ...]:
        return (self.qkv_proj,) if self.shape.fused_qkv else (self.q_proj, self.k_proj, self.v_proj)

    def _projected(self, x: Tensor, *lows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [microbatch, seq, heads, head_dim].

        Fused ones: [microbatch, seq, kv_heads, heads of a group, head_dim].
        """
        shape, left = self.shape, [*lows]
        if shape.fused_qkv:
            group = shape.heads // shape.kv_heads
            fused = self._clipped(by_outputs(self.qkv_proj, x, left))
            fused = torch.unflatten(fused, -1, (-1, group + 2, shape.head_dim))
            query, key, value = torch.split(fused, [group, 1, 1], dim=-2)
            return query, key, value
        query, key, value = (
            torch.unflatten(self._clipped(by_outputs(projection, x, left)), -1, (-1, shape.head_dim))
            for projection in self._projections
        )
        return query, key, value

    def _clipped(self, x: Tensor) -> Tensor:
        limit = self.shape.clip_qkv
        return x if limit is None else x.clamp(-limit, limit)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        if self.shape.qk_norm_over != "all":
            normed: Tensor = norm(x.flatten(2, -2) if self.shape.qk_norm_over == "each" else x)
            return normed.view(x.shape)
        whole: Tensor = norm(x.flatten(2))
        return torch.unflatten(whole, -1, x.shape[2:])
