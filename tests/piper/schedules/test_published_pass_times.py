"""Bubble rates that a paper found for measured passes: ours are within 0.005 of them, or it is said why."""

from fractions import Fraction

import pytest

from piper.schedules.preview import Preview, preview_schedule
from tests.piper.schedules.published_pass_times import ROWS, costs_of

HAND_MADE = {"1F1B": "1f1b", "ZB_H1": "zb_h1", "ZB_H2": "zb_h2", "ZB_1p": "zb_1p"}


def drawn(setting, name: str, *, kept: bool = False, v: int = 1) -> Preview:
    return preview_schedule(
        name, num_pipeline_ranks=setting[1], num_microbatches=setting[2], virtual_stages_per_rank=v,
        costs=costs_of(ROWS[setting], kept=kept, virtual_stages=v),
    )  # fmt: skip


def published(setting, column: str) -> float:
    return float(ROWS[setting][f"bubble_{column}"])


@pytest.mark.parametrize("setting", ROWS, ids=str)
def test_one_stage_per_rank_idles_as_long_as_published(setting):
    for column, name in HAND_MADE.items():
        found = float(drawn(setting, name).bubble_fraction_span)
        assert found == pytest.approx(published(setting, column), abs=0.00011), name


@pytest.mark.parametrize("setting", ROWS, ids=str)
def test_interleaving_layer_by_layer_idles_within_half_a_percent_of_the_published(setting):
    """A virtual stage is one layer; the embedding and the head count as one each: (layers + 2) / p of them.

    Ours is above the published by up to 0.0035: every message costs its whole time.
    """
    v, rest = divmod(int(ROWS[setting]["layers"]) + 2, setting[1])
    assert rest == 0
    found = float(drawn(setting, "interleaved_1f1b", v=v).bubble_fraction_span)
    assert found == pytest.approx(published(setting, "1F1B_I"), abs=0.005)
    assert found >= published(setting, "1F1B_I")


@pytest.mark.parametrize("setting", ROWS, ids=str)
def test_zb_2p_idles_as_published_once_memory_is_counted_as_in_the_paper(setting):
    """The bytes that wait for BW are fewer than those that wait for BI; see [Note: what BW keeps]."""
    found = drawn(setting, "zb_2p", kept=True)
    assert float(found.bubble_fraction_span) == pytest.approx(published(setting, "ZB_2p"), abs=0.0015)
    assert max(found.in_flight) <= 2 * setting[1]


@pytest.mark.parametrize("setting", ROWS, ids=str)
def test_zb_2p_that_counts_whole_microbatches_up_to_bw_reaches_the_least_bubble_of_any_order(setting):
    """[Note: least bubble under a cap]: 0.02 to 0.08 of the step above the published rates, necessarily."""
    _, p, m = setting
    costs = costs_of(ROWS[setting])
    found = drawn(setting, "zb_2p")
    f, bi, bw, comm = (costs[name] for name in ("F", "BI", "BW", "comm"))
    least = (p - 1) * (f + bi + 2 * comm) - (2 * p - 1) * bw
    assert found.longest_rank_span == m * (f + bi + bw) + least
    assert 0.02 < float(found.bubble_fraction_span) - published(setting, "ZB_2p") < 0.08
    assert found.bubble_fraction_span < drawn(setting, "zb_h2").bubble_fraction_span
    assert max(found.in_flight) == 2 * p


@pytest.mark.parametrize("setting", ROWS, ids=str)
def test_the_rates_of_the_paper_need_more_than_2p_whole_microbatches(setting):
    found = drawn(setting, "zb_2p", kept=True)
    whole = max(
        max(
            sum({"F": 1, "BW": -1}.get(task.kind.name, 0) for span in row[:at] for task in span.tasks)
            for at in range(len(row) + 1)
        )
        for row in found.spans
    )
    assert Fraction(whole, 2 * setting[1]) > 1
