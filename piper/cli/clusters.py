"""`piper clusters`: the clusters in the catalogue, or one in detail."""

from __future__ import annotations

import click

from piper.cli.catalogue import plain, show_entry, show_list
from piper.cli.options import json_option


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
    from cost_models.catalogue import load_cluster
    from cost_models.clusters import CLUSTERS

    if name is not None:
        show_entry(plain(load_cluster(name)), as_json=as_json)
        return
    entries = [
        {
            "name": entry.name,
            "description": entry.description,
            "gpu": entry.gpu.name,
            "gpus_per_node": entry.gpus_per_node,
            "max_nodes": entry.max_nodes,
            "nodes": "any number" if entry.max_nodes is None else str(entry.max_nodes),
        }
        for entry in map(load_cluster, CLUSTERS)
    ]
    columns = {
        "name": "name",
        "GPU": "gpu",
        "GPUs per node": "gpus_per_node",
        "nodes": "nodes",
        "description": "description",
    }
    show_list("clusters", entries, columns=columns, as_json=as_json)
