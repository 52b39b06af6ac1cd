"""What torch can do on this machine, as one JSON object; a process apart, so that a broken torch harms none.

`python -m piper.profiling.probe torch` describes torch, CUDA and NCCL;
`python -m piper.profiling.probe gloo` forms a group of two processes and sums a number over it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60


def describe_torch() -> dict[str, Any]:
    """Return versions, devices and back ends of the installed torch."""
    import torch

    cuda = torch.cuda.is_available()
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "devices": [_device(index) for index in range(torch.cuda.device_count())] if cuda else [],
        "nccl": _nccl_version() if cuda and nccl else None,
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "threads": torch.get_num_threads(),
    }


def try_gloo() -> dict[str, Any]:
    """Start two processes that all-reduce a 1 over gloo on this machine; returns what they got (2.0)."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        command = [sys.executable, "-m", "piper.profiling.probe", "member"]
        members = [
            subprocess.Popen(
                [*command, str(store), str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            outputs = [member.communicate(timeout=_TIMEOUT_S) for member in members]
        finally:
            for member in members:
                member.kill()
                member.wait()
    for member, (_, complaint) in zip(members, outputs, strict=True):
        if member.returncode:
            sys.exit(complaint.strip() or f"a process of the group ended with code {member.returncode}")
    return {"sum_over_two_processes": [float(output) for output, _ in outputs]}


def _member(store: str, rank: int) -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    value = torch.ones(1)
    distributed.all_reduce(value)
    sys.stdout.write(f"{value.item()}\n")
    distributed.destroy_process_group()


def _nccl_version() -> str:
    from torch.cuda import nccl

    version: Any = nccl.version
    return ".".join(map(str, version()))


def _device(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def _main(arguments: list[str]) -> None:
    match arguments:
        case ["torch"]:
            sys.stdout.write(json.dumps(describe_torch()) + "\n")
        case ["gloo"]:
            sys.stdout.write(json.dumps(try_gloo()) + "\n")
        case ["member", store, rank]:
            _member(store, int(rank))
        case _:
            sys.exit("usage: python -m piper.profiling.probe torch|gloo")


if __name__ == "__main__":
    _main(sys.argv[1:])
