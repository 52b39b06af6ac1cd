"""The outcome of a search as text: the ranking, the Pareto front, and why the others lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models.units import format_bytes, format_duration
from piper.report.summary import aligned, assumption_lines, compare, heading_lines


def describe_search(found: Mapping[str, Any]) -> str:
    """Write the object of `piper search --json` for people."""
    if not found["ranking"]:
        parts = [["no strategy fits"], _rejected(found)]
    else:
        best = found["ranking"][0]
        named = [(result["strategy"]["shorthand"], result) for result in found["ranking"]]
        parts = [
            [heading_lines(best)[0], *assumption_lines(found.get("defaults", {}))],
            [compare(named)],
            [f"best        {best['strategy']['shorthand']}", *_bound(found)],
            _rejected(found),
        ]
    if "why_not" in found:
        parts.append(_why_not(found["why_not"]))
    parts.append([_counts(found)])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _bound(found: Mapping[str, Any]) -> list[str]:
    if found["lower_bound_s"] is None:
        return []
    bound, better = format_duration(found["lower_bound_s"]), "is faster"
    if found.get("objective") == "memory":
        bound, better = format_bytes(found["lower_bound_bytes"]), "needs less"
    if found["gap"] == 0:
        return [f"bound       {bound}: nothing else in this space {better}, by our simulator"]
    return [
        f"bound       {bound}: nothing in this space {better} than that, {found['gap']:.1%} below the best"
    ]


def _rejected(found: Mapping[str, Any]) -> list[str]:
    """One line per family that lost, with its best time and the reasons by count."""
    families: dict[str, list[Mapping[str, Any]]] = {}
    for entry in found["rejected"]:
        families.setdefault(entry["family"], []).append(entry)
    if not families:
        return []
    rows = [["family", "at best", "why not"]]
    for family, entries in families.items():
        times = [entry["best_s"] for entry in entries if entry["best_s"] is not None]
        reasons = ", ".join(f"{entry['count']} {entry['reason']}" for entry in entries)
        rows.append([family, format_duration(min(times)) if times else "-", reasons])
    return aligned(rows, left_columns=3)


def _why_not(answer: Mapping[str, Any]) -> list[str]:
    """Say how the best strategy with the values that were asked about loses."""
    asked = ",".join(f"{name}={value}" for name, value in answer["asked"].items())
    reason = "" if answer["reason"] in {"", answer["status"]} else f": {answer['reason']}"
    lines = [f"why not {asked}? {answer.get('strategy', 'none')}: {answer['status']}{reason}"]
    if "slower_by_s" in answer:
        lines.append(f"  slower by {format_duration(answer['slower_by_s'])}:")
        causes = sorted(answer["by_cause_s"].items(), key=lambda item: -abs(item[1]))
        lines += [f"    {name:<16}{1e3 * seconds:+.1f} ms" for name, seconds in causes if seconds]
    elif "bound_s" in answer:
        bound, winner = format_duration(answer["bound_s"]), format_duration(answer["winner_s"])
        lines.append(f"  it takes at least {bound}, the best {winner}")
    return lines


def _counts(found: Mapping[str, Any]) -> str:
    wall = found["timings_s"]["wall"]
    pruned = ", ".join(
        f"{count} {reason.replace('_', ' ')}" for reason, count in found["pruned"].items() if count
    )
    return (
        f"{found['space_size']} strategies: {found['simulated']} simulated, not needed: {pruned or 'none'}; "
        f"{format_duration(wall)}, ended by {found['ended_by'].replace('_', ' ')}"
    )
