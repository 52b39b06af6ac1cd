from __future__ import annotations

from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest

from simulator import simulate
from simulator.errors import PlanError
from simulator.plan import TaskKind
from simulator.timeline.plots import plot_memory, plot_timeline
from simulator.timeline.plots import steps as plot_steps
from tests.plans import Costs, FakeCostModel, one_f_one_b_rows, pipeline_plan

GIB = 1 << 30
COSTS = Costs(
    forward_ns=2_000_000,
    backward_ns=4_000_000,
    update_ns=900_000,
    activation_bytes=GIB,
    parameter_bytes=2 * GIB,
)
MODEL = FakeCostModel(transfer_ns=lambda *_: 90_000, collective_ns=lambda *_: 2_000_000)


def timeline_of(ranks):
    return simulate(pipeline_plan(one_f_one_b_rows(ranks, 6), costs=COSTS, replicas=2, clip=True), MODEL)


@pytest.fixture(scope="module")
def timeline():
    return timeline_of(4)


def has_colour(picture, colour, tolerance=0.02):
    wanted = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return bool((np.abs(picture[..., :3] - wanted).max(axis=-1) < tolerance).any())


@pytest.mark.parametrize("ranks", [1, 4, 12])
def test_the_timeline_shows_forward_backward_update_and_communication_in_their_colours(tmp_path, ranks):
    picture = matplotlib.image.imread(plot_timeline(timeline_of(ranks), tmp_path / "t.png"))
    for kind in (TaskKind.F, TaskKind.B, TaskKind.UPDATE, TaskKind.ALL_REDUCE):
        assert has_colour(picture, plot_steps.COLOURS[kind])
    assert picture.shape[1] == 14 * 160


def test_more_ranks_make_a_taller_picture_with_thinner_lanes(tmp_path):
    heights = [
        matplotlib.image.imread(plot_timeline(timeline_of(ranks), tmp_path / f"{ranks}.png")).shape[0]
        for ranks in (4, 32)
    ]
    assert heights[0] < heights[1] < 8 * heights[0]


def test_svg_pictures_name_ranks_streams_microbatches_and_kinds(tmp_path, timeline):
    text = plot_timeline(timeline, tmp_path / "t.svg", title="A fine plan").read_text()
    for words in (
        "A fine plan",
        "rank 0 (x2)",
        "rank 6 (x2)",
        "send&gt;1",
        "F forward",
        "all-reduce",
        "time in the step (ms)",
    ):
        assert words in text


def test_stages_of_one_rank_get_lighter_shades(timeline):
    track = replace(timeline.tracks[0], stages=(0, 4, 8))
    names = [plot_steps.TaskName(kind=TaskKind.F, stage=stage) for stage in (0, 4, 8)]
    shades = [plot_steps._colour(track, name) for name in names]
    assert shades[0] == plot_steps.COLOURS[TaskKind.F]
    assert len(set(shades)) == 3
    assert sorted(shades) == shades


def test_the_memory_plot_shows_classes_the_peak_and_a_limit_that_is_near(tmp_path, timeline):
    path = plot_memory(timeline, tmp_path / "m.svg", limit_bytes=11 * GIB)
    text = path.read_text()
    for words in ("activations", "parameters", "peak", "left for tensors: 11 GiB", "rank 0", "10 GiB at"):
        assert words in text
    assert "optimizer" not in text
    far = plot_memory(timeline, tmp_path / "far.svg", limit_bytes=80 * GIB).read_text()
    assert "left for tensors" not in far


def test_a_memory_plot_of_many_ranks_is_a_grid_of_small_panels(tmp_path):
    text = plot_memory(timeline_of(18), tmp_path / "m.svg").read_text()
    assert all(f"rank {2 * rank}: " in text for rank in range(18))


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("draw", [plot_timeline, plot_memory])
def test_the_same_timeline_gives_the_same_bytes(tmp_path, timeline, draw, suffix):
    first, second = (draw(timeline, tmp_path / f"{name}.{suffix}").read_bytes() for name in "ab")
    assert first == second


@pytest.mark.parametrize("draw", [plot_timeline, plot_memory])
def test_another_suffix_and_a_missing_folder_are_refused_with_a_fix(tmp_path, timeline, draw):
    with pytest.raises(PlanError) as caught:
        draw(timeline, tmp_path / "picture.gif")
    assert (caught.value.field, caught.value.fix) == ("path", "write picture.png")
    with pytest.raises(PlanError) as caught:
        draw(timeline, tmp_path / "none" / "picture.png")
    assert "writable" in caught.value.fix


def test_a_timeline_draws_itself(tmp_path, timeline):
    assert timeline.plot(tmp_path / "t.png").stat().st_size > 10_000


def test_every_kind_of_task_has_a_colour_and_a_name():
    assert set(plot_steps.COLOURS) == set(plot_steps.NAMES) == set(TaskKind)


@pytest.mark.parametrize(("ranks", "shown"), [(4, 4), (12, 1)])
def test_memory_lies_below_every_rank_or_that_of_the_fullest_below_many(tmp_path, ranks, shown):
    timeline = timeline_of(ranks)
    text = plot_timeline(timeline, tmp_path / "t.svg").read_text()
    peaks = [int(track.memory_bytes.sum(axis=1).max()) / GIB for track in timeline.tracks]
    assert text.count(" GiB") == shown
    assert f"{max(peaks):.3g} GiB" in text
    picture = matplotlib.image.imread(plot_timeline(timeline, tmp_path / "t.png"))
    assert all(has_colour(picture, colour) for colour in plot_steps.MEMORY_COLOURS.values())


def test_a_timeline_without_memory_has_no_lane_for_it(tmp_path, timeline):
    empty = [replace(track, memory_bytes=0 * track.memory_bytes) for track in timeline.tracks]
    text = plot_timeline(replace(timeline, tracks=tuple(empty)), tmp_path / "t.svg").read_text()
    assert "memory" not in text


def test_a_legend_that_is_too_long_for_one_line_takes_two(tmp_path):
    from matplotlib.patches import Patch

    from simulator.timeline.plots.picture import picture, write_legend

    rows = []
    for entries in (3, 18):
        with picture(tmp_path / "p.png", width_in=14, height_in=2) as figure:
            write_legend(figure, [Patch(label="backward, weights")] * entries, left_in=0.1)
            (legend,) = figure.legends
            figure.canvas.draw()
            box = legend.get_window_extent()
            rows.append(box.height)
            assert box.x1 <= figure.bbox.x1
    assert rows[1] > 1.5 * rows[0]


def test_memory_lanes_show_a_limit_that_is_near_and_pictures_a_subtitle(tmp_path, timeline):
    near = plot_timeline(timeline, tmp_path / "n.svg", subtitle="of a small job", limit_bytes=11 * GIB)
    assert "left for tensors: 11 GiB" in near.read_text()
    assert "of a small job" in near.read_text()
    far = plot_timeline(timeline, tmp_path / "f.svg", limit_bytes=80 * GIB)
    assert "left for tensors" not in far.read_text()


def test_the_parts_of_a_pass_have_one_label_together_and_a_new_pass_begins_its_own():
    forward = plot_steps.TaskName(kind=TaskKind.F, stage=0, microbatch=3, part=1)
    run = plot_steps._Run.of(forward, (1.0, 0.5), "#4c8fd1")
    assert run.grow(replace(forward, part=2), (1.6, 0.4), "#4c8fd1")
    assert not run.grow(replace(forward, microbatch=4), (2.0, 0.5), "#4c8fd1")
    assert (run.begin, run.end, run.parts) == (1.0, 2.0, 2)


def test_light_colours_have_dark_labels():
    assert plot_steps._brightness("#ffffff") == pytest.approx(1)
    assert plot_steps._brightness(plot_steps.COLOURS[TaskKind.BW]) > plot_steps.BRIGHT
    assert plot_steps._brightness(plot_steps.COLOURS[TaskKind.F]) < plot_steps.BRIGHT
