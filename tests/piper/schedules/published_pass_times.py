"""The rows of Qi et al. 2024 (arXiv 2401.10241), Tables 9 and 5: times of the passes, bubble rates found."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from piper.schedules import parse_costs

with Path(__file__).with_name("pass_times_zerobubble.csv").open(encoding="utf-8") as file:
    ROWS = {(row["model"], int(row["pp"]), int(row["n_microbatches"])): row for row in csv.DictReader(file)}
"""By (model, ranks, microbatches). Milliseconds; the bubble is of the longest span of a rank."""


def costs_of(row: Mapping[str, str], *, kept: bool = False, virtual_stages: int = 1):
    """Return the costs of one of the `virtual_stages` of a rank; with `kept` as the paper counts memory.

    Its Table 1: of (34 + 5 a s / h) s b h bytes of a layer, BW needs 32 s b h.
    """
    passes = {
        name: Fraction(row[f"T_{theirs}_ms"]) / virtual_stages
        for name, theirs in (("F", "F"), ("BI", "B"), ("BW", "W"))
    }
    heads, hidden, seq_len = (int(row[name]) for name in ("heads", "hidden", "seq_len"))
    share = Fraction(32 * hidden, 34 * hidden + 5 * heads * seq_len) if kept else Fraction(1)
    stated = passes | {"comm": Fraction(row["T_comm_ms"]), "kept": share}
    return parse_costs(",".join(f"{name}={value}" for name, value in stated.items()))
