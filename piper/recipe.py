"""What a job takes from its stack, changed by a recipe file and then by `--set`.

A recipe is a YAML file with the sections of a stack that a job may change:

    schema_version: 1
    model: {attention: math, cross_entropy: chunked}
    strategy: {zero: 1, gradient_dtype: bf16}
    cost: {expandable_segments: true}

`--set model.attention=fused_softmax` changes one value. The keys of `model` are the fields of `KernelChoice`
but `device`, which is that of the cluster; those of `strategy` are in `piper.strategy.habits`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.errors import nearest
from piper.capture.choice import CHOICES, KernelChoice
from piper.errors import JobError
from piper.strategy.habits import HABITS, Habits, read_habits

if TYPE_CHECKING:
    from cost_models.catalogue import Stack
    from cost_models.models.cluster import ClusterCostModel

_MODEL, _STRATEGY, COST = "model", "strategy", "cost"
_ALIASES: dict[str, dict[str, str]] = {_MODEL: {"attention_kernel": "attention"}, _STRATEGY: {}, COST: {}}
_KEYS = {
    _MODEL: tuple(name for name in CHOICES if name != "device"),
    _STRATEGY: HABITS,
    COST: ("expandable_segments", "contention", "attention_kernel"),
}
_TEXTS = ("attention_kernel",)
"""Keys of `cost` that name something; the others are flags."""

_FLAGS = {"true": True, "on": True, "false": False, "off": False}

Settings = Sequence[tuple[str, str]]
"""(key, value) pairs such as ("model.attention", "math")."""


def kernels_of(
    cost_model: ClusterCostModel, *, recipe: str | None = None, settings: Settings = ()
) -> KernelChoice:
    """Return the kernels of a job.

    Args:
        cost_model: of the cluster and the stack.
        recipe: YAML file, or None.
        settings: changes on top.
    Raises: JobError, ModelError, CostModelError for what is not known or cannot be read.
    """
    choice = KernelChoice(device="cuda" if cost_model.cluster.gpu.asynchronous else "cpu")
    stack = cost_model.stack
    where = f"stack {stack.name}"
    choice = choice.changed(_options(stack.model, section=_MODEL, where=where), where=where)
    for where, options in _changes(_MODEL, recipe, settings):
        choice = choice.changed(options, where=where)
    return choice


def habits_of(stack: Stack, *, recipe: str | None = None, settings: Settings = ()) -> Habits:
    """Return the habits of a stack, changed by the recipe, then by the settings.

    Raises: JobError, StrategyError for what is not known.
    """
    changes = _changes(_STRATEGY, recipe, settings)
    chosen = frozenset(name for _, options in changes for name in options)
    return read_habits([(f"stack {stack.name}", stack.strategy), *changes], chosen=chosen)


def stack_of(name: str, *, recipe: str | None = None, settings: Settings = ()) -> Stack:
    """Return the stack of a job: its `cost` section changed by the recipe, then by the settings.

    Raises: JobError, CostModelError for what is not known or cannot be read.
    """
    from cost_models import load_stack

    stack = load_stack(name)
    for where, options in _changes(COST, recipe, settings):
        changes: dict[str, Any] = {
            key: text if key in _TEXTS else _flag(text, field=f"{COST}.{key}", where=where)
            for key, text in options.items()
        }
        stack = replace(stack, **changes)
    return stack


def _changes(section: str, recipe: str | None, settings: Settings) -> list[tuple[str, dict[str, str]]]:
    """Return (where, options) of one section, the later wins."""
    found = [] if recipe is None else [(recipe, _of_file(recipe, section))]
    return [*found, ("--set", _of_settings(settings, section))]


def _of_file(recipe: str, section: str) -> dict[str, str]:
    from cost_models.yaml_file import read_yaml

    content = read_yaml(Path(recipe))
    keys = "; ".join(f"keys of {name}: {', '.join(known)}" for name, known in _KEYS.items())
    fix = f"write {_MODEL}: {{attention: math}}; {keys}"
    for name, value in content.items():
        if name not in {*_KEYS, "schema_version"}:
            raise JobError(where=recipe, field=name, value=value, rule="is no section of a recipe", fix=fix)
    found = content.get(section, {})
    if not isinstance(found, Mapping):
        raise JobError(where=recipe, field=section, value=found, rule="must be a mapping", fix=fix)
    return _options(found, section=section, where=recipe)


def _of_settings(settings: Settings, section: str) -> dict[str, str]:
    found = {}
    for key, value in settings:
        its_section, _, name = key.partition(".")
        if its_section not in _KEYS:
            known = [f"{known}.{option}" for known, options in _KEYS.items() for option in options]
            raise JobError(
                where="--set", field=key, value=value, rule="is not known", fix=nearest(key, known)
            )
        if its_section == section:
            found[name] = value
    return _options(found, section=section, where="--set")


def _options(found: Mapping[str, Any], *, section: str, where: str) -> dict[str, str]:
    options = {_ALIASES[section].get(name, name): _text(value) for name, value in found.items()}
    for name in options:
        if name not in _KEYS[section]:
            raise JobError(
                where=where, field=f"{section}.{name}", value=options[name], rule="is not known",
                fix=nearest(name, _KEYS[section]),
            )  # fmt: skip
    return options


def _text(value: object) -> str:
    """Return a value as `--set` gives it; YAML reads on, off, yes and no as flags."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _flag(text: str, *, field: str, where: str) -> bool:
    if text.lower() not in _FLAGS:
        raise JobError(
            where=where, field=field, value=text, rule="must be true or false", fix="write true or false"
        )
    return _FLAGS[text.lower()]
