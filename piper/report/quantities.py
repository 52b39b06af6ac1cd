"""Numbers as people read them: durations, memory, counts, shares. Units are always written."""

from __future__ import annotations

GIB = 2**30

_DURATIONS = ((3600.0 * 24, "days"), (3600.0, "h"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_FEW_HOURS_S = 2 * 3600.0


def format_duration(seconds: float) -> str:
    """Write a time with three significant digits: `8.31 s`, `12.4 ms`, `3.2 us`."""
    if seconds == 0:
        return "0 s"
    for size, unit in _DURATIONS:
        if seconds >= size and not (size > 1 and seconds < _FEW_HOURS_S):
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-9)} ns"


def format_gib(size_bytes: float) -> str:
    """Write bytes in GiB (2^30), small ones in MiB or KiB."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if size_bytes >= size / 10:
            return f"{_three(size_bytes / size)} {unit}"
    return f"{_three(size_bytes / 2**10)} KiB" if size_bytes else "0 GiB"


def format_count(count: float) -> str:
    """Write a count in thousands, millions, billions: `8.03 B`, `505 k`."""
    for size, unit in _COUNTS:
        if count >= size:
            return f"{_three(count / size)} {unit}"
    return f"{_three(count)}"


def format_share(fraction: float) -> str:
    """Write a fraction in percent with one digit after the point."""
    return f"{100 * fraction:.1f} %"


def format_ranges(numbers: list[int]) -> str:
    """Write rising whole numbers shortly: `0-3, 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _three(value: float) -> str:
    """Write at least three significant digits, never an exponent."""
    hundred, ten = 100, 10
    if value >= hundred:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= ten else f"{value:.2f}"
