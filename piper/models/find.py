"""From what the user typed to a `ModelSource`: catalogue, config file, or factory."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cost_models.documents import UnreadableError, exists, is_folder, parse_json, read_text
from cost_models.errors import nearest
from piper.errors import ModelError
from piper.models import CATALOGUE
from piper.models.entries import read_entry
from piper.models.facts import facts_of
from piper.models.reading.config import read_shape
from piper.models.reading.own_keys import ADAPTERS
from piper.models.source import ModelSource, put_working_folder_on_path

ADAPTER_FILE = "adapter_config.json"

LARGEST_DEFAULT_SEQ_LEN = 8192
"""CONTRACT: the default sequence length is the model's context capped at this."""


def find(text: str) -> ModelSource:
    """Return the source that `text` names; see `piper.models.find_model`."""
    if not isinstance(text, str):
        raise _not_a_name(text)
    name = _catalogue_name(text)
    if name is not None:
        entry = read_entry(name)
        return from_config(
            entry["config"], name=name, kind="catalogue", where=f"model {name}", origin=entry["source"]
        )
    path = _path(text)
    if exists(path) or path.suffix == ".json" or text.endswith("/"):
        return _from_file(path)
    if ":" in text:
        return _from_factory(text)
    known = [*CATALOGUE, *(alias for entry in CATALOGUE for alias in read_entry(entry)["aliases"])]
    raise ModelError(
        where="model", field="MODEL", value=text,
        rule="is not a catalogue name, file or package.module:function",
        fix=nearest(text, known) + " (`piper models` lists all)",
    )  # fmt: skip


def _not_a_name(value: Any) -> ModelError:
    """Return the error for a module, class or function that was given in place of a model's name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", "")
    named = f"{module}:{name}" if callable(value) and name.isidentifier() else "my_package.models:build"
    return ModelError(
        where="model", field="MODEL", value=type(value).__name__,
        rule="must be a text: a catalogue name, a path or package.module:function",
        fix=f'give the name of a function that returns the module, such as "{named}"',
    )  # fmt: skip


def from_config(
    config: Mapping[str, Any], *, name: str, kind: str, where: str, origin: str = ""
) -> ModelSource:
    """Return the source of a Hugging Face config; raises ModelError naming architecture or field."""
    shape = read_shape(config, where=where)
    return ModelSource(
        name=name,
        kind=kind,
        where=where,
        family=shape.family,
        config=config,
        shape=shape,
        context_length=shape.context_length,
        default_seq_len=sum(shape.segment_lengths) or min(shape.context_length, LARGEST_DEFAULT_SEQ_LEN),
        n_parameters=shape.n_parameters,
        facts=facts_of(shape, name=name),
        assumed=shape.assumed,
        origin=origin,
    )


def _catalogue_name(text: str) -> str | None:
    lowered = text.lower()
    if lowered in CATALOGUE:
        return lowered
    if ":" in text or text.endswith((".json", "/")) or ("/" in text and exists(Path(text))):
        return None
    for name in CATALOGUE:
        if lowered in (alias.lower() for alias in read_entry(name)["aliases"]):
            return name
    return None


def _from_file(path: Path) -> ModelSource:
    """Read a config.json, or a folder: with an adapter_config.json beside it, or that alone (peft)."""
    adapter = path / ADAPTER_FILE if is_folder(path) else path
    if adapter.name != ADAPTER_FILE or not exists(adapter):
        file = path / "config.json" if is_folder(path) else path
        return _from_configs(file, _read_object(file))
    stated, file = _read_object(adapter), adapter.with_name("config.json")
    if exists(file):
        return _from_configs(file, {**_read_object(file), ADAPTERS: stated})
    base = stated.get("base_model_name_or_path")
    name = _catalogue_name(base) if isinstance(base, str) else None
    if name is None:
        raise ModelError(
            where=str(adapter), field="base_model_name_or_path", value=base, rule="is not a catalogue name",
            fix="put the config.json of that model beside the adapter's file",
        )  # fmt: skip
    config = {**read_entry(name)["config"], ADAPTERS: stated}
    return from_config(config, name=f"{name}+lora", kind="config", where=str(adapter), origin=str(adapter))


def _from_configs(file: Path, config: Mapping[str, Any]) -> ModelSource:
    name = file.parent.resolve().name if file.name == "config.json" else file.stem
    return from_config(config, name=name, kind="config", where=str(file), origin=str(file))


def _read_object(file: Path) -> dict[str, Any]:
    where = str(file)
    try:
        config = parse_json(read_text(file))
    except UnreadableError as problem:
        raise ModelError(
            where=problem.place(where), field="file", value=where, rule=problem.rule,
            fix="give the path of a Hugging Face config.json, or its folder"
            if problem.missing else "give a config.json as it was published",
        ) from problem  # fmt: skip
    if not isinstance(config, dict):
        raise ModelError(
            where=where, field="JSON", value=type(config).__name__, rule="must be an object",
            fix="give a Hugging Face config.json",
        )  # fmt: skip
    return config


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # ~name of nobody
        return Path(text)


def _can_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module that is no file, such as __main__
        return False


def _from_factory(text: str) -> ModelSource:
    top = text.partition(":")[0].partition(".")[0]
    put_working_folder_on_path()
    if top.isidentifier() and not _can_be_found(top):
        raise ModelError(
            where=text, field="module", value=top, rule="cannot be found",
            fix="install it, or start piper in the folder that holds it",
        )  # fmt: skip
    return ModelSource(name=text, kind="factory", where=text, factory=text, origin=text)
