"""Rules of the house that no linter knows."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
PACKAGES = ("cost_models", "simulator", "piper")


def python_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.split()]


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    named = [
        path for path in python_files() if NAMES_THAT_SAY_NOTHING & {path.stem, *path.relative_to(ROOT).parts}
    ]
    assert named == []


def test_test_folders_are_no_packages() -> None:
    """`tests/simulator/__init__.py` would make pytest import the test folder as `simulator`."""
    assert [path for path in python_files() if path.name == "__init__.py" and "tests" in path.parts] == []


def test_product_code_reads_nothing_outside_the_repository() -> None:
    product = [path for path in python_files() if path.relative_to(ROOT).parts[0] in PACKAGES]
    assert len(product) > len(PACKAGES)
    assert [path for path in product if "shared/" in path.read_text(encoding="utf-8")] == []


def test_every_package_states_what_it_is() -> None:
    empty = [
        path
        for path in python_files()
        if path.name == "__init__.py" and not path.read_text().startswith('"""')
    ]
    assert empty == []
