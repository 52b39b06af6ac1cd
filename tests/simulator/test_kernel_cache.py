"""The fast engine is compiled once per machine, and again only when what it is made of changes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from simulator.engines.fast import kernel

ROOT = Path(__file__).resolve().parents[2]
FOLDER = str(Path(kernel.__file__).parent)
PROGRAM = """
from simulator import simulate
from simulator.engines.fast import kernel
from tests.plans import FakeCostModel, one_f_one_b_rows, pipeline_plan
simulate(pipeline_plan(one_f_one_b_rows(2, 2)), FakeCostModel(), engine="fast")
stats = kernel.run_steps.stats
print(len(stats.cache_hits), len(stats.cache_misses), stats.cache_path)
"""


def run_in_process(tmp_path: Path) -> list[str]:
    environment = {"NUMBA_CACHE_DIR": str(tmp_path), "PATH": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_second_process_loads_what_the_first_compiled(tmp_path: Path) -> None:
    first, second = run_in_process(tmp_path), run_in_process(tmp_path)
    assert first[:2] == ["0", "1"]
    assert second[:2] == ["1", "0"]
    assert first[2].startswith(str(tmp_path))


def test_other_rules_are_another_entry_of_the_cache() -> None:
    """Numba tells entries apart by what the closure holds."""
    (text,) = (cell.cell_contents for cell in kernel.run_steps.py_func.__closure__)
    for module in (kernel.rules, kernel.compiled):
        assert Path(module.__file__).read_text(encoding="utf-8") in text
    (changed,) = (cell.cell_contents for cell in kept(text + "\n").py_func.__closure__)
    assert changed == text + "\n"


def kept(text: str) -> Any:
    _, run_steps = kernel._compiled(text)
    return run_steps


def refuse_to_write_below(monkeypatch: pytest.MonkeyPatch, *folders: str) -> None:
    writable = tempfile.TemporaryFile

    def temporary(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("dir", "")).startswith(folders):
            raise PermissionError("read-only")
        return writable(*args, **kwargs)

    monkeypatch.setattr(tempfile, "TemporaryFile", temporary)


def test_what_is_compiled_goes_to_the_users_cache_where_the_package_is_read_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept("").stats.cache_path.startswith(FOLDER)
    refuse_to_write_below(monkeypatch, FOLDER)
    assert kept("").stats.cache_path.startswith(str(tmp_path))


def test_where_nothing_can_be_written_it_is_compiled_for_the_process_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    refuse_to_write_below(monkeypatch, FOLDER, str(tmp_path))
    assert kept("").stats.cache_path is None
