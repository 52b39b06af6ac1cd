"""From a whole `config.json` to a decoder's shape: which family, which part of it, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cost_models.errors import nearest
from piper.errors import ModelError
from piper.models import ARCHITECTURES, MODELS
from piper.models.fields import Fields
from piper.models.reading.own_keys import OWN_KEYS, with_own_keys
from piper.models.reading.refused import why_refused
from piper.models.reading.towers import TOWERS, tower_notices
from piper.models.shape import DecoderShape
from piper.models.source import load

OWN_MODULE = "any nn.Module can be planned as package.module:function (docs/capture.md)"
TEXTS = ("text_config", "llm_config", "language_config")
"""Keys under which a model of several parts states its text decoder."""


def read_shape(config: Mapping[str, Any], *, where: str) -> DecoderShape:
    """Return what the config describes; raises ModelError naming architecture or field."""
    _refuse_quantised(config, where=where)
    family = _family(config, where=where)
    text = _text(config, where=where)
    shape: DecoderShape = load(MODELS[family].reader)(text, where=where)
    notices = tower_notices(
        config, model_type=str(config.get("model_type")), hidden=shape.hidden, where=where
    )
    shape = replace(shape, notices=(*notices, *shape.notices))
    return with_own_keys(shape, config, where=where)


def _text(config: Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
    """Return the decoder's own keys: the object under `text_config`, or the config without towers."""
    name = _text_key(config, where=where)
    if name is None:
        beside = {*OWN_KEYS, *TOWERS}
        return {name: value for name, value in config.items() if name not in beside}
    text, tied = config[name], config.get("tie_word_embeddings")
    inner = text.get("tie_word_embeddings")
    if None not in (tied, inner) and tied != inner:
        raise ModelError(
            where=where, field="tie_word_embeddings", value=tied,
            rule=f"contradicts {name}.tie_word_embeddings = {inner}",
            fix="state it once, as the checkpoint is",
        )  # fmt: skip
    return {**({} if tied is None else {"tie_word_embeddings": tied}), **text}


def _text_key(config: Mapping[str, Any], *, where: str) -> str | None:
    outer = Fields(config, where=where)
    return next((name for name in TEXTS if outer.inner(name) is not None), None)


def _refuse_quantised(config: Mapping[str, Any], *, where: str) -> None:
    for prefix in ("", *TEXTS):
        holder = config.get(prefix) if prefix else config
        stated = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if stated is None:
            continue
        method = stated.get("quant_method") if isinstance(stated, Mapping) else stated
        path = f"{prefix}." if prefix else ""
        raise ModelError(
            where=where, field=f"{path}quantization_config.quant_method", value=method,
            rule="says that the checkpoint holds quantised weights, which are not what is trained",
            fix="remove quantization_config: the same model is then planned in --dtype",
        )  # fmt: skip


def _family(config: Mapping[str, Any], *, where: str) -> str:
    key = _text_key(config, where=where)
    inner = None if key is None else config[key].get("model_type")
    names = _names(config, where=where)
    field = "architectures" if config.get("architectures") else "model_type"
    for name in (*names, config.get("model_type"), inner):
        missing = why_refused(name)
        if missing is not None:
            raise ModelError(
                where=where, field=field, value=name, rule=f"{missing}: not planned", fix=OWN_MODULE
            )
    if config.get("is_encoder_decoder") is True:
        raise ModelError(
            where=where, field="is_encoder_decoder", value=True,
            rule="says that it has an encoder beside its decoder: not planned", fix=OWN_MODULE,
        )  # fmt: skip
    for name in (inner, *names):
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if names == [None]:
        raise ModelError(
            where=where, field=field, value=None, rule="is missing",
            fix=f"add architectures, a list with one of {', '.join(_classes())}",
        )  # fmt: skip
    raise ModelError(
        where=where, field=field, value=names[0], rule="is not supported",
        fix=f"{nearest(str(names[0]), ARCHITECTURES)} {OWN_MODULE}",
    )  # fmt: skip


def _names(config: Mapping[str, Any], *, where: str) -> list[Any]:
    listed = config.get("architectures")
    if not (listed is None or isinstance(listed, list)):
        raise ModelError(
            where=where, field="architectures", value=listed, rule="must be a list of names",
            fix='write ["LlamaForCausalLM"], or leave it out and give model_type',
        )  # fmt: skip
    return listed or [config.get("model_type")]


def _classes() -> list[str]:
    """Return one class for each family."""
    first: dict[str, str] = {}
    for name, family in ARCHITECTURES.items():
        first.setdefault(family, name)
    return list(first.values())
