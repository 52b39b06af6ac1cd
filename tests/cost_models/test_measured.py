"""Measured communication: exact where measured, bounded between, and what is held out is met."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import CLUSTERS, CollectiveKind, Provenance, load_cluster
from cost_models.errors import CostModelError
from cost_models.measured import Distance, Measured, Series
from cost_models.models.collectives import Collectives
from cost_models.price import bus_factor
from cost_models.topology import Spread

AR, AG, RS, A2A, SHIFT = CollectiveKind
TABLES = [
    ("dgx-a100", 0.03, 0.12),
    ("dgx-h100", 0.03, 0.1),
    ("dgx-h200", 0.03, 0.1),
    ("dgx-b200", 0.03, 0.12),
    ("dgx-b300", 0.03, 0.12),
    ("gb200-nvl72", 0.03, 0.12),
    ("gb300-nvl72", 0.03, 0.12),
    ("dgx-1v", 0.02, 0.1),
    ("l40s-8gpu", 0.04, 0.25),
    ("rtx-pro-6000-8gpu", 0.03, 0.2),
]
"""Cluster, median and 90th percentile of the error at sizes held out."""

TWO = Series(sizes_bytes=(1024.0, 4096.0), seconds=(10e-6, 20e-6))


UNKNOWN_UNIT = "has the unit 'parsec', which does not fit here"


def line(size):
    return 5e-6 + size * 1e-9


def test_a_measured_size_takes_what_was_measured_and_one_between_lies_between():
    assert TWO.at(1024, line).seconds == 10e-6
    assert TWO.at(2048, line).seconds == pytest.approx((10e-6 * 20e-6) ** 0.5)
    assert [TWO.at(size, line).distance for size in (4096, 2048, 8192)] == list(Distance)


def test_beyond_the_measured_sizes_the_formula_is_scaled_to_meet_them():
    assert TWO.at(2**20, line).seconds == pytest.approx(line(2**20) * 20e-6 / line(4096))
    assert TWO.at(0, line).seconds == pytest.approx(line(0) * 10e-6 / line(1024))


@given(sizes=st.lists(st.floats(0, 2**30), min_size=2, max_size=2))
def test_time_rises_with_size_where_the_measurements_do(sizes):
    small, large = sorted(sizes)
    assert TWO.at(small, line).seconds <= TWO.at(large, line).seconds * (1 + 1e-12)


def test_numbers_of_nodes_between_measured_ones_lie_between_and_beyond_nothing_is_said():
    one = Series(sizes_bytes=(1024.0,), seconds=(10e-6,))
    many = Series(sizes_bytes=(1024.0,), seconds=(40e-6,))
    measured = Measured(series={(2, 4): one, (8, 4): many}, error=0.1)
    assert measured.of_nodes((4, 4), 1024, line).seconds == pytest.approx(20e-6)
    assert measured.of_nodes((16, 4), 1024, line) is None
    assert measured.of_nodes((4, 8), 1024, line) is None


def test_more_ranks_than_measured_take_as_much_longer_as_the_formula_says():
    measured = Measured(series={(1, 4): TWO}, error=0.1)

    def formula(size, ranks):
        return line(size) + ranks * 1e-6

    found = measured.of_ranks(6, 1024, formula)
    assert found.seconds == pytest.approx(12e-6)
    assert found.distance is Distance.BEYOND
    assert measured.of_ranks(2, 1024, formula).seconds == pytest.approx(8e-6)


def halved(measured):
    """Return every other size, and the last one."""
    if measured is None:
        return None
    series = {}
    for group, each in measured.series.items():
        kept = [i for i in range(len(each.seconds)) if i % 2 == 0 or i == len(each.seconds) - 1]
        series[group] = Series(
            sizes_bytes=tuple(each.sizes_bytes[i] for i in kept), seconds=tuple(each.seconds[i] for i in kept)
        )
    return replace(measured, series=series)


def held_out_errors(name):
    cluster = load_cluster(name)
    curves = {kind: replace(curve, measured=halved(curve.measured)) for kind, curve in cluster.curves.items()}
    switch = cluster.in_switch and replace(cluster.in_switch, measured=halved(cluster.in_switch.measured))
    few = Collectives(replace(cluster, curves=curves, in_switch=switch))
    for kind, curve in [*cluster.curves.items(), (AR, cluster.in_switch)]:
        for (_, ranks), series in (curve.measured.series if curve and curve.measured else {}).items():
            spread = Spread(num_ranks=ranks, num_nodes=1, fewest=ranks, most=ranks)
            for number in range(1, len(series.seconds) - 1, 2):
                size = round(series.sizes_bytes[number] / bus_factor(kind, ranks))
                yield abs(few.price(kind, size, spread).seconds / series.seconds[number] - 1)


@pytest.mark.accuracy
@pytest.mark.parametrize(("name", "median", "most"), TABLES)
def test_every_other_measured_size_is_predicted_from_the_rest(name, median, most):
    errors = list(held_out_errors(name))
    assert len(errors) >= 60
    assert statistics.median(errors) <= median
    assert statistics.quantiles(errors, n=10)[-1] <= most


@pytest.mark.parametrize("name", CLUSTERS)
def test_packaged_times_rise_with_size(name):
    cluster = load_cluster(name)
    network = cluster.inter.measured.values() if cluster.inter else ()
    curves = [*cluster.curves.values(), cluster.in_switch, cluster.transfer_curve]
    for measured in (*network, *(curve.measured for curve in curves if curve)):
        for series in measured.series.values() if measured else ():
            assert list(series.sizes_bytes) == sorted(set(series.sizes_bytes))
            assert list(series.seconds) == sorted(series.seconds)


@pytest.fixture
def write(tmp_path):
    def write_cluster(section, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
        path = tmp_path / "mine.yaml"
        head = "schema_version: 1\nname: mine\nextends: dgx-h100\n"
        path.write_text(head + section, encoding="utf-8")
        return str(path)

    return write_cluster


INSIDE = "intra_collectives: {inherit: true, source: me, table_error: 0.02, table: %s}\n"
BETWEEN = "inter_collectives: {inherit: true, source: me, table_error: 0.02, table: %s}\n"


def test_a_file_adds_its_own_times_to_those_of_the_cluster_it_extends(write):
    text = (
        INSIDE % "{all_gather: {8: {1MiB: 30us, 4MiB: 60us}}}" + BETWEEN % "{transfer: {2x1: {1MiB: 50us}}}"
    )
    mine = Collectives(load_cluster(write(text)))
    own = mine.collective(AG, size_bytes=2**20, ranks=range(8))
    assert (own.seconds, own.provenance) == (pytest.approx(30e-6), Provenance.MEASURED)
    assert mine.collective(AG, size_bytes=2**21, ranks=range(8)).seconds == pytest.approx(1800**0.5 * 1e-6)
    base = Collectives(load_cluster("dgx-h100"))
    assert (
        mine.collective(RS, size_bytes=2**20, ranks=range(8)).seconds
        == base.collective(RS, size_bytes=2**20, ranks=range(8)).seconds
    )
    assert mine.transfer(size_bytes=2**20, source_rank=0, target_rank=8).seconds == pytest.approx(50e-6)


def test_a_csv_file_lies_beside_the_file_that_names_it(write):
    rows = "op,nodes,gpus_per_node,bytes,time_us\nall_reduce,2,8,1048576,90\nall_reduce,1,8,1048576,25\n"
    mine = Collectives(load_cluster(write(BETWEEN % "times.csv", times=rows)))
    assert mine.collective(AR, size_bytes=2**20, ranks=range(16)).seconds == pytest.approx(90e-6)


@pytest.mark.parametrize(
    ("table", "field", "rule"),
    [
        ("{all_reduced: {8: {1MiB: 1us}}}", "intra_collectives.table.all_reduced", "is no operation"),
        ("{all_reduce: {eight: {1MiB: 1us}}}", "intra_collectives.table.all_reduce", "is no group of ranks"),
        ("{all_reduce: {1: {1MiB: 1us}}}", "intra_collectives.table.all_reduce", "is no group of ranks"),
        ("{all_reduce: {8: 1us}}", "intra_collectives.table.all_reduce.8", "must be a mapping"),
        (
            "{all_reduce: {8: {1MiB: 0us}}}",
            "intra_collectives.table.all_reduce.8.1MiB",
            "must be a number > 0",
        ),
        (
            "{all_reduce: {8: {1parsec: 1us}}}",
            "intra_collectives.table.all_reduce.8",
            "has the unit 'parsec', which does not fit here",
        ),
        (
            "{all_reduce: {8: {1MiB: 1us, 1024KiB: 2us}}}",
            "intra_collectives.table.all_reduce",
            "is given twice",
        ),
        ("[1]", "intra_collectives.table", "must be a mapping"),
        ("none.csv", "table", "does not exist"),
        ("half.csv", "columns", "lack time_us"),
        ("bad.csv", "time_us", "must be a number > 0"),
    ],
)
def test_a_broken_table_is_refused_by_name(write, table, field, rule):
    half = "op,nodes,gpus_per_node,bytes\nall_reduce,1,8,4\n"
    bad = "op,nodes,gpus_per_node,bytes,time_us\nall_reduce,1,8,4,fast\n"
    with pytest.raises(CostModelError) as caught:
        load_cluster(write(INSIDE % table, half=half, bad=bad))
    assert caught.value.field == field
    assert caught.value.rule == rule


def test_a_table_needs_an_error(write):
    section = "intra_collectives: {inherit: true, source: me, table_error: null, table: {}}\n"
    with pytest.raises(CostModelError) as caught:
        load_cluster(write(section))
    assert caught.value.field == "intra_collectives.table_error"
