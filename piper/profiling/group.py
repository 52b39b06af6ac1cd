"""Processes of this machine that measure together: `python -m piper.profiling.group RANK WORLD STORE TASK`.

[Note: after computing]
In training, communication follows computation: caches are cold, connections idle, and a thread of its own
makes the call. On a CPU that takes several times as long as one call after another, so every sample is one
call, by another thread, after some computing.

[Note: together]
Every process has one thread, as a rank of `piper run` has. All begin at a barrier; rank 0 writes what it
measured as one JSON list on its stdout. Under torchrun the processes are there already (`in_torchrun`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from piper.errors import RunFailedError
from piper.profiling.clock import Timing, timing, typical

_TIMEOUT_S = 120.0
_SAMPLES, _MOST_SAMPLES = 9, 25
_BUSY_S, _COLD_BYTES = 0.02, 4 * 2**20
"""Computing before a sample on a CPU, and what it writes to: more than the caches of a core."""
_SAMPLE_S = 0.01
_TENSORS, _SMALL, _WINDOWS = 64, 5, 9
"""Of contention: tensors of 48 KB, small kernels after each multiplication, parts of the time."""


def collectives(ranks: int, messages: Sequence[int], *, seconds: float) -> list[dict[str, Any]]:
    """Start `ranks` processes that time collectives over gloo; returns op, bytes and timing of each."""
    return _together(ranks, {"task": "collectives", "messages": list(messages), "seconds": seconds})


def contention(ranks: int, *, seconds: float) -> Timing:
    """Return the time of a round of a mixture of kernels while `ranks` processes compute it at once."""
    (found,) = _together(ranks, {"task": "contention", "seconds": seconds})
    return Timing(**found)


def in_torchrun() -> bool:
    """Tell whether torchrun started this process beside others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def time_collectives(messages: Sequence[int], *, device: str, seconds: float) -> list[dict[str, Any]]:
    """Time collectives and transfers of every size over the default group; equal on all ranks but for times.

    Args:
        messages: bytes, in the convention of `CollectiveKind`.
        device: "cpu" or "cuda".
        seconds: about how long all of it may take.
    """
    from torch import distributed

    ranks = distributed.get_world_size()
    found, each_s = [], seconds / (len(_COLLECTIVES) * len(messages))
    for op, prepare in _COLLECTIVES.items():
        for size in messages:
            elements = max(ranks, size // 4 // ranks * ranks)
            call = prepare(elements, device)
            if call is None:
                continue
            sampled = typical(_samples(call, device=device, seconds=each_s))
            found.append({"op": op, "bytes": elements * 4, **asdict(sampled)})
    return found


def _together(ranks: int, task: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(ranks), str(Path(folder) / "store"), json.dumps(task)]
        members = [
            subprocess.Popen(
                [sys.executable, "-m", "piper.profiling.group", str(rank), *arguments],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            outputs = [member.communicate(timeout=_TIMEOUT_S + task["seconds"]) for member in members]
        except subprocess.TimeoutExpired:
            raise RunFailedError(
                f"{ranks} processes that measure {task['task']} do not end\nfix: `piper doctor` tries gloo"
            ) from None
        finally:
            for member in members:
                member.kill()
                member.wait()
    for member, (_, complaint) in zip(members, outputs, strict=True):
        if member.returncode:
            last = (complaint.strip() or f"exit code {member.returncode}").splitlines()[-1]
            raise RunFailedError(f"a process that measures {task['task']} failed: {last}")
    found: list[dict[str, Any]] = json.loads(outputs[0][0].splitlines()[-1])
    return found


def _member(rank: int, ranks: int, *, store: str, task: dict[str, Any]) -> list[dict[str, Any]]:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    if task["task"] == "collectives":
        found = time_collectives(task["messages"], device="cpu", seconds=task["seconds"])
    else:
        found = [_contend(task["seconds"])]
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def _contend(seconds: float) -> dict[str, Any]:
    """Time rounds of a mixture of kernels, all processes at once: processes over the rounds of all a second.

    The tensors that rounds take in turn fill more than the caches next to a core, as those of a model do, so
    that processes which take turns on a core find them empty.
    """
    import torch
    from torch import distributed

    left, rights = torch.randn(64, 64), [torch.randn(64, 192) for _ in range(_TENSORS)]
    rounds = torch.zeros(_WINDOWS)
    window_s = seconds / _WINDOWS
    distributed.barrier()
    begin = perf_counter()
    while (window := int((perf_counter() - begin) / window_s)) < _WINDOWS:
        for right in rights:
            product = torch.mm(left, right)
            for _ in range(_SMALL):
                product = product * 0.5 + right
        rounds[window] += _TENSORS
    distributed.all_reduce(rounds)
    # Other programs only take away: the upper quartile of windows is what processes get without them.
    times = sorted(distributed.get_world_size() * window_s / float(count) for count in rounds if count)
    return asdict(timing(times)) | {"time_s": times[len(times) // 4]}


def _samples(call: Callable[[], object], *, device: str, seconds: float) -> list[float]:
    """Return seconds of one call by sample; all ranks make equally many."""
    return (_gpu_samples if device == "cuda" else _cpu_samples)(call, seconds)


def _cpu_samples(call: Callable[[], object], seconds: float) -> list[float]:
    """Time single calls of another thread; [Note: after computing]."""
    import torch
    from torch import distributed

    a, much = torch.randn(64, 64), torch.zeros(_COLD_BYTES // 4)
    with ThreadPoolExecutor(1) as stream:
        stream.submit(call).result()

        def sample() -> float:
            end = perf_counter() + _BUSY_S
            while perf_counter() < end:
                torch.mm(a, a)
            much.add_(1.0)
            distributed.barrier()
            begin = perf_counter()
            stream.submit(call).result()
            return perf_counter() - begin

        once_s = torch.tensor([sample() + _BUSY_S])
        distributed.all_reduce(once_s, op=distributed.ReduceOp.MAX)
        return [sample() for _ in range(_count(seconds, float(once_s)))]


def _gpu_samples(call: Callable[[], object], seconds: float) -> list[float]:
    """Time calls one after another, as a stream runs them."""
    import torch
    from torch import distributed

    def sample(calls: int) -> float:
        distributed.barrier()
        torch.cuda.synchronize()
        begin = perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        return (perf_counter() - begin) / calls

    sample(2)
    once_s = torch.tensor([sample(2)], device="cuda")
    distributed.all_reduce(once_s, op=distributed.ReduceOp.MAX)
    calls = max(1, min(200, round(_SAMPLE_S / float(once_s))))
    return [sample(calls) for _ in range(_count(seconds, calls * float(once_s)))]


def _count(seconds: float, sample_s: float) -> int:
    return max(_SAMPLES, min(_MOST_SAMPLES, round(seconds / sample_s)))


def _all_reduce(elements: int, device: str) -> Callable[[], object]:
    import torch
    from torch import distributed

    buffer = torch.zeros(elements, device=device)
    return lambda: distributed.all_reduce(buffer)


def _all_gather(elements: int, device: str) -> Callable[[], object]:
    import torch
    from torch import distributed

    ranks = distributed.get_world_size()
    whole, part = torch.zeros(elements, device=device), torch.zeros(elements // ranks, device=device)
    if device == "cuda":
        return lambda: distributed.all_gather_into_tensor(whole, part)
    parts = list(whole.chunk(ranks))
    return lambda: distributed.all_gather(parts, part)


def _reduce_scatter(elements: int, device: str) -> Callable[[], object]:
    import torch
    from torch import distributed

    ranks = distributed.get_world_size()
    whole, part = torch.zeros(elements, device=device), torch.zeros(elements // ranks, device=device)
    if device == "cuda":
        return lambda: distributed.reduce_scatter_tensor(part, whole)
    parts = list(whole.chunk(ranks))
    return lambda: distributed.reduce_scatter(part, parts)


def _all_to_all(elements: int, device: str) -> Callable[[], object]:
    import torch
    from torch import distributed

    out, given = torch.zeros(elements, device=device), torch.zeros(elements, device=device)
    return lambda: distributed.all_to_all_single(out, given)


def _transfer(elements: int, device: str) -> Callable[[], object] | None:
    """Return a message from rank 0 to rank 1; None for other groups than pairs."""
    import torch
    from torch import distributed

    if distributed.get_world_size() != 2:  # noqa: PLR2004  a pair
        return None
    buffer = torch.zeros(elements, device=device)
    if distributed.get_rank() == 0:
        return lambda: distributed.send(buffer, dst=1)
    return lambda: distributed.recv(buffer, src=0)


_COLLECTIVES: dict[str, Callable[[int, str], Callable[[], object] | None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "transfer": _transfer,
}


if __name__ == "__main__":
    _rank, _ranks, _store, _task = sys.argv[1:]
    sys.stdout.write(
        json.dumps(_member(int(_rank), int(_ranks), store=_store, task=json.loads(_task))) + "\n"
    )
    sys.stdout.flush()
