"""A decoder's shape in words and numbers: layers that are equal are told once, parameters by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any

from piper.models.shape import DecoderShape, Layer, SparseMoE


def shapes_of(shape: DecoderShape) -> dict[str, Any]:
    """Return the parts of a decoder as JSON values; what has its default is left out.

    Layers are told in runs of equal ones: "0-2", "3-60"; where kinds take turns, once for each kind with the
    numbers of its layers.
    """
    parts: dict[str, Any] = {
        "hidden": shape.hidden,
        "vocabulary": shape.vocabulary,
        "context_length": shape.context_length,
        "embedding": _stated(shape.embedding),
        "layers": [
            {"numbers": _runs(numbers), "count": len(numbers), **_stated(layer)}
            for layer, numbers in _kinds(shape.layers).items()
        ],
        "final_norm": None if shape.final_norm is None else _stated(shape.final_norm),
        "head": _stated(shape.head),
    }
    if shape.prediction_depth:
        parts["prediction_depth"] = shape.prediction_depth
    if shape.adapters is not None:
        parts["adapter_config"] = {
            "r": shape.adapters.rank,
            "lora_alpha": shape.adapters.alpha,
            "lora_dropout": shape.adapters.dropout,
            "target_modules": list(shape.adapters.targets),
        }
    for name in ("frozen", "segment_lengths"):
        if getattr(shape, name):
            parts[name] = list(getattr(shape, name))
    return parts


def parameters_by_part(shape: DecoderShape) -> dict[str, int]:
    """Return the exact numbers of parameters of each kind of part; they sum to `n_parameters`."""
    hidden = shape.hidden
    parts = dict.fromkeys(("embedding", "attention", "feed_forward", "experts", "router", "norms", "head"), 0)
    parts["embedding"] = (shape.vocabulary + (shape.embedding.positions or 0)) * hidden
    parts["head"] = shape.vocabulary * (hidden * (not shape.head.tied) + shape.head.bias)
    around = (shape.embedding.norm, shape.final_norm)
    parts["norms"] = sum(norm.n_parameters(hidden) for norm in around if norm is not None)
    for layer, numbers in _kinds(shape.layers).items():
        for name, count in _of_layer(layer, hidden).items():
            parts[name] += len(numbers) * count
    parts["prediction"] = shape.n_parameters - sum(parts.values())
    return {name: count for name, count in parts.items() if count}


def _of_layer(layer: Layer, hidden: int) -> Mapping[str, int]:
    part = layer.feed_forward
    norms = layer.norms * layer.norm.n_parameters(hidden)
    found = {"attention": layer.attention.n_parameters(hidden), "norms": norms}
    if not isinstance(part, SparseMoE):
        return found | {"feed_forward": part.n_parameters(hidden)}
    experts = part.router.experts * part.expert.n_parameters(hidden)
    router = part.router.n_parameters(hidden)
    return found | {
        "experts": experts,
        "router": router,
        "feed_forward": part.n_parameters(hidden) - experts - router,
    }


def _kinds(layers: Sequence[Layer]) -> dict[Layer, list[int]]:
    found: dict[Layer, list[int]] = {}
    for number, layer in enumerate(layers):
        found.setdefault(layer, []).append(number)
    return found


def _runs(numbers: Sequence[int]) -> str:
    """Write 0, 1, 2, 5 as "0-2, 5"."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs)


def _stated(part: Any) -> dict[str, Any]:
    """Return the fields of a part that differ from their default, and which kind it is."""
    found: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if value == field.default and field.name != "kind":
            continue
        if is_dataclass(value) and not isinstance(value, type):
            kind = {"kind": type(value).__name__} if field.name in ("attention", "feed_forward") else {}
            value = {**kind, **_stated(value)}
        found[field.name] = list(value) if isinstance(value, tuple) else value
    return found
