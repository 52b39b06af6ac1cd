"""The file of a cluster -> `Cluster`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from cost_models.errors import CostModelError
from cost_models.gpu import Gpu
from cost_models.price import CollectiveKind, Provenance
from cost_models.read_gpu import provenance
from cost_models.topology import Channels, Cluster, Communicators, Curve, InterNode, LinkSpec, Spine
from cost_models.yaml_file import Section

_CURVED = tuple(kind for kind in CollectiveKind if kind is not CollectiveKind.RING_SHIFT)
_CHANNELS = tuple(field.name for field in fields(Channels))
_CURVE = ("base", "per_rank", "sqrt", "bandwidth", "error")


def read_cluster(content: Any, *, gpu: Gpu, where: str) -> Cluster:
    """Return the cluster of `gpu` devices that `content` describes; CostModelError names the field."""
    keys = (
        "schema_version", "name", "description", "gpu", "gpus_per_node", "max_nodes", "eager_limit",
        "communicators", "intra", "intra_collectives", "inter", "inter_collectives", "channels", "host",
    )  # fmt: skip
    file = Section(content, where=where, keys=keys)
    link = file.section("intra", ("bandwidth", "latency"))
    kinds = tuple(kind.value for kind in _CURVED)
    intra = file.section("intra_collectives", (*kinds, "transfer", "in_switch", "provenance"))
    sizes = file.section("communicators", ("pair", "group"))
    sections = (
        "communicators",
        "intra",
        "intra_collectives",
        "inter",
        "inter_collectives",
        "channels",
        "host",
    )
    basis = provenance(intra)
    return Cluster(
        name=file.text("name"),
        description=file.text("description"),
        gpu=gpu,
        gpus_per_node=file.integer("gpus_per_node"),
        max_nodes=file.integer("max_nodes") if "max_nodes" in file else None,
        intra=LinkSpec(bandwidth_bytes_per_s=link.rate("bandwidth"), latency_s=link.seconds("latency")),
        curves={kind: _curve(intra.section(kind.value, _CURVE, sourced=False), basis) for kind in _CURVED},
        in_switch=_curve(_in_switch(intra), basis) if "in_switch" in intra else None,
        in_switch_from=_in_switch(intra).integer("from_ranks") if "in_switch" in intra else 0,
        transfer_curve=_curve(intra.section("transfer", _CURVE, sourced=False), basis),
        inter=_inter(file) if "inter" in file else None,
        eager_limit_bytes=file.size("eager_limit", zero_ok=True),
        communicators=Communicators(
            pair_bytes=sizes.size("pair", zero_ok=True), group_bytes=sizes.size("group", zero_ok=True)
        ),
        channels=_channels(file, gpu) if "channels" in file else Channels(),
        gpus_per_host_link=(
            file.section("host", ("gpus_per_link",)).integer("gpus_per_link") if "host" in file else 1
        ),
        sources={"cluster": file.source}
        | {name: content[name]["source"] for name in sections if name in file},
    )


def _in_switch(intra: Section) -> Section:
    return intra.section("in_switch", (*_CURVE, "from_ranks"), sourced=False)


def _curve(section: Section, basis: Provenance) -> Curve:
    return Curve(
        base_s=section.seconds("base", zero_ok=True),
        per_rank_s=section.seconds("per_rank", zero_ok=True),
        sqrt_s=section.seconds("sqrt", zero_ok=True),
        bandwidth_bytes_per_s=section.rate("bandwidth"),
        error=section.error(),
        provenance=basis,
    )


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


def _inter(file: Section) -> InterNode:
    link = file.section("inter", ("nics_per_node", "nic_bandwidth", "nic_latency", "spine"))
    keys = (
        "ring_efficiency", "all_to_all_efficiency", "transfer_efficiency", "ring_latency", "tree_latency",
        "peer_latency", "protocol_switch", "two_node_tree", "large_from", "large_error", "small_error",
        "provenance",
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
    )


def _spine(link: Section) -> Spine:
    section = link.section("spine", ("nodes_per_leaf", "oversubscription"), sourced=False)
    return Spine(
        nodes_per_leaf=section.integer("nodes_per_leaf"), oversubscription=section.number("oversubscription")
    )
