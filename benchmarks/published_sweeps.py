"""How much slower the search's picks in published sweeps are than the best layout that was measured.

A sweep is a set of published runs (`published_runs/`, each with its source) of one model on one machine with
one batch and the same kernels, of which at least eight different layouts were measured. Every layout is
predicted, runs that did not fit included, with parameters fitted to the other half of the runs. The pick is
the fastest layout that is predicted to fit; the regret is how much slower it was than the best one measured.
Rules of thumb choose among the layouts that are known to fit; we do not know them. `without_odd_runs` leaves
out the runs that no other run agrees with (`piper.validation.odd_runs`). `free` is what the search itself
picks where it may combine the values of a sweep as it likes (`sweeps_searched.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from scipy.stats import kendalltau

from benchmarks.sweeps_searched import search_sweeps
from piper.validation.halves import predict_halves
from piper.validation.odd_runs import ODD_RUNS
from piper.validation.predictions import RowPrediction
from piper.validation.rows import PublishedRow, read_rows

FOLDER = Path(__file__).parent / "published_runs"
SOURCES = ("hagemann2023", "vtrain2024_multi_node", "vtrain2024_single_node", "moe_parallel_folding2025")
"""Files of `published_runs` that hold sweeps over layouts."""
LEAST_LAYOUTS = 8
TOP = 5
QUICK = 6
"""Sweeps that --quick predicts."""
_LAYOUT = (
    "tp", "pp", "vp", "cp", "ep", "dp", "zero_stage", "sequence_parallel", "act_ckpt", "micro_batch",
    "schedule",
)  # fmt: skip
_KERNELS = ("heads", "framework", "flash_attention")
Layout = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs of a sweep by layout.

    Args:
        name: for people.
        runs: by layout, its repeats.
    """

    name: str
    runs: dict[Layout, list[PublishedRow]]

    @property
    def rows(self) -> list[PublishedRow]:
        """Return all runs."""
        return [row for listed in self.runs.values() for row in listed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few sweeps")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    began_s = time.perf_counter()
    sweeps = sweeps_of(read_rows([FOLDER / f"{name}.csv" for name in SOURCES]))
    found = score_sweeps(sweeps[:QUICK] if options.quick else sweeps)
    if not options.json:
        print(table(found["sweeps"]))
    print(json.dumps(found | {"seconds": round(time.perf_counter() - began_s, 1)}))


def sweeps_of(rows: Sequence[PublishedRow]) -> list[Sweep]:
    """Return the sweeps among published runs."""
    groups: dict[str, dict[Layout, list[PublishedRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        fused = "RMSNorm kernel=yes" in row.text("notes")
        if row.file == "hagemann2023" and not (fused and row.text("flash_attention") == "flash_attention2"):
            continue
        key = "|".join([row.group, *(row.text(name) for name in _KERNELS)])
        groups[key][tuple(row.text(name) for name in _LAYOUT)].append(row)
    return [
        Sweep(name=name, runs=dict(runs))
        for name, runs in groups.items()
        if sum(any(not row.oom for row in listed) for listed in runs.values()) >= LEAST_LAYOUTS
    ]


def score_sweeps(sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """Return regrets, verdicts and rules of thumb of sweeps, and their summary."""
    predicted = predict_sweeps(sweeps)
    kept = _summary(_scored([without_odd_runs(sweep) for sweep in sweeps], predicted))
    scored = _scored(sweeps, predicted)
    return {
        **_summary(scored),
        "without_odd_runs": kept,
        "free": search_sweeps([(sweep.name, sweep.rows) for sweep in sweeps], predicted),
        "sweeps": scored,
    }


def predict_sweeps(sweeps: Sequence[Sweep]) -> dict[str, RowPrediction]:
    """Return the prediction of every run of sweeps by its name."""
    rows = [row for sweep in sweeps for row in sweep.rows]
    return dict(zip((row.case_id for row in rows), predict_halves(rows), strict=True))


def without_odd_runs(sweep: Sweep) -> Sweep:
    """Return a sweep without the runs that no other run agrees with."""
    kept = {
        layout: [row for row in listed if row.case_id not in ODD_RUNS]
        for layout, listed in sweep.runs.items()
    }
    return Sweep(name=sweep.name, runs={layout: listed for layout, listed in kept.items() if listed})


def _scored(sweeps: Sequence[Sweep], predicted: Mapping[str, RowPrediction]) -> list[dict[str, Any]]:
    scored = (_score(sweep, predicted) for sweep in sweeps)
    return [each for each in scored if each is not None]


def _summary(scored: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rules = {name: [each["rules"][name] for each in scored] for name in RULES}
    best_rule = min(rules, key=lambda name: fmean(rules[name]))
    ours = [each["regret_1"] for each in scored]
    return {
        "n_sweeps": len(scored),
        "regret_1_mean": fmean(ours),
        "regret_1_max": max(ours),
        "regret_5_mean": fmean(each["regret_5"] for each in scored),
        "regret_5_max": max(each["regret_5"] for each in scored),
        "false_oom": _share(sum(e["false_oom"] for e in scored), sum(e["n_ran"] for e in scored)),
        "missed_oom": _share(sum(e["missed_oom"] for e in scored), sum(e["n_oom"] for e in scored)),
        "oom_in_top_5": sum(each["oom_in_top_5"] > 0 for each in scored),
        "kendall_tau_mean": fmean(each["kendall_tau"] for each in scored),
        "mape_mean": fmean(each["mape"] for each in scored),
        "rules_mean": {name: fmean(regrets) for name, regrets in rules.items()},
        "best_rule": best_rule,
        "no_worse_than_best_rule": fmean(
            mine <= rule + 1e-9 for mine, rule in zip(ours, rules[best_rule], strict=True)
        ),
    }


def _score(sweep: Sweep, predicted: Mapping[str, RowPrediction]) -> dict[str, Any] | None:
    """Return the score of one sweep; None where too few of its layouts can be predicted."""
    ran, oom = [], []
    for listed in sweep.runs.values():
        prediction = predicted[listed[0].case_id]
        measured_s = [predicted[row.case_id].measured_s for row in listed]
        times = [time_s for time_s in measured_s if time_s is not None]
        if prediction.predicted_s is None:
            continue
        if times:
            ran.append((prediction, median(times), listed[0]))
        elif any(row.oom for row in listed):
            oom.append(prediction)
    if len(ran) < LEAST_LAYOUTS:
        return None
    best = min(measured for _, measured, _ in ran)
    picks = [(p.predicted_s or math.inf, measured) for p, measured, _ in ran if p.fits]
    picks += [(p.predicted_s or math.inf, math.inf) for p in oom if p.fits]
    picks = sorted(picks) or sorted((p.predicted_s or math.inf, measured) for p, measured, _ in ran)
    run_first = next(measured for _, measured in picks if measured < math.inf)
    top = [measured for _, measured in picks[:TOP]]
    tau = float(
        kendalltau([p.predicted_s for p, _, _ in ran], [measured for _, measured, _ in ran]).statistic
    )
    return {
        "sweep": sweep.name,
        "n_ran": len(ran),
        "n_oom": len(oom),
        "regret_1": run_first / best - 1,
        "regret_5": min(min(top), run_first) / best - 1,
        "pick_is_oom": picks[0][1] == math.inf,
        "oom_in_top_5": sum(measured == math.inf for measured in top),
        "false_oom": sum(not p.fits for p, _, _ in ran),
        "missed_oom": sum(bool(p.fits) for p in oom),
        "kendall_tau": tau if math.isfinite(tau) else 0.0,
        "mape": fmean(abs((p.predicted_s or 0.0) / measured - 1) for p, measured, _ in ran),
        "rules": {
            name: min(ran, key=lambda each: (rule(each[2]), each[2].case_id))[1] / best - 1
            for name, rule in RULES.items()
        },
    }


def _degree(row: PublishedRow, name: str) -> int:
    return row.integer(name) or 1


RULES: dict[str, Callable[[PublishedRow], tuple[int, ...]]] = {
    "least tp x pp, prefer tp, large microbatches": lambda row: (
        _degree(row, "tp") * _degree(row, "pp"), _degree(row, "pp"), -_degree(row, "micro_batch"),
    ),
    "least tp x pp, prefer pp, small microbatches": lambda row: (
        _degree(row, "tp") * _degree(row, "pp"), _degree(row, "tp"), _degree(row, "micro_batch"),
    ),
    "tp = 8 first": lambda row: (
        abs(_degree(row, "tp") - 8), _degree(row, "pp"), -_degree(row, "micro_batch"),
    ),
}  # fmt: skip
"""Rules of thumb: the layout with the smallest key, of those that fit."""


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def table(sweeps: Sequence[dict[str, Any]]) -> str:
    """Return the scores for people."""
    head = f"{'regret@1':>9}{'regret@5':>9}{'tau':>6}{'mape':>7}{'ran':>5}{'oom':>5}  sweep"
    return "\n".join([head, *map(_line, sweeps)])


def _line(each: dict[str, Any]) -> str:
    return (
        f"{each['regret_1']:9.1%}{each['regret_5']:9.1%}{each['kendall_tau']:6.2f}{each['mape']:7.1%}"
        f"{each['n_ran']:5}{each['n_oom']:5}  {each['sweep']}"
    )


if __name__ == "__main__":
    main()
