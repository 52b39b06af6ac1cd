"""`mix_tokens`: the one place where the tokens of a sequence see each other.

[Note: how tokens are mixed]
Plain causal attention is one call of `F.scaled_dot_product_attention`. A window or linear biases are a mask
of that call, which torch's flash kernel does not take, so that its memory-efficient or unfused one runs. A
softcap and sinks exist in no kernel of torch: the scores are made here, one after the other step. Kernels
that do all of it at once (FlashAttention 2 and later: windows, biases, softcap) are put in place of `mix` by
`piper.capture.mixing`. Documents that are packed into one sequence are attended one by one, or as one batch
if they are of one length; kernels for sequences of unlike lengths do the same work in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from piper.annotation import annotate
from piper.capture.mixing import Extras, Mixing, mixed_by_kernel


def mix_tokens(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mixing: Mixing, extras: Extras
) -> Tensor:
    """Return for each query the mean of the values before it, weighted by the softmax of its scores.

    Args:
        query: [microbatch, seq, heads, head_dim].
        key, value: [microbatch, seq, kv_heads, head_dim or value_dim]; kv_heads divides heads.
        mixing, extras: what else decides the scores.

    Returns: [microbatch, seq, heads, value_dim].
    """
    with annotate("CP"):
        if not mixing.lengths:
            mixed = _heads_first((query, key, value), mixing, extras)
        elif len(set(mixing.lengths)) == 1:
            pieces = [
                torch.unflatten(part, 1, (-1, mixing.lengths[0])).flatten(0, 1)
                for part in (query, key, value)
            ]
            mixed = _heads_first(pieces, mixing, extras)
            return torch.unflatten(mixed.transpose(1, 2), 0, (query.shape[0], -1)).flatten(1, 2)
        else:
            lengths = [*mixing.lengths]
            documents = zip(*(torch.split(part, lengths, dim=1) for part in (query, key, value)), strict=True)
            return torch.cat(
                [_heads_first(parts, mixing, extras).transpose(1, 2) for parts in documents], dim=1
            )
    return mixed.transpose(1, 2)


def _heads_first(parts: Sequence[Tensor], mixing: Mixing, extras: Extras) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in parts)
    mixed = mixed_by_kernel(query, key, value, mixing, extras)
    return mix(query, key, value, mixing, extras) if mixed is None else mixed


def mix(query: Tensor, key: Tensor, value: Tensor, mixing: Mixing, extras: Extras) -> Tensor:  # noqa: PLR0917
    """Mix tokens as torch can, [microbatch, heads, seq, head_dim] of all three."""
    grouped = query.shape[1] != key.shape[1]
    if mixing.softcap is not None or extras.sinks is not None:
        return _mix_in_steps(query, key, value, mixing, extras)
    masked = extras.slopes is not None or _cuts(mixing.window, query.shape[2])
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_bias(query, mixing, extras) if masked else None,
        dropout_p=mixing.dropout,
        is_causal=not masked,
        scale=mixing.scale,
        enable_gqa=grouped,
    )


def _mix_in_steps(  # noqa: PLR0917
    query: Tensor, key: Tensor, value: Tensor, mixing: Mixing, extras: Extras
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = query.shape[-1] ** -0.5 if mixing.scale is None else mixing.scale
    scores = query @ key.transpose(2, 3) * scale
    if mixing.softcap is not None:
        scores = torch.tanh(scores / mixing.softcap) * mixing.softcap
    scores = scores + _bias(query, mixing, extras)
    if extras.sinks is not None:
        sinks = extras.sinks.view(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], 1)
        probabilities = F.softmax(torch.cat((scores, sinks), -1), -1, dtype=torch.float32)[..., :-1]
    else:
        probabilities = F.softmax(scores, -1, dtype=torch.float32)
    probabilities = probabilities.to(value.dtype)
    if mixing.dropout:
        probabilities = F.dropout(probabilities, mixing.dropout)
    return probabilities @ value


def _bias(query: Tensor, mixing: Mixing, extras: Extras) -> Tensor:
    """Return what is added to the scores, [seq, seq] or with slopes [1, heads, seq, seq]."""
    length = query.shape[2]
    at = torch.arange(length, device=query.device)
    distance = at.unsqueeze(1) - at
    hidden = distance < 0
    if mixing.window is not None and mixing.window < length:
        hidden = hidden | (distance >= mixing.window)
    if extras.slopes is None:
        return torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, float("-inf"))
    return (extras.slopes.view(1, -1, 1, 1) * -distance).to(query.dtype).masked_fill(hidden, float("-inf"))


def _cuts(window: int | None, length: int) -> bool:
    return window is not None and window < length
