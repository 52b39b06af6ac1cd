"""The `piper` group, and the one place where an exception becomes an exit code and a message."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from cost_models.errors import InputError, nearest
from piper.cli import COMMANDS, INTERRUPTED
from piper.cli.failures import Failure, failure_of
from piper.errors import CacheNotice


class CommandTable(click.Group):
    """A group whose commands are the lines of `COMMANDS`, imported when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; an unknown name is bad input with a did-you-mean."""
        if cmd_name not in COMMANDS:
            raise InputError(
                where="command line",
                field="command",
                value=cmd_name,
                rule="is not a command of piper",
                fix=f"{nearest(cmd_name, COMMANDS)} `piper --help` describes them all",
            )
        module, _, function = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table without importing a single command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.command(cls=CommandTable, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="piper-train", prog_name="piper")
def piper() -> None:
    """Plan, simulate, search and run distributed training.

    \b
    Examples:
      piper simulate llama3-8b --cluster dgx-h100 --gpus 64 --strategy pp=4,dp=16,zero=1
      piper search llama3-8b --gpus 64 --global-batch 512 --seq-len 8192
      piper run tiny-llama --local 4 --strategy pp=2,dp=2 --steps 3 --verify

    Exit codes: 0 done, 1 our own fault, 2 bad input, 3 does not fit (--require-fit), 4 illegal plan,
    5 the run failed or differs, 130 interrupted.
    """


def run_command_line(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; never raises, never shows a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _notices_in_one_line(), piper.make_context("piper", given) as context:
            piper.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.exceptions.NoArgsIsHelpError as no_arguments:
        click.echo(no_arguments.format_message())
        return 0 if not given else 2
    except BrokenPipeError:
        return _closed_pipe()
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the border: every exception ends here
        return _report(failure_of(error), as_json="--json" in given)
    return 0


@contextmanager
def _notices_in_one_line() -> Iterator[None]:
    """Show notices on stderr without the line of code that they come from; other warnings as usual."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
            if issubclass(category, CacheNotice):
                click.echo(f"notice: {message}", err=True)
            else:
                usual(message, category, *place, **options)

        warnings.showwarning = show
        yield


def _report(failure: Failure, *, as_json: bool) -> int:
    if as_json:
        import json

        with suppress(OSError):  # stdout takes no more: the message and the exit code still tell
            click.echo(json.dumps(failure.json_object, allow_nan=False))
    colour = False if os.environ.get("NO_COLOR") else None
    click.echo(f"{click.style('error:', fg='red', bold=True)} {failure.message}", err=True, color=colour)
    if failure.fix:
        click.echo(f"{click.style('fix:', fg='green', bold=True)} {failure.fix}", err=True, color=colour)
    return failure.exit_code


def _closed_pipe() -> int:
    """Leave quietly when the reader (such as `head`) closed our output; nothing may be flushed at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
