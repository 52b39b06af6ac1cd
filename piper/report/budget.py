"""A whole run: from the time of a step to days, GPU-hours and, at a price, cost.

[Note: prices]
Prices are the user's: a number per GPU and hour, or a file such as

    schema_version: 1
    currency: EUR
    gpu_hour:
      h100-sxm: {price: 2.10, source: offer of 2026-03}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.documents import UnreadableError, is_file, parse_yaml, read_text
from cost_models.errors import nearest
from piper.errors import JobError

_DAY_S = 86400.0
_HOUR_S = 3600.0
_VERSION = 1
_FIX = "write a number per GPU and hour, or name a file with schema_version, currency and gpu_hour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one GPU costs in an hour.

    Args:
        per_gpu_hour: in `currency`.
        currency: or "" where the user gave a number alone.
        source: of the figure.
    """

    per_gpu_hour: float
    currency: str = ""
    source: str = "--price"


def price_of(text: str, *, gpu: str) -> Price:
    """Read a price: a number, or a file ([Note: prices]) that has one for a GPU of our catalogue.

    Raises: JobError for what is neither, and for a file without this GPU.
    """
    number = _number(text)
    if number is not None:
        return Price(per_gpu_hour=number)
    path = Path(text)
    if not is_file(path):
        raise JobError(
            where="command line", field="--price", value=text, rule="is no number > 0 and no file", fix=_FIX
        )
    try:
        content = parse_yaml(read_text(path))
    except UnreadableError as problem:
        raise _bad(text, "file", text, rule=str(problem)) from problem
    prices = _prices(content, where=text)
    names = {str(name).lower().replace("_", "-"): entry for name, entry in prices.items()}
    if gpu not in names:
        raise JobError(
            where=text, field="gpu_hour", value=gpu, rule="is not in it", fix=nearest(gpu, list(prices))
        )
    entry = names[gpu]
    price = _number(str(entry.get("price"))) if isinstance(entry, Mapping) else None
    if price is None or not isinstance(entry.get("source"), str):
        rule = "must be a price > 0 with its source"
        raise _bad(text, f"gpu_hour.{gpu}", entry, rule=rule)
    return Price(per_gpu_hour=price, currency=str(content["currency"]), source=f"{text}: {entry['source']}")


def budget(
    tokens: int, *, step_time_s: float, tokens_per_s: float, n_gpus: int, price: Price | None = None
) -> dict[str, Any]:
    """Return what training on so many tokens takes: the object `run` of a result.

    Args:
        tokens: of the whole run; the last step may be partly beyond them.
        step_time_s, tokens_per_s, n_gpus: of a result.
        price: or None: no cost.
    """
    steps = math.ceil(tokens / (tokens_per_s * step_time_s) - 1e-9)
    seconds = steps * step_time_s
    gpu_hours = n_gpus * seconds / _HOUR_S
    found: dict[str, Any] = {
        "tokens": tokens, "steps": steps, "days": seconds / _DAY_S, "gpu_hours": gpu_hours,
    }  # fmt: skip
    if price is not None:
        found |= {
            "cost": gpu_hours * price.per_gpu_hour,
            "currency": price.currency,
            "price_per_gpu_hour": price.per_gpu_hour,
            "price_source": price.source,
        }
    return found


def budget_line(run: Mapping[str, Any]) -> str:
    """Say what the whole run takes."""
    text = f"whole run   {run['tokens']:,} tokens: {run['steps']:,} steps, {run['days']:.1f} days"
    text += f", {run['gpu_hours']:,.0f} GPU-hours"
    if "cost" in run:
        text += f", {run['cost']:,.0f} {run['currency']}".rstrip()
    return text


def _prices(content: object, *, where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping) or content.get("schema_version") != _VERSION:
        raise _bad(where, "schema_version", None, rule=f"must be {_VERSION}")
    for name, kind in (("currency", str), ("gpu_hour", Mapping)):
        if not isinstance(content.get(name), kind):
            raise _bad(where, name, content.get(name), rule="must be there")
    found: Mapping[str, Any] = content["gpu_hour"]
    return found


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def _bad(where: str, field: str, value: object, *, rule: str) -> JobError:
    return JobError(where=where, field=field, value=value, rule=rule, fix=_FIX)
