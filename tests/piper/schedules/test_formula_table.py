"""Every published formula for bubbles and activations that we know, and what each is compared with.

One row of `ROWS` per row of the source. T_F, T_B, T_W of zero-bubble papers are F, BI, BW here; F, B, W, F&B
of the DeepSeek-V3 report are F, B = BI + BW, BW, FB. Costs are those of the passes of one stage; a rank of a
V or of two directions runs two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest

from piper.schedules import Costs, default_virtual_stages, parse_costs
from piper.schedules.preview import Preview, preview_schedule

ANY = ("F=1,BI=1,BW=1", "F=3,BI=2,BW=1", "F=2,BI=3,BW=1", "F=18.522,BI=18.086,BW=9.337")
EQUAL = ("F=1,BI=1,BW=1",)
LIKE_THE_FORWARD = (
    *("F=1,BI=1,BW=1", "F=1,BI=1,BW=1,FB=2.5", "F=1,BI=1,BW=1,FB=2", "F=2,BI=2,BW=1,FB=4"),
    *("F=2,BI=2,BW=1,FB=5", "F=3,BI=3,BW=2,FB=7", "F=2.5,BI=2.5,BW=0.5"),
)
"""Input halves as long as forwards, weight halves no longer: where the formula of DualPipe holds."""


def of_a_rank(found: Preview) -> Fraction:
    """Return the longest time from a rank's first start to its last end, less its passes."""
    return found.longest_rank_span - sum((span.end - span.start for span in found.spans[0]), Fraction(0))


def of_the_step(found: Preview) -> Fraction:
    """Return the most that a rank idles from the start of the step to its end."""
    return max(
        found.makespan - sum((span.end - span.start for span in row), Fraction(0)) for row in found.spans
    )


def rate(found: Preview) -> Fraction:
    """Return the share of the longest rank's time that is no pass."""
    return found.bubble_fraction_span


def rate_of_1f1b(p: int, m: int) -> Fraction:
    """Return B of the authors' page, for T_F = T_B = T_W."""
    return Fraction(p - 1, m + p - 1)


def idle_of_1f1b(p: int, *, stages: int = 1) -> int:
    """Return the bubble of which B is the rate, in passes of a stage of which a rank has `stages`.

    B / 3 and the like are compared as shares of this time: the rates themselves differ further, as a shorter
    bubble also makes the time shorter that it is a share of.
    """
    return 3 * stages * (p - 1)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a paper.

    Args:
        source, schedule: as the paper says.
        ours: the schedule compared.
        bubble: what the paper says, of p ranks, m microbatches and costs.
        measured: what of ours it is compared with.
        activation: microbatches in flight on the rank that has most, of p ranks.
        costs: of the passes, under which the paper says so.
        slots: passes by which an approximate bubble may be exceeded; None: equal, not a bound.
        more_held: microbatches by which an approximate activation may be exceeded.
        parameters: copies of the parameters.
    """

    source: str
    schedule: str
    ours: str
    bubble: Callable[[int, int, Costs], Fraction | int]
    measured: Callable[[Preview], Fraction]
    activation: Callable[[int], Fraction | int]
    costs: tuple[str, ...] = ANY
    slots: int | None = None
    more_held: Fraction = Fraction(0)
    parameters: int = 1


QI = "Qi et al. 2024 (arXiv 2401.10241), Table 2"
DEEPSEEK = "DeepSeek-V3 report (arXiv 2412.19437), Table 2"
PAGE = "page of the zero-bubble authors, T_F = T_B = T_W"
MEMORY = "Qi et al. 2024 (arXiv 2405.15362), the authors' page"

ROWS = (
    Row(source=QI, schedule="1F1B", ours="1f1b", measured=of_a_rank, activation=lambda p: p,
        bubble=lambda p, m, c: (p - 1) * (c["F"] + c["BI"] + c["BW"])),
    Row(source=QI, schedule="ZB-H1", ours="zb_h1", measured=of_a_rank, activation=lambda p: p,
        bubble=lambda p, m, c: (p - 1) * (c["F"] + c["BI"] - c["BW"])),
    Row(source=QI, schedule="ZB-H2", ours="zb_h2", measured=of_a_rank, activation=lambda p: 2 * p - 1,
        bubble=lambda p, m, c: (p - 1) * (c["F"] + c["BI"] - 2 * c["BW"])),
    Row(source=DEEPSEEK, schedule="1F1B", ours="1f1b", measured=of_the_step, activation=lambda p: p,
        bubble=lambda p, m, c: (p - 1) * (c["F"] + c["B"])),
    Row(source=DEEPSEEK, schedule="ZB1P", ours="zb_h1", measured=of_a_rank, activation=lambda p: p,
        bubble=lambda p, m, c: (p - 1) * (c["F"] + c["B"] - 2 * c["BW"])),
    Row(source=DEEPSEEK, schedule="DualPipe", ours="dualpipe", measured=of_the_step,
        activation=lambda p: p + 1, costs=LIKE_THE_FORWARD, parameters=2,
        bubble=lambda p, m, c: (p // 2 - 1) * (c["FB"] + c["B"] - 3 * c["BW"])),
    Row(source=PAGE, schedule="1F1B", ours="1f1b", measured=rate, activation=lambda p: p, costs=EQUAL,
        bubble=lambda p, m, c: rate_of_1f1b(p, m)),
    Row(source=PAGE, schedule="ZB1P", ours="zb_h1", measured=of_a_rank, activation=lambda p: p, costs=EQUAL,
        slots=1, bubble=lambda p, m, c: Fraction(idle_of_1f1b(p), 3)),
    Row(source=PAGE, schedule="ZB2P", ours="zb_h2", measured=rate, activation=lambda p: 2 * p, costs=EQUAL,
        slots=1, bubble=lambda p, m, c: 0),
    Row(source=PAGE, schedule="ZBV", ours="zbv", measured=rate, activation=lambda p: p, costs=EQUAL, slots=1,
        bubble=lambda p, m, c: 0),
    Row(source=PAGE, schedule="V-Half", ours="v_half", measured=of_a_rank, costs=EQUAL, slots=1,
        activation=lambda p: Fraction(p, 2), more_held=Fraction(1),
        bubble=lambda p, m, c: Fraction(idle_of_1f1b(p, stages=2), 2)),
    Row(source=PAGE, schedule="V-Min", ours="v_min", measured=of_a_rank, costs=EQUAL, slots=1,
        activation=lambda p: Fraction(p, 3), more_held=Fraction(4, 3),
        bubble=lambda p, m, c: Fraction(2 * idle_of_1f1b(p, stages=2), 3)),
    Row(source=MEMORY, schedule="V-Min", ours="v_min", measured=rate, costs=EQUAL, slots=1,
        activation=lambda p: (p + 4) // 3, bubble=lambda p, m, c: Fraction(2 * p, 3 * m)),
    Row(source=MEMORY, schedule="V-Half", ours="v_half", measured=rate, costs=EQUAL, slots=1,
        activation=lambda p: (p + 2) // 2, bubble=lambda p, m, c: Fraction(p, 2 * m)),
    Row(source=MEMORY, schedule="V-ZB", ours="zbv", measured=rate, costs=EQUAL, slots=1,
        activation=lambda p: p, bubble=lambda p, m, c: 0),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.schedule} of {row.source[:18]}")
def test_bubbles_and_activations_are_as_published(row):
    """Equal to a formula that is exact, no more than an approximate one and a slot."""
    for costs in map(parse_costs, row.costs):
        for p, m in [(2, 4), (2, 10), (4, 8), (4, 12), (4, 18), (6, 12), (8, 16), (8, 32), (16, 32)]:
            found = preview(row, p, m, costs)
            bubble, held = row.measured(found), max(found.in_flight)
            assert found.copies == row.parameters
            if row.slots is None:
                assert (bubble, held) == (row.bubble(p, m, costs), row.activation(p)), (costs, p, m)
                continue
            slot = 1 / found.longest_rank_span if row.measured is rate else 1
            assert 0 <= bubble <= row.bubble(p, m, costs) + row.slots * slot, (costs, p, m)
            assert held <= row.activation(p) + row.more_held, (costs, p, m)


def preview(row: Row, p: int, m: int, costs: Costs) -> Preview:
    return preview_schedule(
        row.ours, num_pipeline_ranks=p, num_microbatches=m, costs=costs,
        virtual_stages_per_rank=default_virtual_stages(row.ours),
    )  # fmt: skip


def test_the_formula_of_dualpipe_is_off_by_the_difference_of_forward_and_input_half_per_pair_of_ranks():
    dualpipe = next(row for row in ROWS if row.ours == "dualpipe")
    for text in ("F=3,BI=2,BW=1", "F=2,BI=3,BW=1", "F=18.522,BI=18.086,BW=9.337", "F=1,BI=1.5,BW=0.5"):
        costs = parse_costs(text)
        for p in (2, 4, 6, 8, 12):
            off = of_the_step(preview(dualpipe, p, 3 * p, costs)) - dualpipe.bubble(p, 3 * p, costs)
            assert abs(off) <= (p // 2 - 1) * abs(costs["F"] - costs["BI"])
