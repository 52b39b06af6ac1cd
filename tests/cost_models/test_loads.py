"""What communication holds of links, processors and memory: by hand on two nodes of two, and as laws."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cost_models import CollectiveKind, LinkKind, UnitCostModel, cluster_cost_model, load_cluster
from cost_models.errors import CostModelError
from cost_models.loads import Loads
from cost_models.models.collectives import Collectives
from cost_models.price import bus_factor
from cost_models.topology import Spine

DGX = ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"]
AR, AG, RS, A2A, SHIFT = CollectiveKind
OUT = [LinkKind.PORT_OUT, LinkKind.RAIL_OUT, LinkKind.UPLINK_OUT, LinkKind.LEAF_OUT, LinkKind.HOST_OUT]
IN = [LinkKind.PORT_IN, LinkKind.RAIL_IN, LinkKind.UPLINK_IN, LinkKind.LEAF_IN, LinkKind.HOST_IN]


def two_by_two(**changes):
    """Return two nodes of two H100 with an interface each, rings only."""
    cluster = load_cluster("dgx-h100")
    network = replace(cluster.network(), nics_per_node=2, two_node_tree=False, **changes)
    return replace(cluster, gpus_per_node=2, inter=network, in_switch=None)


def in_pairs(cluster):
    """Return the same cluster, where the switch reduces for two members already."""
    h100 = load_cluster("dgx-h100")
    network = replace(cluster.network(), two_node_tree=True)
    return replace(cluster, in_switch=h100.in_switch, in_switch_from=2, inter=network)


def crossing(loads, use):
    """Return the bytes on each link by kind, without kinds that carry none."""
    total = np.bincount(use.links, use.link_bytes, minlength=len(loads.links.bytes_per_s))
    by_kind = {kind: total[links.start : links.stop] for kind, links in loads.links.ranges.items()}
    return {kind: values.tolist() for kind, values in by_kind.items() if values.any()}


def collective(cluster, kind, size_bytes, members):
    loads = Loads(Collectives(cluster), num_ranks=4)
    return crossing(loads, loads.collective(kind, size_bytes=size_bytes, members=np.array(members)))


def both(links):
    """Return these bytes out and in, alike."""
    names = {LinkKind.PORT_OUT: LinkKind.PORT_IN, LinkKind.RAIL_OUT: LinkKind.RAIL_IN}
    names[LinkKind.UPLINK_OUT] = LinkKind.UPLINK_IN
    return links | {names[kind]: values for kind, values in links.items()}


def test_a_ring_over_two_nodes_leaves_each_by_both_of_its_members():
    """Bus bytes 600 of each member: half over NVLink, half over its rail; 600 leave each node."""
    links = {
        LinkKind.PORT_OUT: [300] * 4,
        LinkKind.RAIL_OUT: [300] * 4,
        LinkKind.UPLINK_OUT: [600] * 2,
    }
    assert collective(two_by_two(), AR, 400, [[0, 1, 2, 3]]) == both(links)


def test_rings_between_the_nodes_use_no_nvlink_and_each_its_own_rail():
    links = {LinkKind.RAIL_OUT: [200] * 4, LinkKind.UPLINK_OUT: [400] * 2}
    assert collective(two_by_two(), AG, 400, [[0, 2], [1, 3]]) == both(links)


def test_rings_inside_the_nodes_use_nvlink_alone():
    assert collective(two_by_two(), RS, 400, [[0, 1], [2, 3]]) == both({LinkKind.PORT_OUT: [200] * 4})


def test_all_to_all_sends_a_quarter_to_the_neighbour_and_half_to_the_other_node():
    links = {
        LinkKind.PORT_OUT: [100] * 4,
        LinkKind.RAIL_OUT: [200] * 4,
        LinkKind.UPLINK_OUT: [400] * 2,
    }
    assert collective(two_by_two(), A2A, 400, [[0, 1, 2, 3]]) == both(links)


def test_a_ring_shift_takes_the_links_on_its_way():
    assert collective(two_by_two(), SHIFT, 10, [[0, 1, 2, 3]]) == {
        LinkKind.PORT_OUT: [10, 0, 10, 0],
        LinkKind.PORT_IN: [0, 10, 0, 10],
        LinkKind.RAIL_OUT: [0, 10, 0, 10],
        LinkKind.RAIL_IN: [10, 0, 10, 0],
        LinkKind.UPLINK_OUT: [10, 10],
        LinkKind.UPLINK_IN: [10, 10],
    }


def test_transfers_inside_a_node_and_between_nodes_take_different_links():
    loads = Loads(Collectives(two_by_two()), num_ranks=4)
    use = loads.transfer(size_bytes=10, pairs=np.array([[0, 1], [1, 2]]))
    assert crossing(loads, use) == {
        LinkKind.PORT_OUT: [10, 0, 0, 0],
        LinkKind.PORT_IN: [0, 10, 0, 0],
        LinkKind.RAIL_OUT: [0, 10, 0, 0],
        LinkKind.RAIL_IN: [0, 0, 10, 0],
        LinkKind.UPLINK_OUT: [10, 0],
        LinkKind.UPLINK_IN: [0, 10],
    }


def test_the_switch_sends_the_buffer_once_and_each_part_of_the_result_once():
    links = both({LinkKind.PORT_OUT: [600, 600, 0, 0]})
    assert collective(in_pairs(two_by_two()), AR, 400, [[0, 1]]) == links


def test_a_tree_of_two_nodes_sends_each_byte_once_between_them():
    links = {
        LinkKind.PORT_OUT: [600] * 4,
        LinkKind.RAIL_OUT: [200] * 4,
        LinkKind.UPLINK_OUT: [400] * 2,
    }
    assert collective(in_pairs(two_by_two()), AR, 400, [[0, 1, 2, 3]]) == both(links)


def test_sets_that_lie_differently_are_added_up():
    """One in a node, reduced in its switch; one over both, with a single member on each: a ring."""
    cluster = in_pairs(two_by_two())
    links = {
        LinkKind.PORT_OUT: [600, 600, 0, 0],
        LinkKind.RAIL_OUT: [400, 0, 400, 0],
        LinkKind.UPLINK_OUT: [400, 400],
    }
    assert collective(cluster, AR, 400, [[0, 1], [0, 2]]) == both(links)


def test_host_copies_take_the_link_of_their_device_in_their_direction():
    loads = Loads(Collectives(two_by_two()), num_ranks=4)
    away = loads.host_copy(size_bytes=10, ranks=np.array([0, 3]), to_host=True)
    back = loads.host_copy(size_bytes=10, ranks=np.array([1]), to_host=False)
    assert crossing(loads, away) == {LinkKind.HOST_OUT: [10, 0, 0, 10]}
    assert crossing(loads, back) == {LinkKind.HOST_IN: [0, 10, 0, 0]}
    assert (away.processors, away.latency_s) == (0, pytest.approx(10e-6))


def test_devices_behind_one_switch_share_its_link_to_the_host():
    loads = Loads(Collectives(replace(two_by_two(), gpus_per_host_link=2)), num_ranks=4)
    use = loads.host_copy(size_bytes=10, ranks=np.arange(3), to_host=True)
    assert crossing(loads, use) == {LinkKind.HOST_OUT: [20, 10]}


def test_only_what_changes_the_leaf_crosses_the_spine():
    """Four nodes of two, two nodes below each leaf."""
    cluster = two_by_two(spine=Spine(nodes_per_leaf=2, oversubscription=2.0))
    loads = Loads(Collectives(cluster), num_ranks=8)
    leaves = {}
    for kind, members in (
        (AG, [[0, 2, 4, 6]]),
        (A2A, [[0, 2, 4, 6]]),
        (SHIFT, [[0, 2, 4, 6]]),
        (AG, [[0, 2]]),
    ):
        use = loads.collective(kind, size_bytes=400, members=np.array(members))
        leaves[kind, len(members[0])] = crossing(loads, use).get(LinkKind.LEAF_OUT)
    assert leaves == {(AG, 4): [300, 300], (A2A, 4): [400, 400], (SHIFT, 4): [400, 400], (AG, 2): None}
    capacity = loads.links.bytes_per_s[loads.links.ranges[LinkKind.LEAF_OUT].start]
    assert capacity == 2 * 2 * 50e9 / 2


def test_devices_that_share_an_interface_share_its_rail():
    cluster = load_cluster("dgx-h100")
    cluster = replace(cluster, inter=replace(cluster.network(), nics_per_node=2))
    loads = Loads(Collectives(cluster), num_ranks=16)
    rings = np.arange(16).reshape(2, 8).T  # eight rings of one member on each node, four on each rail
    use = loads.collective(AG, size_bytes=2**30, members=rings)
    assert crossing(loads, use)[LinkKind.RAIL_OUT] == [4 * 2**29] * 4
    one = loads.collective(AG, size_bytes=2**30, members=rings[:1])
    whole = loads.collective(AG, size_bytes=2**30, members=np.arange(16)[None])
    assert (one.processors, whole.processors) == (4, 8)


kinds = st.sampled_from(list(CollectiveKind))
sizes = st.one_of(st.integers(1, 2**20), st.integers(2**20, 2**36))


@cache
def model(name):
    return cluster_cost_model(name)


@st.composite
def groups(draw, most_nodes=8):
    """Return all groups along one axis of a mesh that fills its nodes, and the number of ranks."""
    inner = draw(st.sampled_from([1, 2, 4, 8, 16]))
    members = draw(st.sampled_from([2, 4, 8, 16]))
    num_ranks = max(8, inner * members) * draw(st.integers(1, most_nodes))
    num_ranks = -(-num_ranks // (inner * members)) * inner * members
    return np.arange(num_ranks).reshape(-1, members, inner).swapaxes(1, 2).reshape(-1, members), num_ranks


def slowest_s(cost_model, kind, size_bytes, members):
    sets = cost_model.distinct(members.tolist())
    return max(cost_model.collective(kind, size_bytes=size_bytes, ranks=ranks).seconds for ranks in sets)


def load_alone(cost_model, use, *, num_ranks, seconds):
    """Return the share of each link that the work holds while bytes flow."""
    capacity = cost_model.machine(num_ranks).link_bytes_per_s
    total = np.bincount(use.links, use.link_bytes, minlength=len(capacity))
    return total / capacity / (seconds - use.latency_s)


@cache
def with_interfaces(name, nics):
    cluster = load_cluster(name)
    return cluster_cost_model(replace(cluster, inter=replace(cluster.network(), nics_per_node=nics)))


@given(
    name=st.sampled_from(DGX),
    nics=st.sampled_from([1, 2, 3, 4, 8, 16]),
    kind=kinds,
    size=sizes,
    group=groups(),
)
def test_no_link_is_overloaded_where_all_devices_do_the_same(name, nics, kind, size, group):
    assume(kind is not SHIFT or nics >= 8)  # the next test
    members, num_ranks = group
    cost_model = with_interfaces(name, nics)
    use = cost_model.collective_use(kind, size_bytes=size, members=members, num_ranks=num_ranks)
    seconds = slowest_s(cost_model, kind, size, members)
    assert 0 <= use.latency_s < seconds
    assert load_alone(cost_model, use, num_ranks=num_ranks, seconds=seconds).max() <= 1 + 1e-9


def test_ring_shifts_that_leave_by_one_of_a_nodes_interfaces_overload_it():
    """Priced as if each had one of the two interfaces; ranks 6 and 7 have the same one."""
    cost_model = with_interfaces("dgx-h100", 2)
    members = np.arange(16).reshape(8, 2).T
    use = cost_model.collective_use(SHIFT, size_bytes=2**30, members=members, num_ranks=16)
    seconds = slowest_s(cost_model, SHIFT, 2**30, members)
    load = load_alone(cost_model, use, num_ranks=16, seconds=seconds)
    assert load.max() == pytest.approx(2 * 0.8)


@given(name=st.sampled_from(DGX), size=sizes, distance=st.sampled_from([1, 2, 4, 8, 64]))
def test_no_link_is_overloaded_where_every_device_sends_to_its_peer(name, size, distance):
    cost_model = model(name)
    source = np.arange(128).reshape(-1, 2, distance)
    pairs = source.swapaxes(1, 2).reshape(-1, 2)
    use = cost_model.transfer_use(size_bytes=size, pairs=pairs, num_ranks=128)
    price = cost_model.transfer(size_bytes=size, source_rank=0, target_rank=distance)
    assert 0 < use.latency_s < price.seconds
    load = load_alone(cost_model, use, num_ranks=128, seconds=price.seconds)
    assert 0 < load.max() <= 1 + 1e-9


@given(name=st.sampled_from(DGX), size=sizes, to_host=st.booleans())
def test_no_link_is_overloaded_where_every_device_copies_to_its_host(name, size, to_host):
    cost_model = model(name)
    use = cost_model.host_copy_use(size_bytes=size, ranks=np.arange(16), to_host=to_host, num_ranks=16)
    seconds = cost_model.host_copy(size_bytes=size).seconds
    assert load_alone(cost_model, use, num_ranks=16, seconds=seconds).max() <= 1 + 1e-9


def random_sets(draw, *, num_ranks=64):
    order = draw(st.permutations(range(num_ranks)))
    members = draw(st.integers(2, 16))
    sets = draw(st.integers(1, num_ranks // members))
    return np.array(order[: sets * members]).reshape(sets, members)


@given(name=st.sampled_from(DGX), kind=kinds, size=sizes, data=st.data())
def test_what_leaves_arrives_and_is_what_the_algorithm_moves(name, kind, size, data):
    members = random_sets(data.draw)
    loads = Loads(Collectives(load_cluster(name)), num_ranks=64)
    use = loads.collective(kind, size_bytes=size, members=members)
    found = crossing(loads, use)
    sent = [sum(found.get(links, [])) for links in OUT]
    assert [sum(found.get(links, [])) for links in IN] == pytest.approx(sent)
    ports, rails, uplinks, *_ = sent
    assert uplinks == pytest.approx(rails)
    if kind is not AR or name == "dgx-a100":
        assert ports + rails == pytest.approx(members.size * size * bus_factor(kind, members.shape[1]))


@given(name=st.sampled_from(DGX), kind=kinds, size=sizes, data=st.data())
def test_many_sets_at_once_are_the_sum_of_each_alone(name, kind, size, data):
    members = random_sets(data.draw)
    spine = Spine(nodes_per_leaf=3, oversubscription=2.0)
    cluster = load_cluster(name)
    cluster = replace(cluster, inter=replace(cluster.network(), spine=spine))
    loads = Loads(Collectives(cluster), num_ranks=64)

    def total(sets):
        use = loads.collective(kind, size_bytes=size, members=sets)
        return np.bincount(use.links, use.link_bytes, minlength=len(loads.links.bytes_per_s))

    assert total(members) == pytest.approx(sum(total(row[None]) for row in members))


@given(name=st.sampled_from(DGX), kind=kinds, size=sizes, data=st.data())
def test_the_latency_is_that_of_the_slowest_set(name, kind, size, data):
    members = random_sets(data.draw)
    use = model(name).collective_use(kind, size_bytes=size, members=members, num_ranks=64)
    assert 0 <= use.latency_s <= slowest_s(model(name), kind, size, members)


@pytest.mark.parametrize(
    ("name", "kind", "members", "processors"),
    [
        ("dgx-h100", AG, np.arange(8)[None], 24),
        ("dgx-h100", AR, np.arange(8)[None], 16),
        ("dgx-h100", AR, np.arange(4)[None], 24),
        ("dgx-h100", A2A, np.arange(8)[None], 32),
        ("dgx-h100", SHIFT, np.arange(8)[None], 32),
        ("dgx-h100", AG, np.arange(64)[None], 16),
        ("dgx-h100", AG, np.arange(0, 64, 8)[None], 4),
        ("dgx-h100", AR, np.arange(16)[None], 16),
        ("dgx-b200", AR, np.arange(16)[None], 32),
        ("dgx-b200", AR, np.arange(8)[None], 24),
        ("dgx-a100", AG, np.arange(0, 64, 8)[None], 2),
        ("dgx-a100", AR, np.arange(8)[None], 24),
        ("dgx-h100", SHIFT, np.arange(0, 64, 8)[None], 2),
        ("dgx-h100", A2A, np.arange(16)[None], 16),
        ("dgx-h100", A2A, np.arange(64)[None], 16),
        ("dgx-h100", A2A, np.arange(0, 1024, 8)[None], 4),
    ],
)
def test_channels_are_processors_as_the_library_logs_them(name, kind, members, processors):
    use = model(name).collective_use(kind, size_bytes=2**30, members=members, num_ranks=1024)
    assert use.processors == processors


def message_processors(size_bytes, pair, among=None):
    use = model("dgx-h100").transfer_use(
        size_bytes=size_bytes,
        pairs=np.array([pair]),
        num_ranks=16,
        communicators=None if among is None else np.array([among]),
    )
    return use.processors


def test_transfers_hold_two_processors_over_the_network_and_many_inside_a_node():
    assert [message_processors(2**26, (0, target)) for target in (1, 8)] == [16, 2]
    assert [message_processors(2**17, (0, target)) for target in (1, 8)] == [2, 2]
    assert [message_processors(8, (0, target)) for target in (1, 8)] == [1, 1]


def test_a_pair_alone_divides_very_large_messages_into_twice_as_many_channels():
    assert [message_processors(size, (0, 1)) for size in (2**28, 2**29)] == [16, 32]


@pytest.mark.parametrize(("pipeline", "processors"), [(2, 16), (4, 8), (8, 4), (16, 2)])
def test_the_more_ranks_a_pipeline_has_the_fewer_processors_one_of_its_messages_holds(pipeline, processors):
    assert message_processors(2**25, (0, 1), among=range(pipeline)) == processors


@pytest.mark.parametrize(("kind", "memory"), [(AR, 1600), (AG, 1400), (RS, 2100), (A2A, 1400), (SHIFT, 1600)])
def test_memory_is_read_and_written_by_what_the_kind_does_with_a_byte(kind, memory):
    """800 bytes over eight members: 700 on the wire of a ring; the switch reads and writes 800."""
    use = model("dgx-h100").collective_use(kind, size_bytes=800, members=np.arange(8)[None], num_ranks=8)
    assert use.memory_bytes == memory


def test_one_member_holds_nothing():
    use = model("dgx-h100").collective_use(AR, size_bytes=8, members=np.arange(8)[:, None], num_ranks=8)
    assert (use.latency_s, use.processors, use.memory_bytes, len(use.links)) == (0, 0, 0, 0)


def test_links_have_the_names_and_capacities_of_the_hardware():
    machine = model("dgx-h100").machine(20)
    assert machine.processors == 132
    assert machine.memory_bytes_per_s == 3.35e12
    first = {kind: links.start for kind, links in machine.links.items()}
    assert machine.describe_link(first[LinkKind.PORT_OUT] + 9) == "NVLink out of rank 9"
    assert machine.describe_link(first[LinkKind.RAIL_IN] + 10) == "network interface 2 of node 1, in"
    assert machine.describe_link(first[LinkKind.UPLINK_OUT] + 2) == "uplink of node 2, out"
    assert machine.describe_link(first[LinkKind.HOST_IN] + 3) == "host link 3, to the device"
    assert len(machine.links[LinkKind.PORT_OUT]) == 24  # whole nodes
    rates = {kind: machine.link_bytes_per_s[number] for kind, number in first.items()}
    assert rates == {kind: rates[kind] for kind in first} | {
        LinkKind.PORT_OUT: 450e9,
        LinkKind.RAIL_OUT: 50e9,
        LinkKind.UPLINK_IN: 400e9,
        LinkKind.HOST_OUT: 63e9,
    }


def test_a_cluster_without_a_network_has_no_rails_and_a_cpu_shares_its_cores():
    cluster = replace(load_cluster("h100-8gpu"), inter=None)
    machine = cluster_cost_model(cluster).machine(8)
    assert list(machine.links) == [
        LinkKind.PORT_OUT, LinkKind.PORT_IN, LinkKind.HOST_OUT, LinkKind.HOST_IN,
    ]  # fmt: skip
    local = load_cluster("local-cpu")
    machine = cluster_cost_model(local).machine(8)
    assert machine.link_bytes_per_s[machine.cores] == local.host.cores
    alone = replace(local, host=replace(local.host, cores=None))
    assert cluster_cost_model(alone).machine(8) is None


def test_unit_costs_share_nothing():
    unit = UnitCostModel({}, transfer_s=1.0, collective_s=2.0, host_copy_s=3.0)
    assert unit.machine(8) is None
    uses = [
        unit.transfer_use(size_bytes=8, pairs=np.array([[0, 1]]), num_ranks=8),
        unit.collective_use(AR, size_bytes=8, members=np.arange(8)[None], num_ranks=8),
        unit.host_copy_use(size_bytes=8, ranks=np.arange(8), to_host=True, num_ranks=8),
    ]
    assert [(use.latency_s, use.processors, len(use.links)) for use in uses] == [
        (1, 0, 0),
        (2, 0, 0),
        (3, 0, 0),
    ]


@pytest.mark.parametrize("rank", [-1, 16])
def test_ranks_outside_of_the_job_are_refused(rank):
    with pytest.raises(CostModelError) as caught:
        model("dgx-h100").transfer_use(size_bytes=8, pairs=np.array([[0, rank]]), num_ranks=16)
    assert (caught.value.field, caught.value.value) == ("rank", rank)


def test_pairs_of_a_box_without_nvlink_share_its_bus():
    """One pair reaches 20.7 GB/s, four at once want 166 of 100 GB/s, eight GPUs together have 100."""
    cost_model = cluster_cost_model("a100-pcie-8gpu")
    size = 2**30
    pairs = np.arange(8).reshape(4, 2)
    seconds = slowest_s(cost_model, AG, size, pairs)
    assert size / 2 / seconds == pytest.approx(20.7e9, rel=0.01)
    bus = cost_model.machine(8).links[LinkKind.BUS_OUT]
    load = []
    for members in (pairs[:1], pairs, np.arange(8).reshape(1, 8)):
        use = cost_model.collective_use(AG, size_bytes=size, members=members, num_ranks=8)
        alone_s = slowest_s(cost_model, AG, size, members)
        load.append(load_alone(cost_model, use, num_ranks=8, seconds=alone_s)[bus].max())
    assert load == pytest.approx([0.414, 1.656, 1.0], rel=1e-6)


@pytest.mark.parametrize("name", ["a100-pcie-8gpu", "l40s-8gpu", "rtx-pro-6000-8gpu"])
def test_no_group_alone_overloads_the_bus_of_its_box(name):
    cost_model = cluster_cost_model(name)
    for kind in (AR, AG, RS, A2A):
        for ranks in (2, 4, 8):
            members = np.arange(ranks).reshape(1, ranks)
            for size in (2**20, 2**26, 2**32):
                use = cost_model.collective_use(kind, size_bytes=size, members=members, num_ranks=8)
                seconds = slowest_s(cost_model, kind, size, members)
                assert load_alone(cost_model, use, num_ranks=8, seconds=seconds).max() <= 1 + 1e-9


def test_rings_of_several_groups_share_the_interfaces_of_a_node_in_equal_parts():
    """tp = 8, 4, 2 inside a node leave 8, 4, 2 rings of 1, 2, 4 members: all interfaces are full."""
    cost_model = cluster_cost_model("dgx-a100")
    for per_node in (1, 2, 4):
        stride = 8 // per_node
        members = np.array(
            [[rank for rank in range(32) if rank % stride == first] for first in range(stride)]
        )
        use = cost_model.collective_use(AG, size_bytes=2**32, members=members, num_ranks=32)
        seconds = slowest_s(cost_model, AG, 2**32, members)
        load = load_alone(cost_model, use, num_ranks=32, seconds=seconds)
        assert load[cost_model.machine(32).links[LinkKind.UPLINK_OUT]] == pytest.approx(0.9, rel=0.01)


def test_a_group_over_two_racks_leaves_by_the_interfaces_of_its_members():
    cost_model = cluster_cost_model("gb200-nvl72")
    members = np.arange(128).reshape(1, 128)
    use = cost_model.collective_use(AG, size_bytes=2**34, members=members, num_ranks=128)
    total = np.bincount(use.links, use.link_bytes)
    links = cost_model.machine(128).links
    bus_bytes = 2**34 * 127 / 128
    assert total[links[LinkKind.RAIL_OUT]] == pytest.approx(bus_bytes / 64)
    assert total[links[LinkKind.UPLINK_OUT]] == pytest.approx(bus_bytes / 16)
    near = cost_model.transfer_use(size_bytes=100, pairs=np.array([[0, 63]]), num_ranks=128)
    assert np.isin(near.links, [*links[LinkKind.PORT_OUT], *links[LinkKind.PORT_IN]]).all()
