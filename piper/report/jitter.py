"""The section `jitter` of a result as text: the distribution of step times, and who is to blame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models.units import format_duration
from piper.report.summary import aligned


def jitter_lines(section: Mapping[str, Any]) -> list[str]:
    """Write the section in a dozen lines."""
    times = section["step_time_s"]
    runs = "1 run" if section["runs"] == 1 else f"{section['runs']} runs"
    shown = "  ".join(f"{name} {format_duration(value)}" for name, value in times.items())
    return [
        f"jitter      {section['spec']}",
        f"            {runs} of {section['steps']} steps from seed {section['seed']}",
        f"step time   {shown}",
        f"            {section['slowdown']:.3f} x the {format_duration(section['undisturbed_step_time_s'])} "
        "without jitter",
        *(
            f"            {_signed(entry['costs_s'])} from {entry['clause']}"
            for entry in section["clauses"]
            if len(section["clauses"]) > 1
        ),
        *_blame_lines(section["blame"]),
    ]


def _blame_lines(blame: list[Mapping[str, Any]]) -> list[str]:
    if not blame:
        return ["            nobody waits longer for anybody than without jitter"]
    rows = [["rank", "node", "pp rank", "others wait for it", "more than planned", "healthy it saves"]]
    rows += [
        [
            row["ranks"],
            str(row["node"]),
            str(row["pipeline_rank"]),
            format_duration(row["waited_for_s"]),
            format_duration(row["excess_s"]),
            "" if row["saves_s"] is None else _signed(row["saves_s"]),
        ]
        for row in blame
    ]
    return [
        "who is late, per step (sum of the waits of all others)",
        *(f"  {line}" for line in aligned(rows)),
    ]


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_duration(abs(seconds))}"
