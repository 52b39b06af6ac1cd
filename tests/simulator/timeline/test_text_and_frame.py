from __future__ import annotations

from dataclasses import replace

import pytest

from simulator import simulate
from simulator.plan import TaskKind
from simulator.timeline.gantt import format_duration, text_gantt
from tests.plans import Costs, FakeCostModel, PlanBuilder, gpipe_rows, one_f_one_b_rows, pipeline_plan


def test_the_text_gantt_of_unit_slots_is_the_textbook_picture():
    timeline = simulate(pipeline_plan(one_f_one_b_rows(3, 4)), FakeCostModel(), steps=1)
    assert text_gantt(timeline, width=12 + 9).splitlines()[:3] == [
        "rank 0 |FFF..BFB.B.B|",
        "rank 1 |.FF.BFBFB.B.|",
        "rank 2 |..FBFBFBFB..|",
    ]


def test_a_narrow_gantt_shows_what_fills_most_of_a_column():
    timeline = simulate(
        pipeline_plan(gpipe_rows(1, 4), costs=Costs(forward_ns=1, backward_ns=3)), FakeCostModel()
    )
    assert text_gantt(timeline, width=4 + 9).splitlines()[0] == "rank 0 |FBBB|"


def test_a_column_that_computes_for_less_than_half_of_its_time_has_a_small_letter():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.compute("f", 20, TaskKind.F, microbatch=0)
    device.compute("b", 4, TaskKind.B, microbatch=0)
    device.compute("u", 1, TaskKind.UPDATE)
    timeline = simulate(builder.build(), FakeCostModel(), steps=1)
    shown = text_gantt(timeline, width=2 + 9).splitlines()[0]
    assert shown == "rank 0 |FF|"
    later = replace(timeline, step_end_ns=timeline.step_end_ns + 25)
    assert text_gantt(later, width=4 + 9).splitlines()[0] == "rank 0 |FF..|"
    assert text_gantt(later, width=2 + 9).splitlines()[0] == "rank 0 |F.|"
    assert text_gantt(replace(later, step_end_ns=later.step_end_ns + 50), width=1 + 9).splitlines()[0] == (
        "rank 0 |f|"
    )


def test_idle_columns_tell_communication_from_nothing():
    builder = PlanBuilder()
    device = builder.devices[0]
    device.compute("b", 10, TaskKind.B, microbatch=0)
    bucket, group = device.bucket("d"), builder.group("dp0", "dp", [0])
    device.task("r", TaskKind.ALL_REDUCE, "dp", group=group, bucket=bucket, waits=["b"])
    device.compute("u", 10, TaskKind.UPDATE, waits=["r"])
    timeline = simulate(builder.build(), FakeCostModel(collective_ns=lambda *_: 20), steps=1)
    lines = text_gantt(timeline, width=4 + 9).splitlines()
    assert lines[0] == "rank 0 |B==U|"
    assert lines[1].endswith("40 ns")
    assert "= communication" in lines[3]


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [(7, "7 ns"), (45_600, "45.6 us"), (12_300_000, "12.3 ms"), (1_234_000_000, "1.234 s")],
)
def test_durations_are_printed_in_the_unit_that_reads_well(time_ns, text):
    assert format_duration(time_ns) == text


def test_the_frame_has_one_row_per_span_with_names_instead_of_numbers():
    plan = pipeline_plan(one_f_one_b_rows(2, 3), costs=Costs(forward_ns=5))
    timeline = simulate(plan, FakeCostModel(), steps=2)
    frame = timeline.to_frame()
    rows = frame[["rank", "stream", "code", "start_ns", "end_ns"]].itertuples(index=False, name=None)
    assert sorted(rows) == sorted(timeline.rows())
    assert frame[frame.kind == "F"].groupby(["pipeline_rank", "step"]).size().tolist() == [3] * 4
