"""Numbers as people read them: counts, shares, ranges (`cost_models.units` has times and sizes)."""

from __future__ import annotations

_COUNTS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))


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
