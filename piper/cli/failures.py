"""From an exception to what the user sees: exit code, message, fix, JSON object.

Bad input and its subclasses say it themselves; the usage errors of click are put into the same words;
anything else is our own fault: its traceback goes to a file that the message names.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cost_models.errors import InputError, nearest
from piper.errors import DoesNotFitError, RunFailedError
from simulator.errors import IllegalPlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is shown of an error: `error: message`, `fix: fix`, and the object printed with `--json`."""

    exit_code: int
    message: str
    fix: str
    json_object: dict[str, Any]


class ResultDoesNotFitError(DoesNotFitError):
    """A result whose memory does not fit, with `--require-fit`; the result is printed with the error."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result
        gib = 2**30
        need = result["needed_memory_bytes"]
        super().__init__(
            where=result["strategy"]["shorthand"],
            field="memory",
            value=f"{need / gib:.1f} GiB",
            rule=f"is more than the {result['device_memory_bytes'] / gib:.1f} GiB of a device",
            fix="cut the model over more ranks (pp, zero with more replicas), recompute=full, "
            "or a smaller --micro-batch",
        )


class RunDiffersError(RunFailedError):
    """A run that differs from one process, with `--verify`; the result is printed with the error."""

    def __init__(self, message: str, *, result: dict[str, Any]) -> None:
        self.result = result
        super().__init__(message)


def failure_of(error: Exception) -> Failure:
    """Describe any exception that ended a command."""
    if isinstance(error, click.ClickException):
        return _of_input(_usage_error(error))
    if isinstance(error, InputError):
        return _of_input(error)
    if isinstance(error, RunFailedError):
        return _of_run(error)
    return _of_bug(error)


def _of_input(error: InputError) -> Failure:
    shown = error.to_json()
    message = error.message()
    if isinstance(error, IllegalPlanError):
        shown["violations"] = list(error.violations)
        message = "\n  ".join([message, *error.violations])
    result = error.result if isinstance(error, ResultDoesNotFitError) else {}
    return Failure(
        exit_code=error.exit_code, message=message, fix=error.fix, json_object=result | {"error": shown}
    )


def _of_run(error: RunFailedError) -> Failure:
    message, _, fix = str(error).partition("\nfix: ")
    shown = {"code": "run_failed", "where": "run", "field": "", "value": "", "rule": message, "fix": fix}
    result = error.result if isinstance(error, RunDiffersError) else {}
    return Failure(exit_code=error.exit_code, message=message, fix=fix, json_object=result | {"error": shown})


def _of_bug(error: Exception) -> Failure:
    path = _keep_traceback(error)
    kept = f"the traceback is in {path}" if path else "the traceback could not be written"
    message = f"piper: internal error = {type(error).__name__}: {error} ({kept})"
    fix = "this is our fault, not yours: please report it with that file and the command line"
    shown = {
        "code": "internal",
        "where": "piper",
        "field": "internal error",
        "value": f"{type(error).__name__}: {error}",
        "rule": kept,
        "fix": fix,
    }
    return Failure(exit_code=1, message=message, fix=fix, json_object={"error": shown})


def _keep_traceback(error: Exception) -> Path | None:
    text = f"command line: {sys.argv}\n" + "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="piper-error-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
    except OSError:
        return None
    return Path(file.name)


def _usage_error(error: click.ClickException) -> InputError:
    """Put an error of click's parser into our words."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else "piper"
    for kind, translate in _TRANSLATIONS.items():
        if isinstance(error, kind):
            return translate(error, command)
    return InputError(
        where="command line",
        field="arguments",
        value=command,
        rule=f"cannot be read: {error.format_message()}",
        fix=f"`{command} --help` shows examples",
    )


def _no_such_option(error: Any, command: str) -> InputError:
    options = [name for param in error.ctx.command.params for name in param.opts] if error.ctx else []
    return InputError(
        where="command line",
        field="option",
        value=error.option_name,
        rule=f"is not an option of `{command}`",
        fix=nearest(error.option_name, options or ["--help"]),
    )


def _missing(error: Any, command: str) -> InputError:
    param = error.param
    name = (
        (param.opts[0] if param.param_type_name == "option" else param.make_metavar(error.ctx))
        if param
        else ""
    )
    return InputError(
        where="command line",
        field=name,
        value="(nothing)",
        rule="must be given",
        fix=f"give it; `{command} --help` shows examples",
    )


def _bad_value(error: Any, command: str) -> InputError:
    return InputError(
        where="command line",
        field=error.param.opts[0] if error.param else "argument",
        value=getattr(error, "value", ""),
        rule=f"cannot be used: {error.message}",
        fix=f"`{command} --help` shows examples",
    )


def _bad_use(error: Any, command: str) -> InputError:
    return InputError(
        where="command line",
        field=error.option_name,
        value="(nothing)",
        rule=f"cannot be used: {error.message}",
        fix=f"`{command} --help` shows examples",
    )


_TRANSLATIONS: dict[type[click.ClickException], Callable[[Any, str], InputError]] = {
    click.NoSuchOption: _no_such_option,
    click.MissingParameter: _missing,
    click.BadParameter: _bad_value,
    click.BadOptionUsage: _bad_use,
}
