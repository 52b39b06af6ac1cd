"""Measured shapes: exact hits, neighbours and their bounds, who is believed, the error on rows held out."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import OpKind, Provenance, cluster_cost_model, load_gpu
from cost_models.catalogue import load_cluster
from cost_models.models.roofline import Roofline
from cost_models.shapes import MeasuredRoofline, MeasuredShapes, halves, measurements
from cost_models.tables import HARNESSES

B200 = load_gpu("b200")
ROWS = measurements("b200-sxm")["simumax", OpKind.MATMUL]
PRICED = MeasuredRoofline(Roofline(B200))
LARGE = next(
    row for row in ROWS if row.operation.shape == (1, 4096, 8192, 28672) and row.operation.direction == "fwd"
)
GPUS = ("a100-pcie-80gb", "a100-sxm-80gb", "a40", "b200-sxm", "b300-sxm", "gb200", "gb300", "h100-sxm",
        "h200-sxm", "l40s", "mi210", "v100-sxm2-16gb")  # fmt: skip


def moved(operation, **sizes):
    shape = dict(zip("bmnk", operation.shape, strict=True)) | sizes
    b, m, n, k = shape.values()
    return replace(operation, shape=(b, m, n, k), flops=2 * m * n * k, bytes=2 * (m * k + k * n + m * n))


def test_a_measured_shape_has_its_measured_time_at_the_level_of_the_gpu():
    price = PRICED.operation(LARGE.operation)
    level = MeasuredShapes(ROWS, roofline=Roofline(B200)).level
    assert price.provenance is Provenance.MEASURED
    assert price.seconds == pytest.approx(LARGE.seconds / level)
    assert level == pytest.approx(1, abs=0.03)


def test_a_slower_gpu_is_slower_on_measured_shapes_too():
    slower = replace(B200, matmul=replace(B200.matmul, efficiency=B200.matmul.efficiency / 2))
    ratio = MeasuredRoofline(Roofline(slower)).operation(LARGE.operation).seconds / LARGE.seconds
    assert ratio == pytest.approx(2, rel=0.05)


def test_a_shape_between_measured_ones_is_interpolated_within_their_ratios():
    near = moved(LARGE.operation, n=8000)
    price, plain = PRICED.operation(near), Roofline(B200).operation(near)
    assert price.provenance is Provenance.INTERPOLATED
    ratios = [row.seconds / Roofline(B200).operation(row.operation).seconds for row in ROWS]
    assert min(ratios) < price.seconds / plain.seconds < max(ratios)


def test_the_ratio_tends_to_the_measured_one_close_to_a_shape_and_to_one_far_from_all():
    shapes = MeasuredShapes([LARGE, replace(LARGE, operation=moved(LARGE.operation, m=2**17), seconds=1e-3)],
                            roofline=Roofline(B200))  # fmt: skip
    exact = shapes.ratio(LARGE.operation).value
    close, further = (shapes.ratio(moved(LARGE.operation, k=k)).value for k in (28600, 16000))
    assert abs(close / exact - 1) < abs(further / exact - 1)
    assert shapes.ratio(moved(LARGE.operation, k=1024)) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(LARGE.operation, dtype="fp32"),
        replace(LARGE.operation, dtype="fp8"),
        moved(LARGE.operation, b=2),
        moved(LARGE.operation, m=2**20),
    ],
    ids=["fp32", "fp8", "batched", "far"],
)
def test_what_was_not_measured_is_the_roofline(other):
    assert PRICED.operation(other) == Roofline(B200).operation(other)


def test_measured_attention_is_that_of_the_best_kernel_only():
    row = measurements("b200-sxm")["simumax", OpKind.ATTENTION][0]
    assert PRICED.operation(row.operation).provenance is Provenance.MEASURED
    flash2 = MeasuredRoofline(Roofline(B200, attention_kernel="flash2"))
    assert flash2.operation(row.operation).provenance is Provenance.FITTED


def test_only_training_harnesses_price():
    assert [name for name, harness in HARNESSES.items() if harness.training] == ["simumax"]
    row = measurements("h100-sxm")["aiconfigurator", OpKind.MATMUL][-1]
    h100 = Roofline(load_gpu("h100"))
    assert MeasuredRoofline(h100).operation(row.operation) == h100.operation(row.operation)


def test_a_cluster_of_a_measured_gpu_asks_the_table():
    model = cluster_cost_model(load_cluster("dgx-b200"))
    assert model.operation(LARGE.operation).provenance is PRICED.operation(LARGE.operation).provenance
    use = model.operation_use(LARGE.operation)
    assert use.processor_s == pytest.approx(model.operation(LARGE.operation).seconds, rel=0.01)


@given(st.sampled_from(ROWS), st.floats(0.8, 1.25))
def test_a_ratio_never_leaves_those_that_were_measured(row, factor):
    shapes = MeasuredShapes(ROWS, roofline=Roofline(B200))
    found = shapes.ratio(moved(row.operation, n=max(1, int(row.operation.shape[2] * factor))))
    assert 0.3 < found.value < 3


@pytest.mark.parametrize("gpu", GPUS)
def test_every_row_names_a_known_gpu_and_harness(gpu):
    assert load_gpu(gpu).name == gpu
    assert {harness for harness, _ in measurements(gpu)} <= set(HARNESSES)


@pytest.mark.accuracy
@pytest.mark.parametrize(
    ("gpu", "harness", "kind", "plain", "interpolated"),
    [
        ("a100-pcie-80gb", "simumax", OpKind.MATMUL, 0.025, 0.02),
        ("a100-pcie-80gb", "simumax", OpKind.ATTENTION, 0.07, 0.02),
        ("b200-sxm", "simumax", OpKind.MATMUL, 0.05, 0.05),
        ("b200-sxm", "simumax", OpKind.ATTENTION, 0.11, 0.05),
        ("h100-sxm", "aiconfigurator", OpKind.MATMUL, 0.08, 0.05),
        ("a100-sxm-80gb", "vidur", OpKind.MATMUL, 0.07, 0.055),
    ],
)
def test_rows_held_out_are_predicted_by_the_other_half(gpu, harness, kind, plain, interpolated):
    """Median errors of shapes near others; the level of the harness is that of the other half."""
    least = 128 if kind is OpKind.MATMUL else 1
    rows = [row for row in measurements(gpu)[harness, kind] if min(row.operation.shape[1:]) >= least]
    roofline, errors = Roofline(load_gpu(gpu)), {"plain": [], "interpolated": []}
    halved = halves(rows)
    for known, held_out in (halved, halved[::-1]):
        shapes = MeasuredShapes(known, roofline=roofline)
        for row in held_out:
            ratio = shapes.ratio(row.operation)
            if ratio is not None:
                seconds = roofline.operation(row.operation).seconds * shapes.level
                errors["plain"].append(abs(seconds / row.seconds - 1))
                errors["interpolated"].append(abs(seconds * ratio.value / row.seconds - 1))
    assert statistics.median(errors["plain"]) < plain
    assert statistics.median(errors["interpolated"]) < interpolated
