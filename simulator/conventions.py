"""Conventions for model FLOPs: what one token of training is said to cost, whatever the devices execute.

Published MFU and TFLOP/s follow one of these. N: active parameters; T: tokens of a sequence; L, H, Q: layers,
heads, features per head. All counts are of forward and backward, 1 multiply-add = 2 FLOPs, so that a weight
costs 6 per token and a score with its value 3 x 2 x (width of the key + width of the value).

[Note: HFU by convention]
HFU adds the FLOPs of recomputation as executed, with whole score matrices where the convention counts them
whole. `narayanan` counts one forward more in the model FLOPs already; there HFU is MFU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.errors import PlanError
from simulator.plan.plan import LayerFacts, ModelFacts

DEFAULT = "palm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """How to count.

    Args:
        per_token: (model, seq_len) -> FLOPs of one token.
        whole_scores: attention counts the scores of later tokens too.
        with_recompute: a recomputed forward is part of the model FLOPs.
        source: where it is defined.
    """

    per_token: Callable[[ModelFacts, int], int]
    whole_scores: bool
    with_recompute: bool = False
    source: str


def model_flops_per_token(model: ModelFacts, *, seq_len: int, convention: str = DEFAULT) -> int:
    """Return the training FLOPs of one token; raises PlanError where too little is known of the model."""
    return CONVENTIONS[convention].per_token(model, seq_len)


def _palm(model: ModelFacts, seq_len: int) -> int:
    """Return 6 N + 12 L H Q T."""
    return 6 * model.n_active_parameters + _attention(model, seq_len, causal=False)


def _causal(model: ModelFacts, seq_len: int) -> int:
    """Return 6 N + 6 L H Q T, less where a layer sees a window only."""
    return 6 * model.n_active_parameters + _attention(model, seq_len, causal=True)


def _torchtitan(model: ModelFacts, seq_len: int) -> int:
    """Return 6 (N - embedding) + 12 L H Q T."""
    return _palm(model, seq_len) - 6 * _known(model, "torchtitan").embedding_parameters


def _six_n(model: ModelFacts, seq_len: int) -> int:
    return 6 * (model.n_active_parameters - _known(model, "6n").embedding_parameters)


def _nemo(model: ModelFacts, seq_len: int) -> int:
    """Return 6 x (matrices that a token meets) + 12 L H Q T."""
    return 6 * _weights(_known(model, "nemo")) + _attention(model, seq_len, causal=False)


def _megatron(model: ModelFacts, seq_len: int) -> int:
    """Return 6 x (matrices that a token meets) + 6 L H Q T, less in layers with a window."""
    return 6 * _weights(_known(model, "megatron")) + _attention(model, seq_len, causal=True)


def _narayanan(model: ModelFacts, seq_len: int) -> int:
    """Return 96 s l h^2 (1 + s / 6h + V / 16lh) per token for a GPT: layers four times, the head three."""
    layers = _nemo(_known(model, "narayanan"), seq_len) - 6 * model.head_weights
    return layers * 4 // 3 + 6 * model.head_weights


def _weights(model: ModelFacts) -> int:
    of_layers = sum(
        layer.count * (layer.attention_weights + layer.ffn_weights) for layer in model.layer_facts
    )
    return of_layers + model.head_weights


def _attention(model: ModelFacts, seq_len: int, *, causal: bool) -> int:
    """Return 3 x 2 x (key + value width) x heads x (tokens seen) of all layers; causal: the mean of them."""
    if not model.layer_facts:
        whole = 12 * model.layers * model.heads * model.head_dim * seq_len
        return whole // 2 if causal else whole
    total = 0.0
    for layer in model.layer_facts:
        widths = layer.heads * (layer.score_dim + layer.value_dim)
        total += layer.count * 6 * widths * (_mean_seen(layer, seq_len) if causal else seq_len)
    return round(total)


def _mean_seen(layer: LayerFacts, seq_len: int) -> float:
    """Return how many tokens a query sees on average; T / 2 without a window, as all conventions have it."""
    window = layer.window
    if window == 0 or window >= seq_len:
        return seq_len / 2
    return window - window * (window - 1) / (2 * seq_len)


def _known(model: ModelFacts, convention: str) -> ModelFacts:
    if not model.layer_facts:
        raise PlanError(
            where=model.name,
            field="mfu_convention",
            value=convention,
            rule="needs the shape of every layer, which only a config.json gives",
            fix="use palm or causal for a model from a factory",
        )
    return model


CONVENTIONS: dict[str, Convention] = {
    "palm": Convention(
        per_token=_palm,
        whole_scores=True,
        source="Chowdhery et al. 2022, arXiv 2204.02311, appendix B; llm-foundry",
    ),
    "causal": Convention(
        per_token=_causal,
        whole_scores=False,
        source="palm, with the half of the scores that causal attention has",
    ),
    "megatron": Convention(
        per_token=_megatron,
        whole_scores=False,
        source="Megatron-LM and Megatron-Bridge, num_floating_point_operations: matrices of attention, "
        "active and shared experts, multi-token prediction and logits; no router, embedding or norm",
    ),
    "nemo": Convention(
        per_token=_nemo,
        whole_scores=True,
        source="NVIDIA dgxc-benchmarking, nemotron/README.md (notes); for a GPT it is 72 B L s h^2 (1 + s/6h "
        "+ V/12hL) of Korthikanti et al. 2022, arXiv 2205.05198, equation 7",
    ),
    "narayanan": Convention(
        per_token=_narayanan,
        whole_scores=True,
        with_recompute=True,
        source="Narayanan et al. 2021, arXiv 2104.04473, equation 3: one forward of all layers more",
    ),
    "torchtitan": Convention(
        per_token=_torchtitan,
        whole_scores=True,
        source="pytorch/torchtitan, models/utils: palm without the embedding",
    ),
    "6n": Convention(
        per_token=_six_n,
        whole_scores=True,
        source="Kaplan et al. 2020, arXiv 2001.08361, section 2.1: no attention, no embedding",
    ),
}
"""Name -> convention; `mfu_convention` of a result is one of these."""
