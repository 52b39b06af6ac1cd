"""A small annotated decoder with all that can go wrong: tied weights, dropout, buffers, in-place adds.

`crossing` lets every layer take tensors from several stages before, and the embedding's weight; `frozen`
layers, and what is below them, are not trained; attention is annotated with `core`. Capture refuses layers
that change their input (`in_place`).
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.annotation import annotate

VOCABULARY, HIDDEN, HEADS, SEQ = 32, 24, 2, 12


class Block(nn.Module):
    def __init__(self, dropout: float, *, in_place: bool, shifted: bool, core: bool) -> None:
        super().__init__()
        self.in_place, self.shifted, self.core = in_place, shifted, core
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        if shifted:
            self.shift = nn.Parameter(torch.zeros(HIDDEN))
        self.drop = nn.Dropout(dropout)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, HIDDEN), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        if self.in_place and self.shifted:
            x += self.shift
        elif self.shifted:
            x = x + self.shift
        q, k, v = (
            part.view(batch, seq, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        with annotate("CP") if self.core else nullcontext():
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, seq, HIDDEN)))
        return x + self.drop(self.down(F.silu(self.up(self.norm2(x) * self.gain))))


class Toy(nn.Module):
    def __init__(
        self,
        *,
        layers: int = 4,
        tied: bool = False,
        dropout: float = 0.0,
        crossing: bool = False,
        frozen: int = 0,
        in_place: bool = True,
        shifted: bool = True,
        core: bool = False,
    ) -> None:
        super().__init__()
        self.crossing = crossing
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Parameter(torch.zeros(SEQ, HIDDEN))
        self.layers = nn.ModuleList(
            Block(dropout, in_place=in_place, shifted=shifted, core=core) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        below = [self.position, *self.embed.parameters(), *self.layers[:frozen].parameters()]
        for parameter in below if frozen else []:
            parameter.requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.embed(tokens) + self.position
        known = [x]
        for layer in self.layers:
            with annotate("PP"), annotate("LAYER"):
                x = layer(x)
                if self.crossing:
                    x = x + known[max(0, len(known) - 3)] * torch.tanh(
                        known[0] @ self.embed.weight.mean(0)
                    ).unsqueeze(-1)
            known.append(x)
        with annotate("PP"):
            logits = self.head(self.norm(x)).float()
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def toy(**options: object) -> partial[Toy]:
    """Return a factory of a toy model."""
    return partial(Toy, **options)


def crossing() -> Toy:
    """Return a tied toy whose layers take tensors from several stages before, for capture."""
    return Toy(crossing=True, tied=True, in_place=False)


def frozen() -> Toy:
    """Return a toy whose first two layers are not trained, for capture."""
    return Toy(frozen=2, dropout=0.1, in_place=False)


def plain() -> Toy:
    """Return a toy of eight units with dropout, whose layers begin with their norms."""
    return Toy(layers=6, dropout=0.1, shifted=False)


def plain_crossing() -> Toy:
    """Return a `crossing` whose layers begin with their norms."""
    return Toy(crossing=True, tied=True, shifted=False)


def dropped() -> Toy:
    """Return a toy with dropout whose attention cores are annotated, for capture."""
    return Toy(dropout=0.1, core=True, in_place=False)
