"""Robust least squares over the figures of a catalogue file: content + parameters + rows -> fitted content.

[Note: fit]
A parameter is a figure of a YAML file, named by its dotted key. The fit moves its logarithm within bounds, so
that sum over rows of rho(log(predicted / measured)) + sum over parameters of (log(value / prior) / sigma)^2
is least, with rho the soft absolute error (Huber 1981): a few disturbed measurements do not bend it, and
what the rows do not tell stays where it was. Predictions come from the reader of the file and the cost model
that uses it, so that whatever the fit finds is what a simulation will use.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Content = dict[str, Any]

_SOFT = 0.1
"""Errors beyond 10 % count linearly: about the noise between two measurements of one kernel."""

SURE, FREE = 0.3, 1.5
"""Priors: a factor of 1.35 or of 4.5 is one standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A figure that is fitted.

    Args:
        key: dotted name in the file.
        prior: where it is expected, in base units.
        low, high: bounds.
        unit: appended to the number in the file ("us", or "" for a plain number).
        scale: base units in one `unit`.
        sigma: standard deviation of the prior, of the logarithm.
    """

    key: str
    prior: float
    low: float
    high: float
    unit: str = ""
    scale: float = 1.0
    sigma: float = FREE

    def at(self, log: float) -> float:
        """Return the value of a logarithm, within the bounds to the last bit."""
        return min(max(math.exp(log), self.low), self.high)

    def text(self, value: float) -> str | float:
        """Return the value as the file has it, with four digits."""
        digits = float(f"{value / self.scale:.4g}")
        return f"{digits:g}{self.unit}" if self.unit else digits


def overlaid(content: Content, values: dict[str, str | float]) -> Content:
    """Return a copy of a file's content with other values at dotted keys."""
    found = copy.deepcopy(content)
    for key, value in values.items():
        *sections, name = key.split(".")
        section = found
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return found


def fit(
    parameters: Sequence[Parameter],
    predict: Callable[[dict[str, str | float]], Sequence[float]],
    measured_s: Sequence[float],
) -> dict[str, str | float]:
    """Return the values of `parameters` by key; see [Note: fit].

    Args:
        parameters: to move.
        predict: values by key -> seconds of every row.
        measured_s: of every row.
    """
    if not parameters or not measured_s:
        return {}
    from scipy.optimize import least_squares  # 0.3 s, needed only here

    low, high = (np.log([getattr(p, side) for p in parameters]) for side in ("low", "high"))
    prior = np.log([p.prior for p in parameters])
    sigma = np.array([p.sigma for p in parameters])
    measured = np.log(measured_s)

    def values(logs: Floats) -> dict[str, str | float]:
        # More digits than the file has: rounding would hide the slope.
        return {
            p.key: f"{p.at(x) / p.scale:.12g}{p.unit}" if p.unit else p.at(x)
            for p, x in zip(parameters, logs, strict=True)
        }

    def residuals(logs: Floats) -> Floats:
        errors = (np.log(predict(values(logs))) - measured) / _SOFT
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([soft, (logs - prior) / sigma])

    start = np.clip(prior, low + 1e-9, high - 1e-9)
    found = least_squares(residuals, start, bounds=(low, high), diff_step=1e-4)
    return {p.key: p.text(p.at(x)) for p, x in zip(parameters, found.x, strict=True)}
