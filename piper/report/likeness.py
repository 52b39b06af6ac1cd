"""Whether results may be compared step by step: steps of different batches are compared by time per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]


def tokens_per_step(result: Result) -> int:
    """Return how many tokens a step takes."""
    return round(float(result["tokens_per_s"]) * float(result["step_time_s"]))


def comparable_s(results: Sequence[Result]) -> list[float]:
    """Return step times that may be compared: where batches differ, for as many tokens as the first has."""
    tokens = [tokens_per_step(result) for result in results]
    return [
        result["step_time_s"] * (1 if own == tokens[0] else tokens[0] / own)
        for result, own in zip(results, tokens, strict=True)
    ]


def unlike(results: Sequence[Result]) -> list[str]:
    """Say in a line each in what results differ that are shown side by side."""
    found = []
    tokens = list(dict.fromkeys(tokens_per_step(result) for result in results))
    if len(tokens) > 1:
        counts = " and ".join(f"{count:,}" for count in tokens)
        found.append(
            f"steps take different numbers of tokens ({counts}): the comparison is of time per token; "
            "--global-batch gives all the same"
        )
    for key, name in (("model", "models"), ("n_gpus", "numbers of GPUs"), ("cluster", "clusters")):
        values = list(dict.fromkeys(str(result[key]) for result in results))
        if len(values) > 1:
            found.append(f"different {name} are compared: {', '.join(values)}")
    return found
