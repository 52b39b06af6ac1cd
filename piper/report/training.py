"""The outcome of a run as text: every step, the verdict, and prediction against measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_models.units import format_bytes, format_duration
from piper.report.quantities import format_count
from piper.report.summary import aligned

_WAYS = {
    "max_relative_error": "one process, same microbatches and order",
    "whole_batch_error": "one process, whole batch",
}


def describe_run(model: str, result: Mapping[str, Any]) -> str:
    """Write the object of `piper run --json` for people."""
    head = f"{model} on {result['world_size']} {result['device']} processes\nstrategy    {result['strategy']}"
    figures = [
        f"throughput  {format_count(result['tokens_per_s'])} tokens/s",
        f"memory      {format_bytes(result['peak_memory_bytes'])} at the worst rank",
        *_prediction(result),
    ]
    return "\n\n".join(
        [head, "\n".join(step_lines(result)), "\n".join(figures), "\n".join(verdict_lines(result))]
    )


def step_lines(result: Mapping[str, Any]) -> list[str]:
    """Write one line per optimizer step."""
    rows = [["step", "loss", "time", "gradient norm"]]
    for number, step in enumerate(result["steps"]):
        norm = "-" if step["grad_norm"] is None else f"{step['grad_norm']:.4g}"
        rows.append([str(number), f"{step['loss']:.6f}", format_duration(step["step_time_s"]), norm])
    return [f"  {line}" for line in aligned(rows)]


def verdict_lines(result: Mapping[str, Any]) -> list[str]:
    """Say whether the run equals one process, and the largest relative differences."""
    if result["verified"] is None:
        return ["verified    no (ask with --verify)"]
    lines = [
        f"verified    {'yes' if result['verified'] else 'NO, IT DIFFERS'}; largest relative difference to"
    ]
    return [*lines, *(f"  {line}" for line in difference_lines(result))]


def difference_lines(result: Mapping[str, Any]) -> list[str]:
    """Write the largest relative differences to each way of training with one process."""
    return [
        f"{way}: " + ", ".join(f"{name} {_error(value)}" for name, value in result[key].items())
        for key, way in _WAYS.items()
        if result[key] is not None
    ]


def _prediction(result: Mapping[str, Any]) -> list[str]:
    predicted = result["predicted_step_time_s"]
    if predicted is None:
        return []
    timed = [step["step_time_s"] for step in result["steps"]][1:] or [result["steps"][0]["step_time_s"]]
    measured = sum(timed) / len(timed)
    return [
        f"step time   {format_duration(measured)} measured (mean after the first step), "
        f"{format_duration(predicted)} predicted ({predicted / measured - 1:+.0%})"
    ]


def _error(value: float | None) -> str:
    if value is None:
        return "not compared"
    return "0 (bitwise)" if value == 0 else f"{value:.1e}"
