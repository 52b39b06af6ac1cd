"""The command line: `piper COMMAND ...`, one file per command.

To add a command: write `piper/cli/<name>.py` with a click command of the same name (examples in its
docstring), and add one line to `COMMANDS`. Commands import what they compute with inside their function,
so that `--help` and small commands start fast; they raise, and `main` alone turns errors into exit codes.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

COMMANDS = {
    "simulate": ("piper.cli.simulate:simulate", "Time, memory and breakdown of one strategy."),
    "compare": ("piper.cli.compare:compare", "Several strategies side by side."),
    "explain": ("piper.cli.explain:explain", "Where the step goes, what limits it, what would help most."),
    "search": ("piper.cli.search:search", "The fastest strategy that fits, and why the others lost."),
    "check": ("piper.cli.check:check", "Static checks of a strategy or a plan, nothing runs."),
    "run": ("piper.cli.run:run", "Train with a strategy on CPU processes or under torchrun."),
    "profile": ("piper.cli.profile:profile", "Measure kernels, links and host costs of this machine."),
    "calibrate": (
        "piper.cli.calibrate:calibrate",
        "Fit a cluster file to such tables, or to a measured job.",
    ),
    "diff": ("piper.cli.diff:diff", "Prediction against a recorded run, per kind of task."),
    "validate": ("piper.cli.validate:validate", "Predict published runs, and score the predictions."),
    "plot": ("piper.cli.plot:plot", "Draw the timeline of a result."),
    "report": ("piper.cli.report:report", "One self-contained HTML page of one or several results."),
    "export": ("piper.cli.export:export", "A result in the file format of another tool."),
    "import": ("piper.cli.imports:import_file", "Files of other tools: logs of nccl-tests."),
    "models": ("piper.cli.models:models", "Models by name, or one in detail."),
    "gpus": ("piper.cli.gpus:gpus", "GPUs by name, or one in detail."),
    "clusters": ("piper.cli.clusters:clusters", "Clusters by name, or one in detail."),
    "stacks": ("piper.cli.stacks:stacks", "Framework profiles by name, or one in detail."),
    "schedules": ("piper.cli.schedules:schedules", "Pipeline schedules by name, or one drawn alone."),
    "doctor": ("piper.cli.doctor:doctor", "What this machine can do, and what is wrong with it."),
}
"""Command -> (module:function, one line of help). The order is that of `piper --help`."""


INTERRUPTED = 130
"""Exit code after Ctrl-C."""

COLLECT_AFTER = 200_000
"""New objects between two passes of the garbage collector; the default of 700 costs a third of a start."""


def run_process() -> NoReturn:
    """Be the process `piper`: run the command line, then leave without taking objects apart.

    [Note: leaving fast]
    A command is short and the system takes its memory back at once; freeing torch's objects one by one
    would add half a second (mypy leaves in the same way).
    """
    gc.set_threshold(COLLECT_AFTER)
    try:
        _open_streams()
        code = main()
    except KeyboardInterrupt:  # while modules are still imported
        code = INTERRUPTED
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _open_streams() -> None:
    """Write to nowhere what was closed (`>&-`), and ? for what the encoding of stdout lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: that of the process) and return its exit code."""
    from piper.installation import check_packages

    try:
        check_packages()
    except ImportError as problem:
        sys.stderr.write(f"error: {problem}\n")
        return 2
    from piper.cli.entry import run_command_line

    return run_command_line(arguments)
