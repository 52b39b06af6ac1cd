"""Multi-head latent attention as it is trained: keys and values are projected up for every head.

[Note: latent attention under tensor parallelism]
The compressed queries, keys and values and their norms are small and whole on every rank, outside of the
"TP" scope; inside it the projections up are cut over heads, and the output projection over its inputs.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from piper.capture.mixing import Extras, Mixing
from piper.models import shape as shapes
from piper.models.norms import Norm
from piper.models.positions import rotate
from piper.models.projections import Linear, by_inputs, by_outputs, compressed, expanded
from piper.models.token_mixing import mix_tokens


class LatentAttention(nn.Module):
    """The attention that a `shape.LatentAttention` describes."""

    def __init__(self, shape: shapes.LatentAttention, hidden: int, *, lengths: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shape = shape
        self.lengths = lengths
        query = shape.heads * (shape.nope_dim + shape.rope_dim)
        if shape.query_rank is None:
            self.q_proj = Linear(hidden, query, bias=False)
        else:
            self.q_a_proj = Linear(hidden, shape.query_rank, bias=shape.bias)
            self.q_a_layernorm = Norm(shape.norm, shape.query_rank)
            self.q_b_proj = Linear(shape.query_rank, query, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, shape.kv_rank + shape.rope_dim, bias=shape.bias)
        self.kv_a_layernorm = Norm(shape.norm, shape.kv_rank)
        self.kv_b_proj = Linear(shape.kv_rank, shape.heads * (shape.nope_dim + shape.value_dim), bias=False)
        self.o_proj = Linear(shape.heads * shape.value_dim, hidden, bias=shape.bias)

    def prepare(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what `forward` takes, made outside of the scope that tensor parallelism cuts."""
        shape = self.shape
        query = x if shape.query_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        latent, key_rope = torch.split(self.kv_a_proj_with_mqa(x), [shape.kv_rank, shape.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        lows = (*compressed(query, self._query_up), *compressed(latent, self.kv_b_proj))
        return query, latent, key_rope, *lows

    def finish(self, made: tuple[Tensor, ...]) -> Tensor:
        """Return [microbatch, seq, hidden], outside of that scope."""
        return expanded(self.o_proj, made)

    @property
    def _query_up(self) -> nn.Linear:
        return self.q_proj if self.shape.query_rank is None else self.q_b_proj

    def forward(self, prepared: tuple[Tensor, ...], tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what `finish` takes.

        Args:
            prepared: queries [microbatch, seq, query_rank] or the layer's input; keys and values [microbatch,
                seq, kv_rank]; the part of the keys that is rotated [microbatch, seq, rope_dim]; and what
                adapters need.
            tables: cosine and sine.
        """
        query, latent, key_rope, *lows = prepared
        shape, seq = self.shape, query.shape[1]
        cos, sin = (table[:seq, None, :] for table in tables)
        query = by_outputs(self._query_up, query, lows)
        query = torch.unflatten(query, -1, (-1, shape.nope_dim + shape.rope_dim))
        query_nope, query_rope = torch.split(query, [shape.nope_dim, shape.rope_dim], dim=-1)
        key_value = by_outputs(self.kv_b_proj, latent, lows)
        key_value = torch.unflatten(key_value, -1, (-1, shape.nope_dim + shape.value_dim))
        key_nope, value = torch.split(key_value, [shape.nope_dim, shape.value_dim], dim=-1)
        interleaved = shape.rotary.interleaved
        query_rope = rotate(query_rope, cos, sin, interleaved=interleaved)
        key_rope = rotate(key_rope.unsqueeze(2), cos, sin, interleaved=interleaved)
        heads = key_nope.shape[2]
        mixed = mix_tokens(
            torch.cat((query_nope, query_rope), -1),
            torch.cat((key_nope, key_rope.expand(-1, -1, heads, -1)), -1),
            value,
            Mixing(
                scale=shape.scale,
                dropout=shape.dropout if self.training else 0.0,
                lengths=self.lengths,
            ),
            Extras(),
        )
        return by_inputs(self.o_proj, mixed.flatten(2))
