"""Attention over a sequence that is cut over ranks: keys and values go round, a piece at a time.

[Note: ring attention]
Each rank computes its queries against the keys and values that it has, while it passes them on; softmax is
put together from the pieces by their largest scores and sums (Liu et al. 2023, arXiv 2310.01889). Backward,
the pieces go round again, and behind each of them the sum of its gradients, which arrives where the piece
came from. A piece that no query of a rank may see is passed on only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from piper.errors import RunFailedError

_LOOK_S = 0.2
"""How often what waits for a piece looks whether it should give up."""


@dataclass(slots=True, kw_only=True)
class Ring:
    """What the compute stream gives to the task that shifts, and gets from it.

    Args:
        place: of this rank in the ring.
        positions: tokens of every rank, in the order of the ring, [tokens] int64 each.
        stopped: says whether another stream of this rank failed.
    """

    place: int
    positions: Sequence[Tensor]
    stopped: Callable[[], bool]
    _leaving: Queue[Tensor | None] = field(default_factory=Queue)
    _arriving: Queue[Tensor] = field(default_factory=Queue)

    def offer(self, tensor: Tensor) -> None:
        """Let a tensor go to the next rank."""
        self._leaving.put(tensor)

    def take(self) -> Tensor:
        """Return what the rank before offered."""
        arrived: Tensor = self._wait(self._arriving)
        return arrived

    def next_leaving(self) -> Tensor | None:
        """Return what is offered next, or None where nothing will be."""
        leaving: Tensor | None = self._wait(self._leaving)
        return leaving

    def arrived(self, tensor: Tensor) -> None:
        """Give what came from the rank before."""
        self._arriving.put(tensor)

    def close(self) -> None:
        """Say that nothing more is offered."""
        self._leaving.put(None)

    def _wait(self, queue: Queue[Any]) -> Any:
        while True:
            try:
                return queue.get(timeout=_LOOK_S)
            except Empty:
                if self.stopped():
                    raise RunFailedError("another stream of this rank failed") from None


class RingFacts(NamedTuple):
    """How scores are made: only of tokens before the query; times what."""

    causal: bool
    scale: float


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, *, rings: Callable[[bool], Ring], facts: RingFacts
) -> Tensor:
    """Return [microbatch, heads, tokens, value_dim] for the queries of this rank.

    Args:
        query: [microbatch, heads, tokens, head_dim].
        key, value: [microbatch, kv_heads, tokens, ...] of the same tokens; kv_heads divides heads.
        rings: the ring of the forward (False), or of the backward (True).
        facts: how scores are made.
    """
    mixed: Tensor = _RingAttention.apply(query, key, value, rings, facts)  # type: ignore[no-untyped-call]
    return mixed


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, rings: Callable[[bool], Ring], facts: RingFacts
    ) -> Tensor:
        ring, grouped = rings(False), _grouped(query, key)
        ranks = len(ring.positions)
        shape = (*grouped.shape[:-1], 1)
        largest = torch.full(shape, float("-inf"))
        total, mixed = torch.zeros(shape), torch.zeros(*grouped.shape[:-1], value.shape[-1])
        piece = _Piece(key, value)
        for turn in range(ranks):
            if turn < ranks - 1:
                ring.offer(piece.packed())
            scores = _scores(grouped, piece.key, ring, turn=turn, facts=facts)
            if scores is not None:
                before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
                weights = torch.exp(scores - largest)
                shrunk = torch.exp(before - largest)
                total = total * shrunk + weights.sum(-1, keepdim=True)
                mixed = mixed * shrunk + weights @ piece.value.float().unsqueeze(2)
            if turn < ranks - 1:
                piece = piece.like(ring.take())
        result = (mixed / total).to(query.dtype).flatten(1, 2)
        # Token by token in memory: whoever joins the heads of a token needs no copy, which B would keep.
        result = result.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, result, (largest + total.log()).flatten(1, 2).squeeze(-1))
        ctx.rings, ctx.facts = rings, facts
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with _disable_current_modes():  # one operation of the backward, whoever watches it
            found = _backward(ctx, gradients[0])
        return *found, None, None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, result, normaliser = ctx.saved_tensors
    ring, grouped = ctx.rings(True), _grouped(query, key)
    ranks = len(ring.positions)
    of_result = _grouped(gradient, key)
    normaliser = _grouped(normaliser.unsqueeze(-1), key)
    inner = (of_result * _grouped(result, key)).sum(-1, keepdim=True)
    piece, own = _Piece(key, value), _Piece(torch.zeros_like(key).float(), torch.zeros_like(value).float())
    of_query, sums = torch.zeros_like(grouped), own
    for turn in range(ranks):
        if turn > 0:
            ring.offer(piece.packed())
            piece = piece.like(ring.take())
            sums = own.zeros() if turn == 1 else sums
        scores = _scores(grouped, piece.key, ring, turn=turn, facts=ctx.facts)
        if scores is not None:
            weights = torch.exp(scores - normaliser)
            of_value = (weights.transpose(-1, -2) @ of_result).sum(2)
            of_weights = of_result @ piece.value.float().unsqueeze(2).transpose(-1, -2)
            of_scores = weights * (of_weights - inner) * ctx.facts.scale
            of_query += of_scores @ piece.key.float().unsqueeze(2)
            sums.key += (of_scores.transpose(-1, -2) @ grouped).sum(2)
            sums.value += of_value
        if turn > 0:
            ring.offer(sums.packed())
            sums = own.like(ring.take())
    if ranks > 1:
        own.key += sums.key
        own.value += sums.value
    return (of_query.flatten(1, 2).to(query.dtype), own.key.to(key.dtype), own.value.to(value.dtype))


@dataclass(slots=True)
class _Piece:
    """Keys and values of one rank, or their gradients, that travel as one message."""

    key: Tensor
    value: Tensor

    def packed(self) -> Tensor:
        """Return both in one row."""
        return torch.cat([self.key.reshape(-1), self.value.reshape(-1)])

    def like(self, packed: Tensor) -> _Piece:
        """Return what another rank packed."""
        key, value = torch.split(packed, [self.key.numel(), self.value.numel()])
        return _Piece(key.view(self.key.shape), value.view(self.value.shape))

    def zeros(self) -> _Piece:
        """Return zeros in the same shapes."""
        return _Piece(torch.zeros_like(self.key), torch.zeros_like(self.value))


def _grouped(heads: Tensor, key: Tensor) -> Tensor:
    """Return [microbatch, kv_heads, heads of a group, ...] fp32."""
    return torch.unflatten(heads.float(), 1, (key.shape[1], -1))


def _scores(grouped: Tensor, key: Tensor, ring: Ring, *, turn: int, facts: RingFacts) -> Tensor | None:
    """Return the scores of a piece, [microbatch, kv_heads, group, queries, keys], or None: none is seen."""
    ranks = len(ring.positions)
    queries, keys = ring.positions[ring.place], ring.positions[(ring.place - turn) % ranks]
    if facts.causal and bool(queries.max() < keys.min()):
        return None
    scores = grouped @ key.float().unsqueeze(2).transpose(-1, -2) * facts.scale
    if facts.causal:
        scores = scores.masked_fill(queries.unsqueeze(1) < keys.unsqueeze(0), float("-inf"))
    return scores
