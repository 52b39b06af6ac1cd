"""A result as text: what was understood and assumed first, then the figures.

All functions take the object of `piper simulate --json` (CONTRACT) and return lines without colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from cost_models.units import format_bytes, format_duration
from piper.report.budget import budget_line
from piper.report.likeness import comparable_s, unlike
from piper.report.quantities import format_count, format_ranges, format_share

Result = Mapping[str, Any]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_BAR_WIDTH = 30
_MOST_RANKS = 8
_MANY_EQUAL = 4
_SHORT_CLASSES = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "buckets": "buckets",
    "communication": "comm",
    "workspace": "work",
}


def describe(result: Result) -> str:
    """Write one result in about 30 lines."""
    parts = [
        [*heading_lines(result), *assumption_lines(result["defaults"])],
        [*figure_lines(result), *([budget_line(result["run"])] if "run" in result else [])],
        ["where a step goes (mean over ranks)", *breakdown_lines(result)],
        memory_lines(result),
        [f"warning: {text}" for text in result["warnings"]],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def heading_lines(result: Result) -> list[str]:
    """Say what was understood: model, hardware, strategy."""
    model = f"{result['model']}, {format_count(result['n_parameters'])} parameters"
    cut = result.get("segments_per_stage", [])
    return [
        f"{model} on {result['n_gpus']} GPUs of {result['cluster']}",
        f"strategy    {result['strategy']['shorthand']}",
        *([f"stages      {_joined(cut)} segments"] if cut else []),
    ]


def _joined(counts: Sequence[int]) -> str:
    """Write counts as a sum; more than `_MANY_EQUAL` equal ones in a row once: 8 + 62 x 14 + 9."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return " + ".join(
        f"{times} x {count}" if times > _MANY_EQUAL else " + ".join([str(count)] * times)
        for count, times in runs
    )


def assumption_lines(defaults: Mapping[str, Any]) -> list[str]:
    """Say what was assumed, wrapped to the width of a terminal."""
    import textwrap

    assumed = ", ".join(f"{name} {_plain(value)}" for name, value in defaults.items())
    if not assumed:
        return []
    return textwrap.wrap(f"assumed     {assumed}", width=100, subsequent_indent=" " * 12)


def common_assumptions(results: Sequence[Result]) -> dict[str, Any]:
    """Return the defaults that hold for every result."""
    first = results[0]["defaults"].items()
    return {
        name: value
        for name, value in first
        if all(name in other["defaults"] and other["defaults"][name] == value for other in results)
    }


def figure_lines(result: Result) -> list[str]:
    """Step time with its band, throughput, MFU, memory."""
    band = result["error_band"]
    low, high = format_duration(band["step_time_low_s"]), format_duration(band["step_time_high_s"])
    return [
        f"step time   {format_duration(result['step_time_s'])}   (expected within {low} .. {high}; "
        f"prices {_sources(result)})",
        f"throughput  {format_count(result['tokens_per_s'])} tokens/s, "
        f"{format_count(result['tokens_per_s_per_gpu'])} tokens/s per GPU",
        f"MFU         {format_share(result['mfu'])} (convention {result['mfu_convention']}), "
        f"HFU {format_share(result['hfu'])}, {result['tflops_per_gpu']:.1f} TFLOP/s per GPU",
        f"bubble      {format_share(result['bubble_fraction'])} of the step; "
        f"compute idle {format_share(result['idle_fraction'])}",
        *bubble_lines(result),
        *memory_verdict(result),
    ]


def bubble_lines(result: Result) -> list[str]:
    """Say in which phases of a step the bubble lies, where there is any."""
    parts = result.get("bubble_s", {})
    if not any(parts.values()):
        return []
    named = (f"{name.replace('_', '-')} {format_duration(seconds)}" for name, seconds in parts.items())
    return [f"            {', '.join(named)}"]


def memory_verdict(result: Result) -> list[str]:
    """Say whether the worst rank fits, and with what."""
    limit, need = result["device_memory_bytes"], result["needed_memory_bytes"]
    verdict = (
        f"fits: {format_bytes(limit - need)} free of {format_bytes(limit)}"
        if result["fits"]
        else f"DOES NOT FIT: {format_bytes(need - limit)} more than the {format_bytes(limit)} of a device"
    )
    parts = (
        f"{format_bytes(result['peak_memory_bytes'])} allocated, "
        f"{format_bytes(result['peak_reserved_bytes'])} reserved, "
        f"{format_bytes(result['context_bytes'])} context, "
        f"{format_bytes(result['communicator_bytes'])} communicators"
    )
    return [f"memory      {verdict}", f"            {parts}"]


def breakdown_lines(result: Result) -> list[str]:
    """One line per part of the step that is not 0, with a bar."""
    step = result["step_time_s"]
    parts = [(name, value, value / step) for name, value in result["breakdown_s"].items() if value > 0]
    return [
        f"  {name:<16}{format_duration(value):>10}{format_share(share):>9}  {_bar(share)}".rstrip()
        for name, value, share in parts
    ]


def memory_lines(result: Result) -> list[str]:
    """Write a table of pipeline ranks with their memory classes at the rank's peak moment, with a title."""
    ranks = result["ranks"]
    unit, scale = _memory_unit(max(rank["peak_memory_bytes"] for rank in ranks))
    names = [
        name for name in _SHORT_CLASSES if any(rank["memory_by_class_bytes"].get(name, 0) for rank in ranks)
    ]
    rows = [["pp rank", "devices", "stages", *(_SHORT_CLASSES[name] for name in names), "peak", "at", "busy"]]
    rows += [_memory_row(rank, names, scale=scale) for rank in ranks[:_MOST_RANKS]]
    lines = [f"memory at each rank's peak, {unit}", *(f"  {line}" for line in aligned(rows))]
    left = len(ranks) - _MOST_RANKS
    return [*lines, f"  ... and {left} more (--json lists all)"] if left > 0 else lines


def compare(results: Sequence[tuple[str, Result]]) -> str:
    """Write several results side by side, each against the fastest one that fits.

    Args:
        results: (name, result) pairs, in the order in which they are shown.
    """
    times = comparable_s([result for _, result in results])
    best = min([t for t, (_, r) in zip(times, results, strict=True) if r["fits"]] or times)
    rows = [["strategy", "step time", "vs best", "MFU", "bubble", "exposed comm", "peak memory", "fits"]]
    rows += [
        [
            name,
            format_duration(result["step_time_s"]),
            f"{time / best - 1:+.1%}" if time != best else "best",
            format_share(result["mfu"]),
            format_share(result["bubble_fraction"]),
            format_share(exposed_s(result) / result["step_time_s"]),
            format_bytes(result["peak_memory_bytes"]),
            "yes" if result["fits"] else "NO",
        ]
        for time, (name, result) in zip(times, results, strict=True)
    ]
    notes = [f"note: {text}" for text in unlike([result for _, result in results])]
    return "\n".join([*aligned(rows, left_columns=1), *notes])


def exposed_s(result: Result) -> float:
    """Sum the communication that no computation hides, of all kinds."""
    return float(sum(value for name, value in result["breakdown_s"].items() if name.startswith("exposed_")))


def aligned(rows: Sequence[Sequence[str]], *, left_columns: int = 0) -> list[str]:
    """Pad cells to columns two spaces apart; the first `left_columns` are flush left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _memory_unit(size_bytes: int) -> tuple[str, int]:
    """Return the largest unit of which there is at least a tenth, so that two decimals tell sizes apart."""
    return next(((unit, scale) for unit, scale in _UNITS if 10 * size_bytes >= scale), _UNITS[-1])


def _memory_row(rank: Mapping[str, Any], names: Sequence[str], *, scale: int) -> list[str]:
    classes = rank["memory_by_class_bytes"]
    return [
        str(rank["pipeline_rank"]),
        str(rank["n_devices"]),
        format_ranges(list(rank["stages"])),
        *(f"{classes.get(name, 0) / scale:.2f}" for name in names),
        f"{rank['peak_memory_bytes'] / scale:.2f}",
        format_duration(rank["peak_at_s"]),
        format_duration(rank["busy_s"]),
    ]


def _sources(result: Result) -> str:
    shares = sorted(result["provenance"].items(), key=lambda item: -item[1])
    return ", ".join(f"{share:.0%} {name}" for name, share in shares if share > 0)


def _bar(fraction: float) -> str:
    return "█" * round(_BAR_WIDTH * fraction)


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{name} {_plain(part)}" for name, part in value.items()) + ")"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_plain(part) for part in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
