"""What a config may state beside the keys of its family: adapters, frozen parts, packing, padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from piper.models.fields import Fields
from piper.models.reading.adapters import read_adapters
from piper.models.shape import DecoderShape

ADAPTERS = "adapter_config"
"""An object as in the `adapter_config.json` of `peft`."""

FROZEN = "frozen"
"""A list: how the names of parameters begin that are not trained."""

SEGMENTS = "segment_lengths"
"""A list: tokens of each document that is packed into a sequence."""

PADDING = "pad_vocab_size_multiple"
"""The vocabulary is padded to a multiple of it (Megatron: 128 times the tp degree)."""

OWN_KEYS = (ADAPTERS, FROZEN, SEGMENTS, PADDING)

FIRST_NAMES = (
    "model.embed_tokens", "model.embed_positions", "model.embed_norm", "model.layers", "model.norm",
    "model.predictions", "lm_head",
)  # fmt: skip


def with_own_keys(shape: DecoderShape, config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Return the shape with what the config says beside its family's keys; raises ModelError."""
    read = Fields(config, where=where)
    stated = read.inner(ADAPTERS)
    adapters = None if stated is None else read_adapters(stated, shape)
    found = replace(
        shape, adapters=adapters, frozen=_frozen(read), segment_lengths=_segments(read),
        assumed=tuple(dict.fromkeys((*shape.assumed, *read.assumed))),
    )  # fmt: skip
    return found.padded(read.count(PADDING)) if read.has(PADDING) else found


def _segments(read: Fields) -> tuple[int, ...]:
    lengths = read.whole_numbers(SEGMENTS)
    read.require(
        all(lengths), SEGMENTS, value=list(lengths), rule="must be lengths of at least 1",
        fix="give the tokens of each document; they sum to the sequence length",
    )  # fmt: skip
    return lengths


def _frozen(read: Fields) -> tuple[str, ...]:
    names = read.raw(FROZEN)
    if names is None:
        return ()
    read.require(
        isinstance(names, list) and all(isinstance(name, str) for name in names), FROZEN, value=names,
        rule="must be a list of names of parameters", fix='write for example ["model.embed_tokens"]',
    )  # fmt: skip
    for name in names:
        read.require(
            name.startswith(FIRST_NAMES), FROZEN, value=name, rule="begins no parameter's name",
            fix=f"names begin with {', '.join(FIRST_NAMES)} (layers: model.layers.0. and so on)",
        )  # fmt: skip
    return tuple(names)
