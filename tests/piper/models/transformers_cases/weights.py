"""Weights of `transformers` -> ours: cut, joined, turned or put in another order."""

import torch
from torch import Tensor

from tests.piper.models.transformers_cases.case import HEAD_DIM, HEADS, Weights


def by_kv_head(weights: Weights, *, order: str) -> Weights:
    """Reorder fused projections into ours: for each key head its queries, its key, its value.

    Args:
        weights: with "qkv_proj".
        order: "parts": all queries, all keys, all values; "heads": head by head, with one key head for each.
    """
    return {
        name: _by_kv_head(value, order=order) if "qkv_proj" in name else value
        for name, value in weights.items()
    }


def _by_kv_head(value: Tensor, *, order: str) -> Tensor:
    if order == "heads":
        return value
    rest = value.shape[1:]
    kv_heads = (value.shape[0] // HEAD_DIM - HEADS) // 2
    query, key, value = value.split((HEADS * HEAD_DIM, kv_heads * HEAD_DIM, kv_heads * HEAD_DIM))
    parts = (part.view(kv_heads, -1, HEAD_DIM, *rest) for part in (query, key, value))
    return torch.cat([*parts], 1).flatten(0, 2)


def transposed(weights: Weights) -> Weights:
    """Return matrices of linear layers stored as [in, out] the other way round."""
    return {
        name: value.t() if value.dim() > 1 and "_proj" in name else value for name, value in weights.items()
    }


def split_experts(weights: Weights) -> Weights:
    """Cut stacked gates and up projections, [experts, 2 width, hidden], into two."""
    made: Weights = {}
    for name, value in weights.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            made[f"{prefix}w1"], made[f"{prefix}w3"] = value.chunk(2, 1)
        else:
            made[name.replace("experts.down_proj", "experts.w2")] = value
    return made


def gpt_oss_experts(weights: Weights) -> Weights:
    """Turn [experts, in, out] with gates and ups in turn into ours, gates before ups."""
    made: Weights = {}
    for name, value in weights.items():
        if "experts.gate_up_proj" in name:
            by_row = value if name.endswith("bias") else value.transpose(1, 2)
            new = name.replace("gate_up_proj", "w13")
            made[new] = torch.cat((by_row[:, 0::2], by_row[:, 1::2]), 1)
        elif "experts.down_proj" in name:
            new = name.replace("down_proj", "w2")
            made[new] = value if name.endswith("bias") else value.transpose(1, 2)
        else:
            made[name] = value
    return made


def stacked_norms(weights: Weights) -> Weights:
    """Stack a norm for each head into one weight, [heads, head_dim]."""
    made: Weights = {}
    for name, value in weights.items():
        owner, found, _ = name.partition(".norms.")
        if not found:
            made[name] = value
        elif f"{owner}.weight" not in made:
            count = sum(other.startswith(f"{owner}.norms.") for other in weights)
            rows = [weights[f"{owner}.norms.{head}.weight"] for head in range(count)]
            made[f"{owner}.weight"] = torch.stack(rows)
    return made


def shifted_positions(weights: Weights) -> Weights:
    """Put the two rows that OPT never reads behind those that it reads."""
    return {
        name: value.roll(-2, 0) if "embed_positions" in name else value for name, value in weights.items()
    }
