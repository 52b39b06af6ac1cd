"""Shapes of boundary tensors on one rank, on either side of a border. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from piper.errors import JobError
from piper.runtime.borders import Border
from simulator.plan import Plan

Shape = tuple[int, ...]

_SEQUENCE_DIMS = (1, 2)
"""Where tokens stand in [microbatch, seq, ...] and, behind attention, in [microbatch, heads, seq, ...]."""


UNKNOWN_ROWS = 7
"""So many rows more than a rank has does a trace let its experts take: it is the router that says how many,
and numbers in the code that depend on them are found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDim:
    """Where the tokens of a sequence stand in a tensor.

    Args:
        dim: its dimension.
        flat: the microbatch lies in the same dimension, [microbatch * seq, ...].
    """

    dim: int
    flat: bool = False


def token_dim(whole: Shape, *, micro_batch: int, seq_len: int, heads: int = -1) -> TokenDim:
    """Return where the tokens stand in a tensor of this uncut shape; `heads`: a dimension that is not it.

    Raises: JobError for a tensor in which they are not found.
    """
    for dim in _SEQUENCE_DIMS:
        if dim < len(whole) and dim != heads and whole[0] == micro_batch and whole[dim] == seq_len:
            return TokenDim(dim=dim)
    if whole and whole[0] == micro_batch * seq_len:
        return TokenDim(dim=0, flat=True)
    raise JobError(
        where="piper run",
        field="tensor between segments",
        value=f"{list(whole)}",
        rule=f"begins with neither {micro_batch} x {seq_len} nor {micro_batch * seq_len} tokens, so that "
        "they cannot be cut over ranks",
        fix="keep [microbatch, seq, ...] between annotated scopes, or run with tp=1, cp=1",
    )


def heads_dim(whole: Shape, *, micro_batch: int, seq_len: int, inside: Shape | None = None) -> int:
    """Return where the heads stand in a tensor around attention, [microbatch, seq, heads, ...].

    `inside`: the shape of a rank that has whole sequences and cut heads, if it is known.
    """
    if inside is not None:
        cut = [dim for dim, (one, other) in enumerate(zip(whole, inside, strict=True)) if one != other]
        if len(cut) == 1:
            return cut[0]
    tokens = token_dim(whole, micro_batch=micro_batch, seq_len=seq_len).dim
    return 2 if tokens == 1 else 1


def turned(shape: Shape, whole: Shape, border: Border, *, plan: Plan, micro_batch: int) -> Shape:
    """Return the shape of a tensor behind a border that it crosses forward.

    Args:
        shape: of a rank, before the border.
        whole: uncut, of the same microbatch.
        border: which.
        plan: of the job.
        micro_batch: samples of the microbatch.
    """
    region, sizes = border.region, list(shape)
    seq_len, degree = plan.training.seq_len, region.degree
    if region.axis == "ep":
        return (shape[0] + (UNKNOWN_ROWS if border.enters else -UNKNOWN_ROWS), *shape[1:])
    if region.axis == "tp":
        if plan.cuts.sequence_parallel:
            dim = token_dim(whole, micro_batch=micro_batch, seq_len=seq_len).dim
            sizes[dim] = sizes[dim] * degree if border.enters else sizes[dim] // degree
        return tuple(sizes)
    inside = None if border.enters else shape
    heads = heads_dim(whole, micro_batch=micro_batch, seq_len=seq_len, inside=inside)
    tokens = token_dim(whole, micro_batch=micro_batch, seq_len=seq_len, heads=heads).dim
    more, less = (tokens, heads) if border.enters else (heads, tokens)
    if sizes[less] % degree:
        raise JobError(
            where="piper run",
            field="heads" if border.enters else "tokens",
            value=sizes[less],
            rule=f"cannot be cut over {degree} ranks of cp: keys and values of one head are on one rank",
            fix='use "method": "ring" in shard_sequence, or fewer ranks of cp or tp',
        )
    sizes[more] *= degree
    sizes[less] //= degree
    return tuple(sizes)
