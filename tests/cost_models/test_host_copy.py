"""Copies between device and host: formula, laws, measured links."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import GPUS, Provenance, UnitCostModel, cluster_cost_model, load_gpu
from cost_models.errors import CostModelError
from cost_models.models.host_copy import HostCopy

gpus = st.sampled_from(sorted(GPUS))
sizes = st.integers(0, 2**40)


def seconds(gpu, size_bytes):
    return HostCopy(load_gpu(gpu)).host_copy(size_bytes=size_bytes).seconds


@given(gpu=gpus, size=sizes, more=sizes)
def test_more_bytes_never_cost_less_and_nothing_beats_the_link(gpu, size, more):
    assert seconds(gpu, size + more) >= seconds(gpu, size)
    assert seconds(gpu, size) > size / load_gpu(gpu).host_link.bandwidth_bytes_per_s


@given(gpu=gpus, size=sizes)
def test_the_band_holds_the_price(gpu, size):
    price = HostCopy(load_gpu(gpu)).host_copy(size_bytes=size)
    assert 0 < price.low_s < price.seconds < price.high_s


@pytest.mark.parametrize(
    ("gpu", "measured_gb_per_s"),
    [("a100-sxm-80gb", (24.8, 26.28)), ("h100-sxm", (51, 52)), ("h200-sxm", (52, 52))],
)
def test_large_copies_run_at_the_measured_bandwidth(gpu, measured_gb_per_s):
    reached = 2**33 / seconds(gpu, 2**33) / 1e9
    low, high = measured_gb_per_s
    assert low * 0.99 <= reached <= high * 1.01


def test_a_gpu_one_pcie_generation_later_copies_twice_as_fast():
    assert seconds("a100", 2**33) / seconds("h100", 2**33) == pytest.approx(2, rel=0.02)


def test_the_models_of_a_cluster_and_of_unit_costs_answer_too():
    price = cluster_cost_model("dgx-h100").host_copy(size_bytes=2**20)
    assert price == HostCopy(load_gpu("h100")).host_copy(size_bytes=2**20)
    assert price.provenance is Provenance.FITTED
    assert cluster_cost_model("dgx-b200").host_copy(size_bytes=1).provenance is Provenance.DATASHEET
    assert UnitCostModel({}, host_copy_s=0.25).host_copy(size_bytes=7).seconds == 0.25
    assert UnitCostModel({}).host_copy(size_bytes=7).seconds == 0


def test_a_device_without_a_stated_link_says_which_section_to_add():
    with pytest.raises(CostModelError) as caught:
        HostCopy(replace(load_gpu("h100"), host_link=None)).host_copy(size_bytes=1)
    assert (caught.value.where, caught.value.field) == ("h100-sxm", "host_link")
    assert "bandwidth, efficiency, latency" in caught.value.fix


def test_a_size_below_zero_is_refused():
    with pytest.raises(CostModelError) as caught:
        HostCopy(load_gpu("h100")).host_copy(size_bytes=-1)
    assert caught.value.field == "size_bytes"
