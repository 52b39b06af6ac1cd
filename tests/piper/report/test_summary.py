"""The text of a result: what was understood and assumed comes first, then every figure."""

from __future__ import annotations

from piper.report import summary
from piper.report.explanation import difference_lines, differences
from tests.piper.report.samples import GIB, figures


def test_the_text_says_what_was_understood_and_assumed_before_any_figure() -> None:
    text = summary.describe(figures())
    first, second, third, *_ = text.splitlines()
    assert first == "tiny-llama, 8.03 B parameters on 4 GPUs of dgx-h100"
    assert second == "strategy    pp=2,dp=2,schedule=gpipe"
    assert third == "assumed     optimizer adamw, clip_grad_norm 1"
    assert text.index("assumed") < text.index("step time")


def test_the_text_has_every_figure_with_its_unit() -> None:
    text = summary.describe(figures())
    assert (
        "step time   14.00 ms   (expected within 12.60 ms .. 16.80 ms; prices 75% datasheet, 25% fitted)"
        in text
    )
    assert "505 k tokens/s, 7.89 k tokens/s per GPU" in text
    assert "MFU         38.1 % (convention palm), HFU 50.0 %, 377.0 TFLOP/s per GPU" in text
    assert "memory      fits: 75.75 GiB free of 80.00 GiB\n" in text
    assert (
        "            3.00 GiB allocated, 3.50 GiB reserved, 512.00 MiB context, 256.00 MiB communicators"
        in text
    )


def test_the_breakdown_leaves_out_what_is_zero_and_adds_up() -> None:
    lines = summary.breakdown_lines(figures())
    assert [line.split()[0] for line in lines] == [
        "compute",
        "exposed_dp",
        "exposed_pp",
        "bubble",
        "optimizer",
    ]
    assert sum(float(line.split()[3]) for line in lines) == 100.0


def test_memory_lists_only_the_classes_in_use() -> None:
    title, heading, *rows = summary.memory_lines(figures())
    assert title == "memory at each rank's peak, GiB"
    assert heading.split() == ["pp", "rank", "devices", "stages", "params", "activ", "peak", "at", "busy"]
    assert rows[0].split() == ["0", "2", "0", "2.00", "1.00", "3.00", "1.000", "ms", "8.400", "ms"]


def test_many_ranks_are_cut_short_and_counted() -> None:
    rank = figures()["ranks"][0]
    lines = summary.memory_lines(figures(ranks=[rank] * 64))
    assert lines[-1] == "  ... and 56 more (--json lists all)"
    assert len(lines) == 11


def test_too_much_memory_is_said_with_how_much() -> None:
    text = summary.describe(figures(fits=False))
    assert "DOES NOT FIT" in text
    assert "1.25 GiB more than the 3.00 GiB of a device" in text


def test_warnings_come_last() -> None:
    text = summary.describe(figures(warnings=["zero=1 with one shard cuts nothing"]))
    assert text.endswith("warning: zero=1 with one shard cuts nothing")


def test_comparison_is_against_the_fastest_that_fits() -> None:
    results = [
        ("a", figures(step_time_s=0.02)),
        ("b", figures(step_time_s=0.01, fits=False)),
        ("c", figures(step_time_s=0.016)),
    ]
    _, a, b, c = summary.compare(results).splitlines()
    assert "+25.0%" in a
    assert "-37.5%" in b
    assert b.endswith("NO")
    assert "best" in c
    assert "15.0 %" in a, "exposed communication of all kinds"


def test_steps_of_different_batches_are_compared_by_time_per_token() -> None:
    wide, narrow = figures(step_time_s=0.02), figures(step_time_s=0.01)
    wide["tokens_per_s"], narrow["tokens_per_s"] = 128 / 0.02, 32 / 0.01
    _, first, second, note = summary.compare([("wide", wide), ("narrow", narrow)]).splitlines()
    assert "best" in first
    assert "+100.0%" in second
    assert "(128 and 32)" in note
    assert "--global-batch" in note
    verdict, *_, last, _ = difference_lines(
        ("wide", "narrow"), differences(wide, narrow), results=[wide, narrow]
    )
    assert verdict == "narrow is 100.0% slower than wide"
    assert last == "note: the parts are those of whole steps"


def test_different_models_side_by_side_are_named() -> None:
    results = [("a", figures()), ("b", figures(model="another"))]
    assert "another" in summary.compare(results).splitlines()[-1]
    assert len(summary.compare(results[:1] * 2).splitlines()) == 3


def test_exposed_communication_sums_all_kinds() -> None:
    parts = figures()["breakdown_s"] | {
        "exposed_tp": 1.0,
        "exposed_ep": 2.0,
        "exposed_dp": 0.0,
        "exposed_pp": 0.0,
    }
    assert summary.exposed_s(figures(breakdown_s=parts)) == 3.0


def test_classes_of_memory_are_shown_in_gib() -> None:
    classes = figures()["ranks"][0]["memory_by_class_bytes"] | {"buckets": GIB // 4}
    rank = figures()["ranks"][0] | {"memory_by_class_bytes": classes}
    _, heading, row = summary.memory_lines(figures(ranks=[rank]))
    assert "buckets" in heading
    assert " 0.25 " in row


def test_small_memory_is_shown_in_a_small_unit() -> None:
    rank = figures()["ranks"][0] | {
        "peak_memory_bytes": 61 * 2**10,
        "memory_by_class_bytes": {"parameters": 60 * 2**10, "workspace": 2**10},
    }
    title, heading, row = summary.memory_lines(figures(ranks=[rank]))
    assert title == "memory at each rank's peak, KiB"
    assert heading.split()[4:7] == ["params", "work", "peak"]
    assert row.split()[3:6] == ["60.00", "1.00", "61.00"]


def test_many_equal_stages_are_counted_instead_of_listed() -> None:
    result = figures() | {"segments_per_stage": [8, *[14] * 62, 9]}
    assert "stages      8 + 62 x 14 + 9 segments" in summary.heading_lines(result)
    few = result | {"segments_per_stage": [57, 56, 56, 58]}
    assert "stages      57 + 56 + 56 + 58 segments" in summary.heading_lines(few)
