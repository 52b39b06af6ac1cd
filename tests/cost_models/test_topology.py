"""Where ranks lie on a cluster."""

import pytest

from cost_models import LinkSpec, load_cluster
from cost_models.errors import CostModelError
from cost_models.topology import Spread


def test_ranks_fill_nodes_in_order():
    cluster = load_cluster("dgx-h100")
    assert [cluster.node(rank) for rank in (0, 7, 8, 63)] == [0, 0, 1, 7]


def test_a_group_is_described_by_its_nodes_and_its_thinnest_and_thickest_node():
    cluster = load_cluster("dgx-h100")
    assert cluster.spread(range(6, 18)) == Spread(num_ranks=12, num_nodes=3, fewest=2, most=8)
    assert cluster.spread((3,)) == Spread(num_ranks=1, num_nodes=1, fewest=1, most=1)


def test_members_of_a_node_share_its_interfaces_equally():
    cluster = load_cluster("dgx-h100")
    assert [cluster.network_share(members) for members in (1, 4, 8)] == [50e9, 200e9, 400e9]


def test_more_gpus_than_the_cluster_has_names_the_limit():
    cluster = load_cluster("h100-8gpu")
    cluster.require_gpus(8)
    load_cluster("dgx-h100").require_gpus(16384)
    with pytest.raises(CostModelError) as caught:
        cluster.require_gpus(16, where="--gpus")
    assert (caught.value.where, caught.value.field, caught.value.value) == ("--gpus", "gpus", 16)
    assert "8 GPUs of h100-8gpu (1 x 8)" in caught.value.rule
    assert "at most 8" in caught.value.fix


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_the_cluster_lacks_is_refused(rank):
    with pytest.raises(CostModelError) as caught:
        load_cluster("h100-8gpu").node(rank)
    assert caught.value.field == "rank"


@pytest.mark.parametrize("ranks", [(), (1, 1)])
def test_a_group_must_have_distinct_members(ranks):
    with pytest.raises(CostModelError) as caught:
        load_cluster("dgx-h100").spread(ranks)
    assert caught.value.fix == "name every member once"


def test_one_process_per_rank_has_no_network_on_this_machine():
    with pytest.raises(CostModelError) as caught:
        load_cluster("local-cpu").network_share(1)
    assert caught.value.field == "inter"


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), True, "fast"])
def test_a_link_without_bandwidth_names_the_field_and_the_unit(value):
    with pytest.raises(CostModelError) as caught:
        LinkSpec(bandwidth_bytes_per_s=value, latency_s=1e-6)
    assert caught.value.field == "bandwidth_bytes_per_s"
    assert "bytes per second" in caught.value.fix
