"""What goes where: results (with `--json` one object) to stdout, progress to stderr if it is a terminal."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from piper.errors import JobError

_PATIENCE_S = 2.0
_PERIOD_S = 0.5
_CLEAR = "\033[K"
"""Clears to the end of the line."""


def emit(result: Mapping[str, Any], *, as_json: bool, text: Callable[[], str]) -> None:
    """Print the object, or the text that people read."""
    click.echo(to_json(result) if as_json else text())


def to_json(result: Mapping[str, Any]) -> str:
    """Write strict JSON (no NaN), keys in the order in which they were made."""
    return json.dumps(result, allow_nan=False, ensure_ascii=False)


def write_text(path: str, content: str, *, option: str) -> Path:
    """Write a file that the user asked for; a folder that is not there is made."""
    target = prepared(path, option=option)
    target.write_text(content, encoding="utf-8")
    return target


def prepared(path: str, *, option: str) -> Path:
    """Return the path after making its folder; a path that cannot be written is bad input."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab"):
            pass
    except OSError as problem:
        raise JobError(
            where="command line",
            field=option,
            value=path,
            rule=f"cannot be written: {problem.strerror}",
            fix="name a file in a folder that you may write",
        ) from None
    return target


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
