"""What is loaded when: the packages below never load those above, and light commands never load torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "examples/llama3-8b/config.json"
SHOW_MODULES = "import json, sys; print(json.dumps(sorted(name for name in sys.modules if '.' not in name)))"
RUN_COMMAND = (
    "import sys; from piper.cli import main; code = main({arguments!r}); print(); {show}; sys.exit(code)"
)

LIGHT_COMMANDS = [
    ["--help"],
    ["models"],
    ["models", "llama3-8b", "--json"],
    ["gpus"],
    ["gpus", "h100", "--json"],
    ["clusters"],
    ["stacks"],
    ["schedules"],
    ["schedules", "1f1b", "--pp", "4", "--microbatches", "8"],
]
HEAVY = {"torch", "numba", "pandas", "matplotlib", "scipy", "jinja2"}
JOB = [LLAMA, "--gpus", "8", "--strategy", "pp=2,dp=4", "--seq-len", "2048"]


def top_level_modules(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_of_command(arguments: list[str]) -> set[str]:
    return top_level_modules(RUN_COMMAND.format(arguments=arguments, show=SHOW_MODULES))


def test_simulator_and_cost_models_load_neither_torch_nor_piper() -> None:
    loaded = top_level_modules(f"import simulator, cost_models; {SHOW_MODULES}")
    assert not loaded & {"torch", "piper"}


def test_the_public_names_of_simulator_load_neither_torch_nor_piper() -> None:
    loaded = top_level_modules(f"from simulator import *; {SHOW_MODULES}")
    assert not loaded & {"torch", "piper"}


def test_import_piper_loads_nothing_heavy() -> None:
    loaded = top_level_modules(f"import piper; {SHOW_MODULES}")
    assert not loaded & {*HEAVY, "numpy", "click", "simulator"}


@pytest.mark.parametrize("arguments", LIGHT_COMMANDS, ids=" ".join)
def test_a_light_command_loads_nothing_heavy(arguments: list[str]) -> None:
    assert not modules_of_command(arguments) & HEAVY


@pytest.mark.parametrize("command", ["simulate", "check"])
def test_with_a_warm_cache_planning_loads_nothing_heavy(command: str) -> None:
    modules_of_command([command, *JOB])
    assert not modules_of_command([command, *JOB]) & HEAVY
