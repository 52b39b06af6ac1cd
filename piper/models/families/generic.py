"""Any decoder by its parts: a config whose keys are the fields of `DecoderShape` (docs/models.md).

`piper models MODEL --json` prints them under "shapes", so that a decoder that is none of the families can be
described by changing one that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models.errors import require_positive_int
from piper.errors import ModelError
from piper.models.reading.checks import checked
from piper.models.reading.parts import hints_of, read_part, read_value
from piper.models.reading.trunk import MOST_LAYERS
from piper.models.shape import DecoderShape, Layer

ARCHITECTURE = "PiperDecoder"
OF_THE_FILE = ("architectures", "model_type", "repeat", "layers")
NOT_HERE = ("family", "layers", "adapters", "frozen", "segment_lengths", "assumed", "notices")
"""Fields of the shape that a config states otherwise, or not at all."""


def read(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Read a config; raises ModelError naming the field."""
    hints = hints_of(DecoderShape)
    known = [name for name in hints if name not in NOT_HERE]
    stated = {}
    for name, value in config.items():
        if name in OF_THE_FILE:
            continue
        if name not in known:
            raise ModelError(
                where=where, field=name, value=value, rule=f"is no field of {ARCHITECTURE}",
                fix=f"it has {', '.join([*known, 'layers', 'repeat'])}",
            )  # fmt: skip
        stated[name] = read_value(hints[name], value, where=where, field=name)
    for name in ("hidden", "vocabulary", "context_length", "final_norm", "layers"):
        if name not in config:
            fix = "docs/models.md shows a whole config"
            raise ModelError(where=where, field=name, value=None, rule="is missing", fix=fix)
    shape = DecoderShape(family="generic", layers=_layers(config, where=where), **stated)
    return checked(shape, where=where)


def _layers(config: Mapping[str, Any], *, where: str) -> tuple[Layer, ...]:
    listed = config["layers"]
    if not isinstance(listed, list) or not listed:
        raise ModelError(
            where=where, field="layers", value=listed, rule="must be a list of layers",
            fix='write [{"count": 32, "attention": {...}, "feed_forward": {...}, "norm": {...}}]',
        )  # fmt: skip
    counted: list[Layer] = []
    placed: dict[int, Layer] = {}
    for number, stated in enumerate(listed):
        field = f"layers[{number}]"
        if not isinstance(stated, Mapping):
            raise ModelError(
                where=where, field=field, value=stated, rule="must be an object",
                fix="give attention, feed_forward and norm",
            )  # fmt: skip
        parts = {name: value for name, value in stated.items() if name not in ("count", "numbers")}
        layer = read_part(Layer, parts, where=where, field=field)
        if "numbers" in stated:
            placed |= dict.fromkeys(_numbers(stated["numbers"], where=where, field=f"{field}.numbers"), layer)
        else:
            counted += [layer] * _count(stated.get("count", 1), where=where, field=f"{field}.count")
    if placed and (counted or sorted(placed) != list(range(len(placed)))):
        raise ModelError(
            where=where, field="layers", value=f"{len(placed)} numbers", rule="must number all layers from 0",
            fix="number each layer once, or give counts to all entries",
        )  # fmt: skip
    once = tuple(placed[number] for number in sorted(placed)) or tuple(counted)
    layers = once * _count(config.get("repeat", 1), where=where, field="repeat")
    _count(len(layers), where=where, field="layers")
    return layers


def _count(value: object, *, where: str, field: str) -> int:
    count = require_positive_int(
        value, where=where, field=field, fix="give how many layers these are", error=ModelError
    )
    if count > MOST_LAYERS:
        raise ModelError(
            where=where,
            field=field,
            value=count,
            rule=f"must be at most {MOST_LAYERS}",
            fix="use fewer layers",
        )
    return count


def _numbers(text: object, *, where: str, field: str) -> list[int]:
    """Read "0-2, 5" as 0, 1, 2, 5."""
    found: list[int] = []
    for run in text.split(",") if isinstance(text, str) else [""]:
        first, dash, last = run.strip().partition("-")
        bounds = (first, last if dash else first)
        if not all(bound.isascii() and bound.isdigit() and int(bound) < MOST_LAYERS for bound in bounds):
            raise ModelError(
                where=where, field=field, value=text, rule="must be numbers of layers",
                fix='write for example "0-2, 5"',
            )  # fmt: skip
        found += range(int(bounds[0]), int(bounds[1]) + 1)
    return found
