"""The fitted parameters and the files of the catalogue tell of the same figures."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cost_models
from cost_models.training import SECTION
from cost_models.yaml_file import read_yaml
from piper.validation.fitting.parameters import PARAMETERS

FOLDER = Path(cost_models.__file__).parent
FITTED = {
    "communication_overhead", "collective_skew", "pass_wait", "step_wait", "matmul_slowdown",
    "attention_slowdown", "memory_slowdown", "collective_slowdown",
}  # fmt: skip
"""Keys of a stack's `cost` that come from fits alone; what a launch costs may be stated."""


def leaves(key: str, value: object) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield key
        return
    for name, below in value.items():
        if name not in ("source", "inherit"):
            yield from leaves(f"{key}.{name}", below)


def contents(folder: str) -> list[dict[str, Any]]:
    return [read_yaml(path) for path in sorted((FOLDER / folder).glob("*.yaml"))]


def test_every_fitted_figure_of_a_file_is_a_parameter() -> None:
    """A figure that an earlier fit left in a file would be known to the fits to both halves."""
    told = {f"stack:{c['name']}:cost.{key}" for c in contents("stacks") for key in c["cost"] if key in FITTED}
    for content in contents("hardware"):
        told |= set(leaves(f"gpu:{content['name']}:{SECTION}", content.get(SECTION, {})))
    clusters = {p.name for p in PARAMETERS if p.name.startswith("cluster:")}
    launches = {p.name for p in PARAMETERS if p.name.endswith("launch_overhead")}
    assert told == {p.name for p in PARAMETERS} - clusters - launches
