"""`piper models`: the models in the catalogue, or one in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from piper.cli.catalogue import plain, show_entry, show_list
from piper.cli.options import json_option
from piper.errors import ModelError

if TYPE_CHECKING:
    from piper.models import ModelSource

_PROBE_SEQ_LEN = 64
"""Tokens on which a factory's module is run to see which parameters are active."""


@click.command()
@click.argument("model", metavar="[MODEL]", required=False)
@json_option
def models(model: str | None, as_json: bool) -> None:
    """List models, or show one: parameters, shapes, and what was assumed.

    MODEL is a name, a Hugging Face config.json (file or folder, read offline), or package.module:factory.

    \b
    Examples:
      piper models
      piper models llama3-8b
      piper models examples/llama3-8b/config.json --json
    """
    from piper.models import CATALOGUE, find_model

    if model is not None:
        source = find_model(model)
        counted = {} if source.family is not None else _counted(source)
        show_entry(_detail(source) | _shapes(source) | counted, as_json=as_json)
        return
    entries = [_detail(find_model(name)) for name in CATALOGUE]
    columns = {
        "name": "name",
        "family": "family",
        "parameters": "n_parameters",
        "active": "n_active_parameters",
        "layers": "layers",
        "hidden": "hidden",
        "context": "context_length",
        "source": "source",
    }
    show_list("models", entries, columns=columns, as_json=as_json)


def _detail(source: ModelSource) -> dict[str, Any]:
    """Describe a model; what a factory's module does not tell is null."""
    facts = plain(source.facts) if source.facts is not None else {}
    return {
        "model": source.name,
        "name": source.name,
        "kind": source.kind,
        "family": source.family,
        "n_parameters": source.n_parameters,
        "n_active_parameters": facts.get("n_active_parameters"),
        "layers": facts.get("layers"),
        "hidden": facts.get("hidden"),
        "heads": facts.get("heads"),
        "head_dim": facts.get("head_dim"),
        "vocabulary": facts.get("vocabulary"),
        "context_length": source.context_length,
        "default_seq_len": source.default_seq_len,
        "assumed": list(source.assumed),
        "notices": [] if source.shape is None else list(source.shape.notices),
        "source": source.origin,
    }


def _shapes(source: ModelSource) -> dict[str, Any]:
    """Return what only the detail of one model has: parts, their parameters, the published numbers."""
    from piper.models import CATALOGUE
    from piper.models.describe import parameters_by_part, shapes_of
    from piper.models.entries import read_entry
    from piper.models.published import read_published
    from piper.models.reading.adapters import adapter_parameters

    if source.shape is None:
        return {}
    published = read_published(read_entry(source.name)) if source.name in CATALOGUE else None
    return {
        "n_adapter_parameters": adapter_parameters(source.shape),
        "parameters_by_part": parameters_by_part(source.shape),
        "published": plain(published),
        "shapes": shapes_of(source.shape),
    }


def _counted(source: ModelSource) -> dict[str, Any]:
    """Count the parameters of a factory's module, a tied one once; nothing is allocated.

    Which are active shows when it runs; null where it does not run on so short a sequence.
    """
    from piper.capture import capture

    module = source.build(dtype="fp32", device="meta")
    count = sum(parameter.numel() for parameter in module.parameters())
    try:
        facts = capture(source, micro_batch=1, seq_len=_PROBE_SEQ_LEN, dtype="fp32").facts
    except ModelError:
        return {"n_parameters": count, "n_active_parameters": None}
    return {"n_parameters": count, "n_active_parameters": facts.n_active_parameters}
