"""A few runs of every source of published runs are predicted no worse than when the scores were written.

All runs are scored by benchmarks/published_accuracy.py (`make accuracy`). After a change that is meant:
`pytest tests/accuracy/test_published_runs.py --update-golden`.
"""

import hashlib
import json
from pathlib import Path
from statistics import fmean

import pytest

from piper.validation.predictions import predict_row
from piper.validation.rows import PublishedRow, read_rows

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "published_runs"
KEPT = Path(__file__).with_name("published_runs.json")
SOURCES = sorted(path.stem for path in FOLDER.glob("*.csv"))
RUNS, MOST_PIPELINE_RANKS = 3, 8
WORSE = 0.005


def sample(source: str) -> list[PublishedRow]:
    """Return some runs with a short pipeline, which take little time, by a hash of their names."""
    figures = ("step_time_s", "tflops_per_gpu", "mfu")
    rows = [row for row in read_rows([FOLDER / f"{source}.csv"]) if any(map(row.text, figures))]
    short = [row for row in rows if (row.integer("pp") or 1) <= MOST_PIPELINE_RANKS and not row.oom]
    return sorted(short, key=lambda row: hashlib.sha256(row.case_id.encode()).hexdigest())[:RUNS]


@pytest.mark.parametrize("source", SOURCES)
def test_no_source_is_predicted_worse_than_before(source: str, request: pytest.FixtureRequest) -> None:
    errors = [abs(found.error) for row in sample(source) if (found := predict_row(row)).error is not None]
    assert errors
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    if request.config.getoption("--update-golden"):
        kept[source] = round(fmean(errors), 4)
        KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")
    assert fmean(errors) <= kept[source] + WORSE
