"""Seconds and an error -> `Price` ([Note: error of a figure] in `gpu.py`)."""

from __future__ import annotations

from cost_models.price import Price, Provenance


def band(seconds: float, *, error: float, provenance: Provenance) -> Price:
    """Return the price whose band holds every truth t with |seconds / t - 1| <= error.

    Args:
        seconds: prediction, >= 0.
        error: reported relative error, in [0, 1).
        provenance: where the figure comes from.
    """
    return Price(
        seconds=seconds, low_s=seconds / (1 + error), high_s=seconds / (1 - error), provenance=provenance
    )
