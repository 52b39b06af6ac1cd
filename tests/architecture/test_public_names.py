"""The names that `import piper` promises, and that no foreign package stands in for ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import piper

ROOT = Path(__file__).resolve().parents[2]

PUBLIC = [
    "Result",
    "Strategy",
    "annotate",
    "annotate_modules",
    "compile_plan",
    "load_result",
    "load_strategy",
    "register_schedule",
    "search_strategies",
    "simulate",
]


def test_public_names_are_frozen() -> None:
    assert sorted(piper.__all__) == PUBLIC


def test_every_public_name_can_be_used() -> None:
    assert all(callable(getattr(piper, name)) for name in PUBLIC)


def test_no_public_name_is_a_subpackage() -> None:
    folders = {path.stem for path in (ROOT / "piper").iterdir()}
    assert folders.isdisjoint(set(PUBLIC) - {"annotate"})


def test_a_name_that_piper_lacks_is_refused_with_the_names_that_it_has() -> None:
    with pytest.raises(AttributeError, match=r"'simulat'; public names: .*simulate"):
        getattr(piper, "simulat")  # noqa: B009 - a typo that mypy would refuse


def test_a_foreign_simulator_is_named_by_the_command_line_and_by_the_import(tmp_path: Path) -> None:
    (tmp_path / "simulator.py").write_text("")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
    for code in ("import piper.api", "import sys; from piper.cli import main; sys.exit(main(['models']))"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        assert f"simulator = {tmp_path / 'simulator.py'}" in done.stderr
        assert "fix: rename that file or folder" in done.stderr
        assert not done.stdout
