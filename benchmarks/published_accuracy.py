"""Predictions beside 2,002 published training runs: errors by source, compared with those of before.

The runs are in `published_runs/`, each with its source. Predictions are made twice: with the parameters
that are shipped, and swapped (each half of the runs with parameters fitted to the other half). `--update`
writes the scores and `docs/accuracy.md`; without it the script fails where a source has become worse by over
0.5 points.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from cost_models.catalogue import figure_of
from piper.validation.fitting.parameters import PARAMETERS
from piper.validation.halves import fitted_to, predict_halves
from piper.validation.odd_runs import ODD_RUNS
from piper.validation.predictions import RowPrediction, predict_rows
from piper.validation.rows import read_rows
from piper.validation.scores import scores

FOLDER = Path(__file__).parent / "published_runs"
SCORES = FOLDER / "scores.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
WORSE = 0.005
"""By which the mean error of a source may grow unnoticed."""
EVERY = 16
"""--quick predicts one run of so many of each source, but all where there are few."""
FEW = 40
PARAMETERS_BEGIN = "<!-- parameters: benchmarks/published_accuracy.py --update -->\n"
PARAMETERS_END = "<!-- end of parameters -->\n"
BEGIN, END = "<!-- scores: benchmarks/published_accuracy.py --update -->\n", "<!-- end of scores -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a part of the runs; compared with nothing")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--update", action="store_true", help="write the scores and docs/accuracy.md")
    options = parser.parse_args()
    rows = read_rows(sorted(FOLDER.glob("*.csv")))
    if options.quick:
        sizes = {row.file: sum(other.file == row.file for other in rows) for row in rows}
        rows = [row for number, row in enumerate(rows) if number % EVERY == 0 or sizes[row.file] < FEW]
    began_s = time.perf_counter()
    shipped = predict_rows(rows)
    shipped_s = time.perf_counter() - began_s
    found = {"shipped": summary(shipped), "swapped": summary(predict_halves(rows))}
    if not options.json:
        print(table(found))
    worse = []
    if options.update:
        SCORES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
        page = between(page, BEGIN, END, text=table(found))
        page = between(page, PARAMETERS_BEGIN, PARAMETERS_END, text=parameter_table())
        PAGE.write_text(page, encoding="utf-8")
    elif not options.quick:
        worse = worsened(found, json.loads(SCORES.read_text(encoding="utf-8")))
    print(json.dumps(found | {"worse": worse, "predict_s": round(shipped_s, 1), "n_rows": len(rows)}))
    sys.exit(1 if worse else 0)


def summary(predictions: list[RowPrediction]) -> dict[str, Any]:
    """Return the scores of all runs, and those without the odd ones."""
    usual = [p for p in predictions if p.row.case_id not in ODD_RUNS]
    every, clean = scores(predictions), scores(usual)
    return {
        "overall": every["overall"],
        "skipped": every["skipped"],
        "by_source": {
            name: score | {"mape_without_odd": clean["by_source"][name]["mape"]}
            for name, score in every["by_source"].items()
        },
    }


def between(page: str, begin: str, end: str, *, text: str) -> str:
    """Return the page with another text between two marks."""
    return page.partition(begin)[0] + begin + text + end + page.partition(end)[2]


def parameter_table() -> str:
    """Return every parameter with its value, and those of the fits to the halves."""
    halves = {half: dict(fitted_to(half)) for half in ("a", "b")}
    lines = ["| parameter | prior | value | fit to half a | fit to half b |", "|---|---|---|---|---|"]
    for parameter in PARAMETERS:
        name = parameter.name
        values = (parameter.prior, figure_of(name), *(halves[half].get(name) for half in ("a", "b")))
        lines.append(f"| `{name}` | {' | '.join(map(str, values))} |")
    return "\n".join(lines) + "\n"


def worsened(found: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return the sources whose swapped error has grown."""
    return [
        f"{name}: {100 * old['mape']:.1f} % -> {100 * found['swapped']['by_source'][name]['mape']:.1f} %"
        for name, old in before["swapped"]["by_source"].items()
        if old["mape"] is not None and found["swapped"]["by_source"][name]["mape"] > old["mape"] + WORSE
    ]


def table(found: dict[str, Any]) -> str:
    """Return the scores as a table of Markdown."""
    lines = [
        "| source | runs | mean error, shipped | swapped | swapped, without odd runs | median | bias "
        "| memory | OOM balanced accuracy | regret, mean | Kendall tau | in the band |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    shipped = found["shipped"]
    for name, score in [*found["swapped"]["by_source"].items(), ("all", found["swapped"]["overall"])]:
        other = shipped["by_source"].get(name, shipped["overall"])
        ranking = score["ranking"]
        figures = [
            other["mape"], score["mape"], score.get("mape_without_odd"), score["median_ape"], score["bias"],
            score["memory_mape"], score["oom"]["balanced_accuracy"], ranking["regret_mean"],
        ]  # fmt: skip
        tau = "" if ranking["kendall_tau"] is None else f"{ranking['kendall_tau']:.2f}"
        cells = [name, str(score["n"]), *map(_percent, figures), tau, _percent(score["band_coverage"])]
        lines.append(f"| {' | '.join(cells)} |")
    skipped = ", ".join(f"{entry['count']} ({entry['reason']})" for entry in found["swapped"]["skipped"])
    return "\n".join(lines) + f"\n\nSkipped: {skipped or 'none'}.\n"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
