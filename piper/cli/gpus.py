"""`piper gpus`: the GPUs in the catalogue, or one in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from piper.cli.catalogue import names_of, plain, show_entry, show_list
from piper.cli.options import json_option

if TYPE_CHECKING:
    from cost_models import Gpu

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
    from cost_models.catalogue import gpu_figures, load_gpu
    from cost_models.hardware import ALIASES, GPUS

    if name is not None:
        entry = plain(load_gpu(name))
        show_entry(entry | {"figures": plain(gpu_figures(name))}, as_json=as_json, text_entry=entry)
        return
    entries = []
    for gpu in map(load_gpu, GPUS):
        entry = _summary(gpu) | {"aliases": names_of(gpu.name, ALIASES)}
        if as_json:
            entry = plain(gpu) | entry | {"figures": plain(gpu_figures(gpu.name))}
        entries.append(entry)
    columns = {
        "name": "name",
        "memory, GiB": "memory_gib",
        "TB/s": "memory_tb_per_s",
        "16 bit dense, TFLOP/s": "peak_tflop_per_s",
        "description": "description",
    }
    show_list("gpus", entries, columns=columns, as_json=as_json)


def _summary(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "description": gpu.description,
        "memory_gib": gpu.memory_bytes / _GIB,
        "memory_tb_per_s": gpu.memory_bytes_per_s / _TERA,
        "peak_tflop_per_s": gpu.peak("fp16") / _TERA,
        "peak_flops_per_s": dict(gpu.peak_flops_per_s),
    }
