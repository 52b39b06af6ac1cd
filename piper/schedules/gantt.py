"""A schedule as text: one line per pipeline rank, time to the right."""

from __future__ import annotations

import math
from fractions import Fraction

from piper.schedules.preview import Preview, Span
from simulator.plan.task import TaskKind, TaskName

_LETTERS = {TaskKind.BI: "I", TaskKind.BW: "W"}
"""Of passes too short for their names; else the first letter of the kind."""
_MARGIN = len("rank 000 ")


def draw_gantt(preview: Preview, *, width: int = 160) -> str:
    """Return the lines of a schedule, at most `width` characters wide where passes still fit.

    Each pass begins with "|" and its name, "F0" (rank with one stage) or "2F0"; a pass too short for its
    name shows a letter alone (I: BI, W: BW), idle time is dots. The last line is a scale in the unit of the
    costs.
    """
    per_unit = _characters_per_unit(preview, max(width - _MARGIN, 1))
    lines = []
    for rank, row in enumerate(preview.spans):
        single = len(preview.stages[rank]) == 1
        line = ["."] * math.ceil(preview.makespan * per_unit)
        for span in row:
            first, last = math.floor(span.start * per_unit), math.floor(span.end * per_unit)
            line[first:last] = _box(span, last - first, single=single)
        lines.append(f"rank {rank:<4}" + "".join(line))
    scale = f"0 .. {_shown(preview.makespan)}, one character = {_shown(1 / per_unit)}"
    return "\n".join([*lines, " " * _MARGIN + scale]) + "\n"


def _characters_per_unit(preview: Preview, width: int) -> Fraction:
    """Return the scale: whole characters per smallest step of time, as many as names need and `width` has."""
    spans = [span for row in preview.spans for span in row]
    step = Fraction(
        math.gcd(*(time.numerator * (_common(spans) // time.denominator) for time in _times(spans))),
        _common(spans),
    )
    steps = preview.makespan / step
    if steps > width:
        return width / preview.makespan
    shortest = min(span.end - span.start for span in spans) / step
    single = all(len(held) == 1 for held in preview.stages)
    widest = max(len(_name(span, single=single)) for span in spans) + 1
    wanted = math.ceil(widest / shortest)
    return Fraction(min(wanted, math.floor(width / steps))) / step


def _common(spans: list[Span]) -> int:
    return math.lcm(*(time.denominator for time in _times(spans)))


def _times(spans: list[Span]) -> list[Fraction]:
    return [time for span in spans for time in (span.start, span.end)]


def _name(span: Span, *, single: bool) -> str:
    return "+".join(_short(task, single=single) for task in span.tasks)


def _short(task: TaskName, *, single: bool) -> str:
    return f"{task.kind.name}{task.microbatch}" if single else task.code


def _box(span: Span, length: int, *, single: bool) -> str:
    name = _name(span, single=single)
    if len(name) < length:
        return f"|{name}".ljust(length, " ")
    kind = span.tasks[0].kind
    return ("|" if length > 1 else "") + _LETTERS.get(kind, kind.name[0]) * (length - (length > 1))


def _shown(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"
