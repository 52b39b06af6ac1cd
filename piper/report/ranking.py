"""The outcome of a search as text: the ranking, the Pareto front, and why the others lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models.units import format_bytes, format_duration
from piper.report.budget import budget_line
from piper.report.summary import aligned, assumption_lines, compare, heading_lines


def describe_search(found: Mapping[str, Any]) -> str:
    """Write the object of `piper search --json` for people."""
    if not found["best"]:
        conflict = found.get("conflict")
        because = [f"because     {conflict['reason']}"] if conflict else []
        parts = [["no strategy fits", *because], _rejected(found)]
    else:
        best, several = found["best"], "gpus" in found
        named = [
            (f"{result['n_gpus']} GPUs: " * several + result["strategy"]["shorthand"], result)
            for result in found["ranking"]
        ]
        parts = [
            [heading_lines(best)[0], *assumption_lines(found.get("defaults", {}))],
            [compare(named)],
            [
                f"best        {found['best']['strategy']['shorthand']}",
                *_bound(found),
                *_whole_run(best),
            ],
            _front(found),
            _rejected(found),
        ]
    parts.insert(-1, _numbers_of_gpus(found))
    if "target" in found:
        parts.append([_target(found["target"])])
    if found.get("robustness"):
        parts.append(_robustness(found["robustness"]))
    if "why_not" in found:
        parts.append(_why_not(found["why_not"]))
    parts.append([_counts(found)])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _bound(found: Mapping[str, Any]) -> list[str]:
    if found["gap"] is None:
        return []
    if found.get("objective") == "cost" and found["lower_bound_s"] is None:
        bound, better = f"{found['lower_bound_gpu_s']:.4g} GPU-seconds of a step", "costs less"
    elif found.get("objective") != "memory":
        bound, better = format_duration(found["lower_bound_s"]), "is faster"
    else:
        bound, better = format_bytes(found["lower_bound_bytes"]), "needs less"
    if found["gap"] == 0:
        return [f"bound       {bound}: nothing else in this space {better}, by our simulator"]
    return [
        f"bound       {bound}: nothing in this space {better} than that, {found['gap']:.1%} below the best"
    ]


def _whole_run(best: Mapping[str, Any]) -> list[str]:
    return [budget_line(best["run"])] if "run" in best else []


def _front(found: Mapping[str, Any]) -> list[str]:
    """Write the Pareto front, and how complete it is."""
    head = ["Pareto front", "GPUs", "step time", "peak memory"]
    rows = [
        [
            entry["strategy"]["shorthand"],
            str(entry["n_gpus"]),
            format_duration(entry["step_time_s"]),
            format_bytes(entry["peak_memory_bytes"]),
        ]
        for entry in found["pareto"]
    ]
    whole = "complete, by bounds" if found["pareto_complete"] else "of what was simulated"
    open_ = f": by their bounds {found['pareto_open']} others might be on it" if found["pareto_open"] else ""
    return [*aligned([head, *rows], left_columns=1), f"({whole}{open_})"]


def _numbers_of_gpus(found: Mapping[str, Any]) -> list[str]:
    """One line per number of GPUs that was tried."""
    if "gpus" not in found:
        return []
    rows = [["GPUs", "outcome", "strategy", "step time"]]
    for entry in found["gpus"]:
        seconds = entry["step_time_s"]
        rows.append(
            [
                str(entry["gpus"]),
                entry["outcome"],
                entry["strategy"] or entry.get("reason", "-"),
                "-" if seconds is None else format_duration(seconds),
            ]
        )
    return aligned(rows, left_columns=3)


def _target(target: Mapping[str, Any]) -> str:
    verdict = "met" if target["met"] else "not met"
    proof = ": nothing in this space can, by its bounds" if target["impossible"] else ""
    return f"target      {format_duration(target['step_time_s'])} a step: {verdict}{proof}"


def _robustness(found: Mapping[str, Any]) -> list[str]:
    """Say on which changed hardware the winner stays the best, and what it loses on the other."""
    lines = [
        f"robustness  best in {found['stays_best']:.0%} of the changes among the first "
        f"{found['strategies']}; regret at most {found['largest_regret']:.1%}"
    ]
    for row in found["changes"]:
        other = "" if row["stays_best"] else f", {row['regret']:.1%} less with {row['best']}"
        lines.append(f"  {row['change']:<20} {format_duration(row['winner_s'])}{other}")
    return lines


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
    if answer.get("slower_by_s") == 0:
        lines.append("  it is the best, or as fast")
    elif "slower_by_s" in answer:
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
