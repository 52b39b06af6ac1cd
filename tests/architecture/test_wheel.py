"""The wheel holds all three packages with their data, and works outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        cwd=folder,
    )
    (found,) = folder.glob("piper_train-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder with the installed wheel alone; its dependencies come from the environment of the tests."""
    site = wheel.parent / "site"
    run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)],
        cwd=site.parent,
    )
    return site


def run(command: list[str], *, cwd: Path, site: Path | None = None) -> str:
    environment = dict(os.environ) | ({"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"} if site else {})
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_nothing_but_the_three_packages(wheel: Path) -> None:
    assert "OK" in run(
        [sys.executable, "-m", "check_wheel_contents", "--config", str(ROOT / "pyproject.toml"), str(wheel)],
        cwd=ROOT,
    )


def test_all_packages_are_imported_from_the_wheel(installed: Path) -> None:
    code = (
        "import cost_models, piper, simulator; print(*(m.__file__ for m in (cost_models, piper, simulator)))"
    )
    for place in run([sys.executable, "-c", code], cwd=installed.parent, site=installed).split():
        assert Path(place).is_relative_to(installed)


@pytest.mark.parametrize("catalogue", ["gpus", "clusters", "stacks", "models", "schedules"])
def test_catalogues_are_in_the_wheel(catalogue: str, installed: Path) -> None:
    command = [sys.executable, "-m", "piper", catalogue, "--json"]
    assert json.loads(run(command, cwd=installed.parent, site=installed))[catalogue]


def test_the_report_page_is_in_the_wheel(installed: Path) -> None:
    names = {path.name for path in (installed / "piper" / "report" / "template").iterdir()}
    assert names >= {"page.html.j2", "page.css", "page.js"}


def test_the_console_script_is_installed(installed: Path) -> None:
    script = installed / "bin" / "piper"
    assert "Plan, simulate, search and run" in run(
        [sys.executable, str(script), "--help"], cwd=installed.parent, site=installed
    )
