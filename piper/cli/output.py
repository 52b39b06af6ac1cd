"""What goes where: results (with `--json` one object) to stdout, progress to stderr if it is a terminal."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from piper.errors import JobError

PICTURES = (".png", ".svg")
_NARROWEST = 60
_WIDE = 160
_PATIENCE_S = 2.0
_PERIOD_S = 0.5
_CLEAR = "\033[K"
"""Clears to the end of the line."""


def emit(result: Mapping[str, Any], *, as_json: bool, text: Callable[[], str]) -> None:
    """Print the object, or the text that people read; raises JobError when stdout takes no more."""
    shown = to_json(result) if as_json else text()
    try:
        click.echo(shown)
    except BrokenPipeError:
        raise
    except OSError as problem:
        raise JobError(
            where="stdout",
            field="output",
            value=f"{len(shown)} characters",
            rule=f"cannot be written: {problem.strerror}",
            fix="write to a device with room, or close none of the standard streams",
        ) from problem


def terminal_width() -> int:
    """Return how many columns text may take: those of the terminal; 160 in a file or a pipe."""
    if not sys.stdout.isatty():
        return _WIDE
    return max(_NARROWEST, shutil.get_terminal_size(fallback=(_WIDE, 24)).columns)


def to_json(result: Mapping[str, Any]) -> str:
    """Write strict JSON (no NaN) that any encoding can hold, keys in the order in which they were made."""
    return json.dumps(result, allow_nan=False)


def write_text(path: str, content: str, *, option: str) -> Path:
    """Write a file that the user asked for; a folder that is not there is made."""
    target = prepared(path, option=option)
    try:
        target.write_text(content, encoding="utf-8")
    except OSError as problem:
        raise _unwritable(path, problem, option=option, kind="file in a folder") from None
    return target


def prepared(path: str, *, option: str) -> Path:
    """Return the path after making its folder and trying to write it; a new file is not left behind.

    Asked before the work begins, so that no result is lost to a path that cannot be written.
    Raises: JobError.
    """
    target = Path(path)
    try:
        if not path:
            raise ValueError("a path is not empty")
        target.parent.mkdir(parents=True, exist_ok=True)
        is_new = not target.exists()
        with target.open("ab"):
            pass
        if is_new:
            target.unlink()
    except (OSError, ValueError) as problem:
        raise _unwritable(path, problem, option=option, kind="file in a folder") from None
    return target


def prepared_picture(path: str, *, option: str) -> Path:
    """Return the path of a picture as `prepared` does; raises JobError for other formats than PNG and SVG."""
    if Path(path).suffix.lower() not in PICTURES:
        raise JobError(
            where="command line",
            field=option,
            value=path,
            rule=f"must end in {' or '.join(PICTURES)}",
            fix=f"write {Path(path).stem or 'plot'}.png",
        )
    return prepared(path, option=option)


def prepared_folder(path: str, *, option: str) -> Path:
    """Return the folder after making it and trying to write in it; raises JobError."""
    target = Path(path)
    try:
        if not path:
            raise ValueError("a path is not empty")
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target):
            pass
    except (OSError, ValueError) as problem:
        raise _unwritable(path, problem, option=option, kind="folder") from None
    return target


def _unwritable(path: str, problem: Exception, *, option: str, kind: str) -> JobError:
    return JobError(
        where="command line",
        field=option,
        value=path,
        rule=f"cannot be written: {getattr(problem, 'strerror', None) or problem}",
        fix=f"name a {kind} that you may write",
    )


@contextmanager
def progress(label: str) -> Iterator[Callable[[str], None]]:
    """Show `label` with the seconds so far when the block takes over two seconds and stderr is a terminal.

    Yields a function that changes what is shown after the label.
    """
    news = [""]
    if not sys.stderr.isatty():
        yield news.append
        return
    done = threading.Event()
    thread = threading.Thread(target=_tick, args=(label, news, done), daemon=True)
    thread.start()
    try:
        yield news.append
    finally:
        done.set()
        thread.join()


def _tick(label: str, news: list[str], done: threading.Event) -> None:
    start = time.monotonic()
    if done.wait(_PATIENCE_S):
        return
    while True:
        sys.stderr.write(f"\r{_CLEAR}{label} ... {time.monotonic() - start:.0f} s  {news[-1]}")
        sys.stderr.flush()
        if done.wait(_PERIOD_S):
            break
    sys.stderr.write(f"\r{_CLEAR}")
    sys.stderr.flush()
