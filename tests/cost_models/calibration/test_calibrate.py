"""Rows that a known machine makes up are fitted: the file predicts rows that the fit has not seen."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from cost_models import cluster_cost_model, load_cluster
from cost_models.calibration import Measurement, calibrate
from cost_models.calibration.anchor import BOUNDS, slower
from cost_models.calibration.calibrate import is_held_out
from cost_models.calibration.device import device_times_s
from cost_models.calibration.fit import overlaid
from cost_models.calibration.network import network_times_s, transfer_times_s
from cost_models.catalogue import cluster_content
from cost_models.documents import yaml_text
from cost_models.errors import CostModelError
from cost_models.ops import Operation, OpKind
from cost_models.price import CollectiveKind

TRUTH = {
    "peak.fp32": "0.2TFLOP/s",
    "memory.bandwidth": "100GB/s",
    "matmul.efficiency": 0.8,
    "matmul.latency": "2us",
    "bandwidth_bound.elementwise": 0.3,
    "bandwidth_bound.optimizer": 0.1,
    "bandwidth_bound.latency": "1us",
}


def row(op: str, shape: tuple[int, ...], **fields: object) -> Measurement:
    known = {
        "device": "a CPU", "kernel": "add", "dtype": "fp32", "direction": "fwd", "ranks": 1, "time_s": 1.0,
        "repeats": 7, "spread": 0.0, "versions": "torch 2.13 gloo",
    }  # fmt: skip
    return Measurement(op=op, shape=shape, **(known | fields))


def kernels() -> Iterator[Measurement]:
    sizes = (16, 64, 192, 512)
    for m, n, k in product(sizes, sizes, sizes):
        yield row("matmul", (1, m, n, k), kernel="mm")
    for power in range(6, 22):
        yield row("elementwise", (2**power,))
        yield row("optimizer", (2**power,), kernel="adamw")


def messages() -> Iterator[Measurement]:
    for op, ranks, power in product(("all_reduce", "all_gather", "transfer"), (2, 4), range(4, 24, 2)):
        if op != "transfer" or ranks == 2:
            yield row(op, (2**power,), ranks=ranks, kernel="gloo")


def timed(
    rows: Iterator[Measurement], times: Callable[[list[Measurement]], list[float]], *, noise: float = 0.0
) -> list[Measurement]:
    known, draw = list(rows), random.Random(1)
    return [
        replace(one, time_s=seconds * (1 + draw.uniform(-noise, noise)))
        for one, seconds in zip(known, times(known), strict=True)
    ]


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    truth = cluster_content("local-cpu")
    truth["gpu"] = overlaid(truth["gpu"], TRUTH)
    truth = overlaid(
        truth,
        {
            "intra.bandwidth": "8GB/s",
            "intra_collectives.all_reduce.latency": {"ranks_2": "100us", "ranks_4": "3000us"},
            "intra_collectives.all_reduce.bandwidth": "2GB/s",
        },
    )
    made = timed(kernels(), lambda known: device_times_s(truth["gpu"], known), noise=0.02)
    made += timed(messages(), lambda known: network_times_s(truth, known), noise=0.02)
    contention = {1: 50e-6, 2: 50e-6, 3: 75e-6, 4: 100e-6}
    made += [row("contention", (1,), ranks=ranks, time_s=time) for ranks, time in contention.items()]
    for kernels_, direction, each in (
        (40, "fwd", 9e-6),
        (400, "fwd", 9e-6),
        (90, "bwd", 6e-6),
        (900, "bwd", 6e-6),
    ):
        time = 150e-6 + kernels_ * each
        made.append(row("pass", (kernels_, 1, 1), direction=direction, time_s=time, kernel="piper"))
    made.append(row("message", (64,), ranks=2, time_s=1e-3, kernel="piper"))
    return made


@pytest.fixture(scope="module")
def fitted(rows: list[Measurement]):
    return calibrate(rows, base="local-cpu", name="here")


def test_rows_that_the_fit_has_not_seen_are_predicted_within_the_noise(fitted) -> None:
    errors = {error.op: error for error in fitted.errors}
    for op in ("matmul", "elementwise", "optimizer", "all_reduce", "all_gather", "transfer"):
        assert errors[op].held_out >= 1
        assert errors[op].median < 0.06, errors[op]


def test_the_rows_held_out_are_a_fifth_and_always_the_same(rows: list[Measurement]) -> None:
    judged = [one for one in rows if one.op in {"matmul", "elementwise", "optimizer"}]
    out = [one for one in judged if is_held_out(one)]
    assert 0.1 < len(out) / len(judged) < 0.3
    assert out == [one for one in judged if is_held_out(replace(one, time_s=9.0))]


def test_a_row_that_was_disturbed_bends_nothing(rows: list[Measurement], fitted) -> None:
    kept = next(one for one in rows if one.op == "matmul" and not is_held_out(one))
    disturbed = [replace(one, time_s=30 * one.time_s) if one == kept else one for one in rows]
    again = calibrate(disturbed, base="local-cpu", name="here")
    before, after = (found.content["gpu"]["matmul"]["efficiency"] for found in (fitted, again))
    assert after == pytest.approx(before, rel=0.02)


def test_host_figures_are_what_the_rows_say(fitted) -> None:
    host = fitted.content["host"]
    assert host["cores"] == pytest.approx(2.0, abs=0.02)
    assert host["pass_overhead"] == "150us"
    launch, gradient = (
        float(host[name].removesuffix("us")) for name in ("launch_overhead", "gradient_launch_overhead")
    )
    assert launch - gradient == pytest.approx(3.0, abs=0.1)
    assert 7.0 < launch < 9.0  # what the kernel takes by itself is not counted twice
    assert 0 < float(host["message_overhead"].removesuffix("us")) < 1000


def test_the_link_takes_no_longer_than_messages_of_the_runtime_over_it(rows: list[Measurement]) -> None:
    swift = [replace(one, time_s=50e-6) if one.op == "message" else one for one in rows]
    content = calibrate(swift, base="local-cpu", name="here").content
    (message,) = (one for one in swift if one.op == "message")
    assert transfer_times_s(content, [message]) == pytest.approx([50e-6], rel=0.01)
    assert content["host"]["message_overhead"] == "0us"


def test_the_file_loads_and_predicts(fitted, tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(yaml_text(fitted.content))
    assert load_cluster(str(path)).host.cores == pytest.approx(2.0, abs=0.02)
    model = cluster_cost_model(str(path))
    product_ = Operation(
        kind=OpKind.MATMUL,
        name="mm",
        shape=(1, 512, 512, 512),
        dtype="fp32",
        flops=2 * 512**3,
        bytes=3 * 2**20,
    )
    alone = 2 * 512**3 / (0.8 * 0.2e12) + 2e-6
    called = float(fitted.content["host"]["launch_overhead"].removesuffix("us")) * 1e-6
    assert model.operation(product_).seconds == pytest.approx(alone + called, rel=0.05)
    assert model.pass_overhead.seconds == pytest.approx(150e-6)
    small = model.collective(CollectiveKind.ALL_REDUCE, size_bytes=64, ranks=range(4)).seconds
    assert small == pytest.approx(3e-3, rel=0.1)


def test_another_stack_does_not_take_the_costs_of_this_one(fitted, tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text(yaml_text(fitted.content | {"host": fitted.content["host"] | {"stack": "other"}}))
    assert cluster_cost_model(str(path)).pass_overhead.seconds == 0


def test_a_table_of_two_devices_is_refused(rows: list[Measurement]) -> None:
    with pytest.raises(CostModelError, match="must be one device"):
        calibrate([rows[0], replace(rows[1], device="another")], base="local-cpu", name="x")


def test_a_pass_without_its_flops_and_bytes_is_refused(rows: list[Measurement]) -> None:
    broken = [replace(one, shape=one.shape[:1]) if one.op == "pass" else one for one in rows]
    with pytest.raises(CostModelError, match="must be three sizes"):
        calibrate(broken, base="local-cpu", name="x")


def test_a_shape_of_another_kind_is_refused(rows: list[Measurement]) -> None:
    with pytest.raises(CostModelError, match="must be 4 sizes for matmul"):
        calibrate([replace(rows[0], shape=(3, 4))], base="local-cpu", name="x")


def test_a_kernel_whose_bytes_are_not_known_is_refused() -> None:
    with pytest.raises(CostModelError, match="is not known"):
        calibrate([row("elementwise", (64,), kernel="gelu2")], base="local-cpu", name="x")


@pytest.mark.parametrize("name", ["dgx-h100", "local-cpu"])
def test_a_slower_cluster_takes_as_many_times_as_long(name: str, tmp_path: Path) -> None:
    content = cluster_content(name)
    factors = {"compute": 1.5, "communication": 2.0, "host": 1.25}
    assert set(factors) == set(BOUNDS)
    path = tmp_path / "slow.yaml"
    path.write_text(yaml_text(slower(content, factors, stack="piper", launch_s=10e-6)))
    before, after = cluster_cost_model(name), cluster_cost_model(str(path))
    for op, size in (("all_reduce", 2**24), ("all_gather", 2**10)):
        times = [
            model.collective(CollectiveKind(op), size_bytes=size, ranks=range(8)).seconds
            for model in (before, after)
        ]
        assert times[1] == pytest.approx(2 * times[0], rel=0.01)
    moved = Operation(kind=OpKind.COPY, name="copy", shape=(2**24,), dtype="fp32", flops=0, bytes=2**27)
    assert after.operation(moved).seconds == pytest.approx(1.5 * before.operation(moved).seconds, rel=0.01)
    if before.launch_overhead_s:
        assert after.launch_overhead_s == pytest.approx(12.5e-6)
