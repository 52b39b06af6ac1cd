"""A file in a folder that has a table is a line of that table: forgetting one is loud."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from cost_models.clusters import CLUSTERS
from cost_models.hardware import GPUS
from cost_models.stacks import STACKS
from piper.cli import COMMANDS
from piper.directives import DIRECTIVES
from piper.models import CATALOGUE, MODELS
from piper.passes import PASSES
from piper.schedules import SCHEDULES
from simulator.engines import ENGINES

ROOT = Path(__file__).resolve().parents[2]

CATALOGUES = {
    "cost_models/hardware": GPUS,
    "cost_models/clusters": CLUSTERS,
    "cost_models/stacks": STACKS,
    "piper/models/catalogue": CATALOGUE,
}

MODULES = {
    "piper/directives": [entry.__module__ for entry in DIRECTIVES.values()],
    "piper/passes": [entry.__module__ for entry in PASSES.values()],
    "simulator/engines": [target.partition(":")[0] for target in ENGINES.values()],
}

BORDER_OF_THE_COMMAND_LINE = {"entry", "failures", "options", "output", "jobs", "catalogue"}


@pytest.mark.parametrize("folder", CATALOGUES)
def test_tables_list_every_file_of_a_catalogue(folder: str) -> None:
    files = sorted(path.name for path in (ROOT / folder).glob("*.yaml"))
    assert files == sorted(CATALOGUES[folder].values())


@pytest.mark.parametrize("folder", MODULES)
def test_tables_list_every_file_of_a_folder(folder: str) -> None:
    assert last_parts(MODULES[folder]) == entries_of(folder)


def test_tables_list_every_schedule() -> None:
    """The folder also has files that serve all schedules; an entry is a file with a function `rows`."""
    files = (ROOT / "piper/schedules").glob("*.py")
    with_rows = {path.stem for path in files if "\ndef rows(\n" in path.read_text(encoding="utf-8")}
    assert last_parts(entry.__name__ for entry in SCHEDULES.values()) == with_rows


def test_tables_list_every_command() -> None:
    targets = [target.partition(":")[0] for target, _ in COMMANDS.values()]
    assert last_parts(targets) == entries_of("piper/cli") - BORDER_OF_THE_COMMAND_LINE


def test_a_model_family_has_a_reader_and_a_module() -> None:
    for family in MODELS.values():
        for target in (family.reader, family.module):
            assert (ROOT / (target.partition(":")[0].replace(".", "/") + ".py")).is_file(), target


def last_parts(modules: Iterable[str]) -> set[str]:
    return {module.rpartition(".")[2] for module in modules}


def entries_of(folder: str) -> set[str]:
    return {
        path.stem
        for path in (ROOT / folder).iterdir()
        if (path.suffix == ".py" and path.stem != "__init__") or (path / "__init__.py").is_file()
    }
