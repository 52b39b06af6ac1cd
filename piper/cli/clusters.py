"""`piper clusters`: the clusters in the catalogue, or one in detail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from piper.cli.catalogue import names_of, plain, show_entry, show_list
from piper.cli.options import json_option

if TYPE_CHECKING:
    from cost_models import Cluster


@click.command()
@click.argument("name", metavar="[NAME|FILE]", required=False)
@json_option
def clusters(name: str | None, as_json: bool) -> None:
    """List clusters, or show one with the source of every figure.

    \b
    Examples:
      piper clusters
      piper clusters dgx-h100
      piper clusters my_cluster.yaml --json
    """
    from cost_models.catalogue import cluster_figures, load_cluster
    from cost_models.clusters import ALIASES, CLUSTERS

    if name is not None:
        entry = plain(load_cluster(name))
        figures = {"figures": plain(cluster_figures(name))}
        show_entry(entry | figures, as_json=as_json, text_entry=_without_times(entry))
        return
    entries = []
    for cluster in map(load_cluster, CLUSTERS):
        entry = _summary(cluster) | {"aliases": names_of(cluster.name, ALIASES)}
        if as_json:  # its GPU in detail: `piper gpus`
            entry = plain(cluster) | entry | {"figures": plain(cluster_figures(cluster.name))}
        entries.append(entry)
    columns = {
        "name": "name",
        "GPU": "gpu",
        "GPUs per node": "gpus_per_node",
        "nodes": "nodes",
        "network, GB/s per GPU": "network_gb_per_s_per_gpu",
        "description": "description",
    }
    show_list("clusters", entries, columns=columns, as_json=as_json)


def _summary(cluster: Cluster) -> dict[str, Any]:
    several = cluster.max_nodes != 1
    return {
        "name": cluster.name,
        "description": cluster.description,
        "gpu": cluster.gpu.name,
        "gpus_per_node": cluster.gpus_per_node,
        "max_nodes": cluster.max_nodes,
        "nodes": "any number" if cluster.max_nodes is None else str(cluster.max_nodes),
        "network_gb_per_s_per_gpu": cluster.network_share(1) / 1e9 if several else None,
    }


def _without_times(value: Any) -> Any:
    """Return the entry with measured times told by their number and range."""
    if not isinstance(value, Mapping):
        return value
    if "sizes_bytes" in value:
        sizes = value["sizes_bytes"]
        return f"{len(sizes)} sizes, {sizes[0]:.0f} to {sizes[-1]:.0f} bytes"
    return {key: _without_times(entry) for key, entry in value.items()}
