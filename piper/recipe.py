"""Which kernels a job is predicted for: the stack's `model` section, then a recipe file's, then `--set`.

A recipe is a YAML file; of its sections only `model` is read here:

    schema_version: 1
    model: {attention: math, cross_entropy: chunked}

`--set model.attention=fused_softmax` changes one value. The keys are the fields of `KernelChoice` but
`device`, which is that of the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.errors import nearest
from piper.capture.choice import CHOICES, KernelChoice
from piper.errors import JobError

if TYPE_CHECKING:
    from cost_models.models.cluster import ClusterCostModel

_SECTION = "model"
_ALIASES = {"attention_kernel": "attention"}
_KEYS = tuple(name for name in CHOICES if name != "device")


def kernels_of(
    cost_model: ClusterCostModel, *, recipe: str | None = None, settings: Sequence[tuple[str, str]] = ()
) -> KernelChoice:
    """Return the kernels of a job.

    Args:
        cost_model: of the cluster and the stack.
        recipe: YAML file, or None.
        settings: (key, value) pairs such as ("model.attention", "math").
    Raises: JobError, ModelError, CostModelError for what is not known or cannot be read.
    """
    choice = KernelChoice(device="cuda" if cost_model.cluster.gpu.asynchronous else "cpu")
    stack = cost_model.stack
    choice = choice.changed(_options(stack.model, where=f"stack {stack.name}"), where=f"stack {stack.name}")
    if recipe is not None:
        choice = choice.changed(_of_file(recipe), where=recipe)
    return choice.changed(_of_settings(settings), where="--set")


def _of_file(recipe: str) -> dict[str, str]:
    from cost_models.yaml_file import read_yaml

    content = read_yaml(Path(recipe))
    fix = f"write {_SECTION}: {{attention: math}}; keys: {', '.join(_KEYS)}"
    for name, value in content.items():
        if name not in {_SECTION, "schema_version"}:
            raise JobError(where=recipe, field=name, value=value, rule="is no section of a recipe", fix=fix)
    section = content.get(_SECTION, {})
    if not isinstance(section, Mapping):
        raise JobError(where=recipe, field=_SECTION, value=section, rule="must be a mapping", fix=fix)
    return _options(section, where=recipe)


def _of_settings(settings: Sequence[tuple[str, str]]) -> dict[str, str]:
    found = {}
    for key, value in settings:
        section, _, name = key.partition(".")
        if section != _SECTION:
            known = [f"{_SECTION}.{option}" for option in _KEYS]
            raise JobError(
                where="--set", field=key, value=value, rule="is not known", fix=nearest(key, known)
            )
        found[name] = value
    return _options(found, where="--set")


def _options(section: Mapping[str, Any], *, where: str) -> dict[str, str]:
    options = {_ALIASES.get(name, name): str(value) for name, value in section.items()}
    for name in options:
        if name not in _KEYS:
            raise JobError(
                where=where, field=f"{_SECTION}.{name}", value=options[name], rule="is not known",
                fix=nearest(name, _KEYS),
            )  # fmt: skip
    return options
