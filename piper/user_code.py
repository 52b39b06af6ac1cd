"""Code that the user wrote, run inside a command: it may print and try to leave, but not spoil our output.

What it prints goes to stderr, because stdout holds the result (`--json`: one object, nothing else).
`sys.exit` in it would end the command without a word and with the exit code of its choice: it becomes an
ordinary exception, for the message that names the code at fault.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


class LeftError(Exception):
    """The user's code called `sys.exit`."""


@contextmanager
def user_code() -> Iterator[None]:
    """Run the block as the user's code; raises LeftError in place of SystemExit."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as leave:
        raise LeftError(f"it calls sys.exit({leave.code!r})") from leave
