"""The border of the command line: exit codes, what goes to stdout and stderr, help, frozen options."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from cost_models.errors import InputError, InternalError
from piper.cli import COMMANDS, main
from piper.cli.entry import piper
from piper.errors import DoesNotFitError, RunFailedError
from simulator.errors import IllegalPlanError

ROOT = Path(__file__).resolve().parents[3]

BAD = {"where": "here", "field": "f", "value": 1, "rule": "must be 2", "fix": "write 2"}
EXIT_CODES = [
    (InputError(**BAD), 2, "error: here: f = 1 must be 2\nfix: write 2\n"),
    (DoesNotFitError(**BAD), 3, "error: here: f = 1 must be 2\nfix: write 2\n"),
    (IllegalPlanError(where="plan", violations=["cycle: 0F0"]), 4, "\n  cycle: 0F0\nfix: change the order"),
    (
        RunFailedError("rank 1 ended with code 9\nfix: look at its log"),
        5,
        "error: rank 1 ended with code 9\nfix: look",
    ),
    (InternalError("internal error: x"), 1, "please report it"),
    (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero (the traceback is in "),
    (KeyboardInterrupt(), 130, "interrupted\n"),
]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Make `piper models` raise what the test puts into the list."""
    errors: list[BaseException] = []

    @click.command()
    @click.option("--json", "as_json", is_flag=True)
    def command(as_json: bool) -> None:
        raise errors[0]

    monkeypatch.setattr("piper.cli.models.models", command)
    return errors


@pytest.mark.parametrize(("error", "code", "message"), EXIT_CODES, ids=lambda value: type(value).__name__)
def test_every_kind_of_error_has_its_exit_code(
    error: BaseException,
    code: int,
    message: str,
    failing: list[BaseException],
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing.append(error)
    assert main(["models"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_our_own_fault_keeps_the_traceback_in_a_file_and_names_it(
    failing: list[BaseException],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failing.append(ZeroDivisionError("division by zero"))
    assert main(["models", "--json"]) == 1
    out, err = capsys.readouterr()
    (file,) = tmp_path.glob("piper-error-*.txt")
    assert str(file) in err
    assert str(file) in json.loads(out)["error"]["rule"]
    assert "raise errors[0]" in file.read_text()


def test_the_violations_of_an_illegal_plan_are_in_the_error_object(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(IllegalPlanError(where="plan", violations=["a", "b", "c", "d"]))
    assert main(["models", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)["error"]
    assert found["code"] == "illegal_plan"
    assert found["violations"] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "Examples:" in out
    assert len(re.findall(rf"^ +piper {command}\b", out, flags=re.MULTILINE)) >= 2


def test_help_lists_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in COMMANDS)
    assert "130 interrupted" in out


def test_cli_options_are_frozen(golden: Callable[[str, str], None]) -> None:
    """Add freely; a line that disappears or changes breaks someone's script."""
    golden("piper/cli/options.txt", "".join(f"{line}\n" for line in options()))


def options() -> list[str]:
    """One line per command and argument or option."""
    context = click.Context(piper)
    lines = []
    for name in COMMANDS:
        command = piper.get_command(context, name)
        assert command is not None
        for param in command.params:
            kind = "flag" if getattr(param, "is_flag", False) else param.make_metavar(click.Context(command))
            repeated = " (repeatable)" if param.multiple or param.nargs == -1 else ""
            lines.append(f"{name} {'/'.join(param.opts)} {kind}{repeated}")
    return lines


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    code = "import sys; from piper.cli import main; sys.exit(main(['models', '--json']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(("no_color", "escapes"), [("", True), ("1", False)])
def test_errors_are_coloured_on_a_terminal_unless_no_color_is_set(no_color: str, escapes: bool) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "piper", "simulte"]
    environment = os.environ | {"NO_COLOR": no_color, "TERM": "xterm"}
    subprocess.run(command, cwd=ROOT, stderr=end, env=environment, check=False)
    shown = os.read(terminal, 4096).decode()
    os.close(end)
    os.close(terminal)
    assert "is not a command of piper" in shown
    assert ("\x1b[" in shown) is escapes


def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        threading.Event().wait(10)

    monkeypatch.setattr("piper.cli.models.models", command)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        assert main(["models"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"
