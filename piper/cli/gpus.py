"""`piper gpus`: the GPUs in the catalogue, or one in detail."""

from __future__ import annotations

import click

from piper.cli.catalogue import plain, show_entry, show_list
from piper.cli.options import json_option

_TERA = 1e12
_GIB = 2**30


@click.command()
@click.argument("name", metavar="[NAME|FILE]", required=False)
@json_option
def gpus(name: str | None, as_json: bool) -> None:
    """List GPUs, or show one with the source of every figure.

    \b
    Examples:
      piper gpus
      piper gpus h100
      piper gpus my_gpu.yaml --json
    """
    from cost_models.catalogue import load_gpu
    from cost_models.hardware import GPUS

    if name is not None:
        show_entry(plain(load_gpu(name)), as_json=as_json)
        return
    entries = []
    for entry in map(load_gpu, GPUS):
        peak = entry.peak_flops_per_s.get("bf16", entry.peak_flops_per_s["fp32"])
        entries.append(
            {
                "name": entry.name,
                "description": entry.description,
                "memory_gib": entry.memory_bytes / _GIB,
                "memory_tb_per_s": entry.memory_bytes_per_s / _TERA,
                "peak_tflop_per_s": peak / _TERA,
                "peak_flops_per_s": dict(entry.peak_flops_per_s),
            }
        )
    columns = {
        "name": "name",
        "memory, GiB": "memory_gib",
        "TB/s": "memory_tb_per_s",
        "bf16 dense, TFLOP/s": "peak_tflop_per_s",
        "description": "description",
    }
    show_list("gpus", entries, columns=columns, as_json=as_json)
