"""The file of a cluster -> `Cluster`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from cost_models.errors import CostModelError
from cost_models.gpu import Gpu
from cost_models.host import HostSpec
from cost_models.measured import Measured
from cost_models.price import CollectiveKind, Provenance, bus_factor
from cost_models.read_gpu import provenance
from cost_models.read_measured import TRANSFER, read_table
from cost_models.topology import Channels, Cluster, Communicators, Curve, InterNode, LinkSpec, Spine
from cost_models.yaml_file import Section

_CURVED = tuple(kind for kind in CollectiveKind if kind is not CollectiveKind.RING_SHIFT)
_COSTS = ("launch_overhead", "gradient_launch_overhead", "pass_overhead", "message_overhead")
_CHANNELS = tuple(field.name for field in fields(Channels))
_HOST = ("gpus_per_link", "cores", *_COSTS, "stack", "error", "provenance")
_CURVE = ("base", "per_rank", "latency", "sqrt", "bandwidth", "error")


def read_cluster(content: Any, *, gpu: Gpu, where: str) -> Cluster:
    """Return the cluster of `gpu` devices that `content` describes; CostModelError names the field."""
    keys = (
        "schema_version", "name", "description", "gpu", "gpus_per_node", "max_nodes", "eager_limit",
        "communicators", "intra", "intra_collectives", "inter", "inter_collectives", "channels", "host",
        "domain",
    )  # fmt: skip
    file = Section(content, where=where, keys=keys)
    link = file.section("intra", ("bandwidth", "latency", "bus"))
    kinds = tuple(kind.value for kind in _CURVED)
    intra = file.section(
        "intra_collectives", (*kinds, "transfer", "in_switch", "provenance", "table", "table_error")
    )
    sizes = file.section("communicators", ("pair", "group"))
    sections = (
        "communicators",
        "intra",
        "intra_collectives",
        "inter",
        "inter_collectives",
        "channels",
        "host",
        "domain",
    )
    bus = link.rate("bus") if "bus" in link else None
    curves, in_switch, transfer = _curves(intra, bus_bytes_per_s=bus or math.inf)
    host = file.section("host", _HOST) if "host" in file else None
    return Cluster(
        name=file.text("name"),
        description=file.text("description"),
        gpu=gpu,
        gpus_per_node=file.integer("gpus_per_node"),
        max_nodes=file.integer("max_nodes") if "max_nodes" in file else None,
        intra=LinkSpec(bandwidth_bytes_per_s=link.rate("bandwidth"), latency_s=link.seconds("latency")),
        curves=curves,
        in_switch=in_switch,
        in_switch_from=_switch_from(intra),
        transfer_curve=transfer,
        inter=_inter(file) if "inter" in file else None,
        eager_limit_bytes=file.size("eager_limit", zero_ok=True),
        communicators=Communicators(
            pair_bytes=sizes.size("pair", zero_ok=True), group_bytes=sizes.size("group", zero_ok=True)
        ),
        channels=_channels(file, gpu) if "channels" in file else Channels(),
        gpus_per_host_link=host.integer("gpus_per_link") if host and "gpus_per_link" in host else 1,
        gpus_per_domain=file.section("domain", ("gpus",)).integer("gpus") if "domain" in file else None,
        bus_bytes_per_s=bus,
        host=_host(host) if host else HostSpec(),
        sources={"cluster": file.source}
        | {name: content[name]["source"] for name in sections if name in file},
    )


def _curves(
    intra: Section, *, bus_bytes_per_s: float
) -> tuple[dict[CollectiveKind, Curve], Curve | None, Curve]:
    """Return the curves of collectives, of reduction in the switch, and of transfers, with measured times."""
    basis, switch_from, measured = provenance(intra), _switch_from(intra), _by_bus_bytes(intra)
    reduced = measured.get(CollectiveKind.ALL_REDUCE.value)
    in_switch = None
    if switch_from:
        switch = intra.section("in_switch", (*_CURVE, "from_ranks"), sourced=False)
        in_switch = replace(_curve(switch, basis), measured=_of(reduced, lambda ranks: ranks >= switch_from))
        measured[CollectiveKind.ALL_REDUCE.value] = _of(reduced, lambda ranks: ranks < switch_from)
    curves: dict[CollectiveKind, Curve] = {
        kind: replace(
            _curve(intra.section(kind.value, _CURVE, sourced=False), basis),
            measured=measured.get(kind.value),
            bus_bytes_per_s=bus_bytes_per_s,
        )
        for kind in _CURVED
    }
    transfer = _curve(intra.section(TRANSFER, _CURVE, sourced=False), basis)
    return curves, in_switch, replace(transfer, measured=measured.get(TRANSFER))


def _by_bus_bytes(intra: Section) -> dict[str, Measured | None]:
    """Return the measured times inside a node, by operation and bus bytes."""
    return {
        op: replace(
            found,
            series={
                group: replace(
                    each, sizes_bytes=tuple(size * _bus(op, group[1]) for size in each.sizes_bytes)
                )
                for group, each in found.series.items()
            },
        )
        for op, found in read_table(intra, several_nodes=False).items()
    }


def _bus(op: str, num_ranks: int) -> float:
    return 1.0 if op == TRANSFER else bus_factor(CollectiveKind(op), num_ranks)


def _of(measured: Measured | None, chosen: Callable[[int], bool]) -> Measured | None:
    """Return the series of the numbers of ranks that are `chosen`, None if there are none."""
    if measured is None:
        return None
    series = {group: each for group, each in measured.series.items() if chosen(group[1])}
    return replace(measured, series=series) if series else None


def _switch_from(intra: Section) -> int:
    """Return the smallest group whose all-reduce the switch reduces, 0 without one."""
    if "in_switch" not in intra:
        return 0
    return intra.section("in_switch", (*_CURVE, "from_ranks"), sourced=False).integer("from_ranks")


def _curve(section: Section, basis: Provenance) -> Curve:
    return Curve(
        base_s=section.seconds("base", zero_ok=True),
        per_rank_s=section.seconds("per_rank", zero_ok=True),
        sqrt_s=section.seconds("sqrt", zero_ok=True),
        bandwidth_bytes_per_s=section.rate("bandwidth"),
        error=section.error(),
        provenance=basis,
        latencies=_latencies(section) if "latency" in section else (),
    )


def _latencies(section: Section) -> tuple[tuple[int, float], ...]:
    """Return (ranks, seconds) by rising ranks: keys such as ranks_4."""
    sizes = section.numbered("latency", "ranks_")
    table = section.section("latency", tuple(f"ranks_{size}" for size in sizes), sourced=False)
    return tuple((size, table.seconds(f"ranks_{size}", zero_ok=True)) for size in sizes)


def _channels(file: Section, gpu: Gpu) -> Channels:
    """Return the channels that the file names; those that it does not name are the default's."""
    section = file.section("channels", _CHANNELS)
    given = {name: section.integer(name) for name in section.names()}
    for name, number in given.items():
        if not number < gpu.processors:
            raise CostModelError(
                where=section.where,
                field=f"channels.{name}",
                value=number,
                rule=f"must be below the {gpu.processors} processors of {gpu.name}: each channel holds one",
                fix="give what the communication library logs (NCCL_DEBUG=INFO)",
            )
    return Channels(**given)


def _host(section: Section) -> HostSpec:
    """Return what a node's host does; costs come with their stack, error and provenance."""
    cores = section.number("cores") if "cores" in section else None
    if not any(key in section for key in _COSTS):
        return HostSpec(cores=cores)
    return HostSpec(
        cores=cores,
        stack=section.text("stack"),
        launch_s=section.seconds("launch_overhead", zero_ok=True),
        gradient_launch_s=section.seconds("gradient_launch_overhead", zero_ok=True),
        pass_s=section.seconds("pass_overhead", zero_ok=True),
        message_s=section.seconds("message_overhead", zero_ok=True),
        error=section.error(),
        provenance=provenance(section),
    )


def _inter(file: Section) -> InterNode:
    link = file.section("inter", ("nics_per_node", "nic_bandwidth", "nic_latency", "spine"))
    keys = (
        "ring_efficiency", "all_to_all_efficiency", "transfer_efficiency", "ring_latency", "tree_latency",
        "peer_latency", "protocol_switch", "two_node_tree", "large_from", "large_error", "small_error",
        "provenance", "table", "table_error",
    )  # fmt: skip
    section = file.section("inter_collectives", keys)
    return InterNode(
        nics_per_node=link.integer("nics_per_node"),
        nic=LinkSpec(bandwidth_bytes_per_s=link.rate("nic_bandwidth"), latency_s=link.seconds("nic_latency")),
        ring_efficiency=section.number("ring_efficiency", up_to=1),
        all_to_all_efficiency=section.number("all_to_all_efficiency", up_to=1),
        transfer_efficiency=section.number("transfer_efficiency", up_to=1),
        ring_latency_s=section.rising_seconds("ring_latency"),
        tree_latency_s=section.rising_seconds("tree_latency"),
        peer_latency_s=section.rising_seconds("peer_latency"),
        protocol_switch_bytes=section.size("protocol_switch"),
        two_node_tree=section.flag("two_node_tree"),
        large_bytes=section.size("large_from"),
        large_error=section.error("large_error"),
        small_error=section.error("small_error"),
        provenance=provenance(section),
        spine=_spine(link) if "spine" in link else None,
        measured=read_table(section, several_nodes=True),
    )


def _spine(link: Section) -> Spine:
    section = link.section("spine", ("nodes_per_leaf", "oversubscription"), sourced=False)
    return Spine(
        nodes_per_leaf=section.integer("nodes_per_leaf"), oversubscription=section.number("oversubscription")
    )
