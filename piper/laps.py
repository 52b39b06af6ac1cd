"""Seconds between laps, by name: what the phases of a command take."""

from __future__ import annotations

import time


class Clock:
    """Runs from when it is made.

    Attributes:
        laps_s: seconds of each lap; laps of one name add up.
    """

    def __init__(self) -> None:
        self.laps_s: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a lap and begin the next one."""
        now_s = time.perf_counter()
        self.laps_s[name] = self.laps_s.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s
