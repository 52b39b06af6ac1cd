"""Predictions of published runs -> errors, verdicts and rankings by source, as in `piper validate --json`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from piper.validation.predictions import RowPrediction

LEAST_LAYOUTS = 4
"""A ranking group has at least so many."""

_LAYOUT = (
    "tp", "pp", "vp", "cp", "ep", "dp", "zero_stage", "sharding", "sequence_parallel", "act_ckpt",
    "micro_batch", "schedule", "flash_attention", "framework",
)  # fmt: skip
_NINTH = 90


def scores(predictions: Sequence[RowPrediction]) -> dict[str, Any]:
    """Return the object of `piper validate --json`, without timings."""
    by_source: dict[str, list[RowPrediction]] = defaultdict(list)
    for prediction in predictions:
        by_source[prediction.row.file].append(prediction)
    skipped = Counter(p.reason for p in predictions if p.reason)
    assumed = Counter(field for p in predictions for field in p.assumed)
    return {
        "overall": score(predictions),
        "by_source": {name: score(listed) for name, listed in by_source.items()},
        "n_rows": len(predictions),
        "skipped": [{"reason": reason, "count": count} for reason, count in skipped.most_common()],
        "assumed": [{"field": field, "count": count} for field, count in assumed.most_common()],
    }


def score(predictions: Sequence[RowPrediction]) -> dict[str, Any]:
    """Return the score of some runs; None where there is nothing to score. Fractions, not percent."""
    errors = [p.error for p in predictions if p.error is not None]
    sizes = [abs(error) for error in errors]
    memory = [
        p.predicted_bytes / p.measured_bytes - 1
        for p in predictions
        if p.predicted_bytes is not None and p.measured_bytes is not None
    ]
    return {
        "n": len(predictions),
        "n_time": len(errors),
        "mape": fmean(sizes) if sizes else None,
        "median_ape": median(sizes) if sizes else None,
        "p90_ape": float(np.percentile(sizes, _NINTH)) if sizes else None,
        "bias": fmean(errors) if errors else None,
        "n_memory": len(memory),
        "memory_mape": fmean(map(abs, memory)) if memory else None,
        "memory_bias": fmean(memory) if memory else None,
        "oom": _verdicts(predictions),
        "ranking": _ranking(predictions),
        "band_coverage": _coverage(predictions),
    }


def _verdicts(predictions: Sequence[RowPrediction]) -> dict[str, Any]:
    """Return how well "does not fit" is predicted; None where a class is missing."""
    known = [p for p in predictions if p.fits is not None and p.row.text("oom")]
    found = Counter((p.row.oom, not p.fits) for p in known)
    right, missed = found[True, True], found[True, False]
    false, kept = found[False, True], found[False, False]
    recall = right / (right + missed) if right + missed else None
    specificity = kept / (kept + false) if kept + false else None
    both = None if recall is None or specificity is None else (recall + specificity) / 2
    return {
        "n": len(known),
        "precision": right / (right + false) if right + false else None,
        "recall": recall,
        "balanced_accuracy": both,
    }


def _coverage(predictions: Sequence[RowPrediction]) -> float | None:
    inside = [
        p.low_s <= p.measured_s <= p.high_s
        for p in predictions
        if p.measured_s is not None and p.low_s is not None and p.high_s is not None
    ]
    return fmean(inside) if inside else None


def _ranking(predictions: Sequence[RowPrediction]) -> dict[str, Any]:
    """Return how good the layouts are that are predicted to be the fastest."""
    groups: dict[str, dict[tuple[str, ...], list[RowPrediction]]] = defaultdict(lambda: defaultdict(list))
    for prediction in predictions:
        if prediction.error is not None:
            layout = tuple(prediction.row.text(name) for name in _LAYOUT)
            groups[prediction.row.group][layout].append(prediction)
    regrets, hits, taus = [], 0, []
    for layouts in groups.values():
        merged = [_median_of(listed) for listed in layouts.values()]
        if len(merged) < LEAST_LAYOUTS:
            continue
        predicted = [p.predicted_s or math.inf for p in merged]
        measured = [p.measured_s or math.inf for p in merged]
        pickable = [index for index, p in enumerate(merged) if p.fits] or list(range(len(merged)))
        pick = min(pickable, key=lambda index: predicted[index])
        best = min(measured)
        regrets.append(measured[pick] / best - 1)
        hits += measured[pick] == best
        taus.append(float(kendalltau(predicted, measured).statistic))
    taus = [tau for tau in taus if math.isfinite(tau)]
    return {
        "n_groups": len(regrets),
        "top1_hits": hits,
        "regret_mean": fmean(regrets) if regrets else None,
        "regret_max": max(regrets) if regrets else None,
        "kendall_tau": fmean(taus) if taus else None,
    }


def _median_of(repeats: Sequence[RowPrediction]) -> RowPrediction:
    """Return the first of several repeats with the median of their times."""
    return replace(repeats[0], measured_s=median(p.measured_s or math.nan for p in repeats))
