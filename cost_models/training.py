"""What a GPU reaches in training: the figures of its kernels times the factors of its section `training`.

Kernels are measured alone, hot and repeated. In training they share power and clock with all others, and run
on data that is not in a cache; for some GPUs libraries have become faster since. The factors are fitted to
published training runs (`docs/accuracy.md`); whoever asks for the GPU alone (`load_gpu`) gets what was
measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cost_models.errors import CostModelError

SECTION = "training"
_OF_THE_SECTION = ("source", "inherit")
_NUMBER = re.compile(r"^([\d.eE+-]+)(.*)$")


def trained(content: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the content of a GPU's file with the factors applied.

    Raises: CostModelError for a factor of no figure, or that is no number above 0.
    """
    section = content.get(SECTION)
    found = dict(content)
    if section is None:
        return found
    if not isinstance(section, Mapping):
        raise _refused(where, SECTION, section, rule="must be a mapping of sections")
    for key, factors in section.items():
        if key not in _OF_THE_SECTION:
            found[key] = _scaled(content.get(key), factors, where=where, field=f"{SECTION}.{key}")
    return found


def _scaled(value: Any, factor: Any, *, where: str, field: str) -> Any:
    if isinstance(factor, Mapping):
        if isinstance(value, str) and _NUMBER.match(value) is None:
            return value  # stands for another entry, which has its own factors
        if not isinstance(value, Mapping):
            raise _refused(where, field, dict(factor), rule="scales what the file does not state")
        inside = {
            key: _scaled(value.get(key), below, where=where, field=f"{field}.{key}")
            for key, below in factor.items()
        }
        return {**value, **inside}
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
        raise _refused(where, field, factor, rule="must be a factor above 0")
    if isinstance(value, list):
        return [min(1.0, item * factor) for item in value]
    if isinstance(value, str):
        number = _NUMBER.match(value)
        if number:
            return f"{float(number.group(1)) * factor:.6g}{number.group(2)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(where, field, factor, rule="scales what is not a number in the file")
    return value * factor


def _refused(where: str, field: str, value: Any, *, rule: str) -> CostModelError:
    fix = "write for example training: {matmul: {efficiency: 0.95}, source: ...}"
    return CostModelError(where=where, field=field, value=value, rule=rule, fix=fix)
