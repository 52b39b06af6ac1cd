"""Everything that is measured of a machine, within a time limit -> rows of a table."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from cost_models.calibration.table import CONTENTION, LAUNCH, MESSAGE, PASS, Measurement
from piper.errors import JobError
from piper.profiling.cases import SIZES, Case, Sizes, cases, quick
from piper.profiling.clock import Timing, measure
from piper.profiling.group import collectives, contention, in_torchrun, time_collectives
from piper.profiling.kernels import call_of
from piper.profiling.passes import MODELS, QUICK_MODELS, messages, passes

Report = Callable[[str], object]

PROCESSES = (2, 4)
"""Groups whose collectives are measured on this machine."""

TOGETHER = (1, 2, 3, 4)
"""Processes that compute at once."""

_REPEATS, _QUICK_REPEATS = 15, 7
_QUICK_LIMIT = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    """How to measure.

    Args:
        device: "cpu" or "cuda".
        quick: fewer shapes and repeats.
        limit_s: no kernel is begun after so many seconds; what runs in several processes has a third of it.
        report: called with what is being done.
        sizes: what is measured, or None: that of the device.
    """

    device: str
    quick: bool = False
    limit_s: float = 120.0
    report: Report = lambda _: None
    sizes: Sizes | None = None

    @property
    def chosen(self) -> Sizes:
        """Return what is measured."""
        sizes = self.sizes or SIZES[self.device]
        return quick(sizes) if self.quick else sizes


def profile(asked: Profiling) -> Iterator[Measurement]:
    """Measure the machine row by row; raises JobError without the device, RunFailedError where it fails.

    Under torchrun every rank takes part in the collectives, and rank 0 yields all rows.
    """
    _require_device(asked.device)
    if asked.device == "cuda":
        yield from _launch(asked)
        yield from _kernels(asked)
        if in_torchrun():
            yield from _in_torchrun(asked)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _kernels(asked)
    finally:
        torch.set_num_threads(threads)
    yield from _contention(asked)
    yield from _collectives(asked)
    yield from _passes(asked)


def device_name(device: str) -> str:
    """Return the name that the driver gives the device."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return _cpu_name()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine() or "CPU"


def _versions(device: str) -> str:
    if device == "cuda":
        version: Any = torch.cuda.nccl.version
        return f"torch {torch.__version__} nccl {'.'.join(map(str, version()))}"
    return f"torch {torch.__version__} gloo"


def _require_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise JobError(
            where="--device",
            field="device",
            value=device,
            rule="is not there: torch finds no GPU",
            fix="measure the CPU with --device cpu; `piper doctor` says what torch finds",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Makes rows of one device."""

    device: str
    versions: str

    @classmethod
    def of(cls, device: str) -> _Rows:
        return cls(device=device_name(device), versions=_versions(device))

    def row(self, case: Case, timing: Timing, *, ranks: int = 1) -> Measurement:
        return Measurement(
            device=self.device, op=case.op, kernel=case.kernel, dtype=case.dtype, shape=case.shape,
            direction=case.direction, ranks=ranks, time_s=timing.time_s, repeats=timing.repeats,
            spread=timing.spread, versions=self.versions,
        )  # fmt: skip


def _kernels(asked: Profiling) -> Iterator[Measurement]:
    rows, end = _Rows.of(asked.device), monotonic() + asked.limit_s
    todo = list(cases(asked.chosen))
    repeats = _QUICK_REPEATS if asked.quick else _REPEATS
    for number, case in enumerate(todo):
        if monotonic() > end:
            asked.report(f"time limit: {len(todo) - number} of {len(todo)} kernels left out")
            return
        if number % 10 == 0:
            asked.report(f"kernels {number + 1} to {min(number + 10, len(todo))} of {len(todo)}")
        yield rows.row(
            case, measure(call_of(case, device=asked.device), device=asked.device, repeats=repeats)
        )


def _launch(asked: Profiling) -> Iterator[Measurement]:
    """Time the launch of a tiny kernel on the host's clock: what a stream of such kernels takes each."""
    asked.report("launches")
    x = torch.zeros(1, device=asked.device)

    def launch() -> None:
        x.add_(1.0)

    case = Case(op=LAUNCH, kernel="add", dtype="fp32", shape=(1,))
    yield _Rows.of(asked.device).row(case, measure(launch, device=asked.device, repeats=_REPEATS))


def _contention(asked: Profiling) -> Iterator[Measurement]:
    rows, seconds = _Rows.of(asked.device), 0.9 if asked.quick else 2.0
    for ranks in TOGETHER:
        asked.report(f"{ranks} processes compute at once")
        case = Case(op=CONTENTION, kernel="mixture", dtype="fp32", shape=(1,))
        yield rows.row(case, contention(ranks, seconds=seconds), ranks=ranks)


def _collectives(asked: Profiling) -> Iterator[Measurement]:
    rows = _Rows.of(asked.device)
    seconds = asked.limit_s * (_QUICK_LIMIT if asked.quick else 1.0) / 3 / len(PROCESSES)
    for ranks in PROCESSES:
        asked.report(f"collectives of {ranks} processes")
        for found in collectives(ranks, asked.chosen.messages, seconds=min(seconds, 15.0)):
            yield _collective_row(rows, found, ranks=ranks, kernel="gloo")


def _in_torchrun(asked: Profiling) -> Iterator[Measurement]:
    from torch import distributed

    if not distributed.is_initialized():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("nccl")
    ranks, rows = distributed.get_world_size(), _Rows.of(asked.device)
    asked.report(f"collectives of {ranks} processes")
    for found in time_collectives(asked.chosen.messages, device="cuda", seconds=asked.limit_s / 3):
        yield _collective_row(rows, found, ranks=ranks, kernel="nccl")


def _collective_row(rows: _Rows, found: dict[str, float], *, ranks: int, kernel: str) -> Measurement:
    case = Case(op=str(found["op"]), kernel=kernel, dtype="fp32", shape=(int(found["bytes"]),))
    timing = Timing(time_s=found["time_s"], repeats=int(found["repeats"]), spread=found["spread"])
    return rows.row(case, timing, ranks=ranks)


def _passes(asked: Profiling) -> Iterator[Measurement]:
    rows = _Rows.of(asked.device)
    asked.report("passes of small models")
    for found in passes(models=QUICK_MODELS if asked.quick else MODELS):
        shape = (found.kernels, found.flops, found.bytes)
        case = Case(op=PASS, kernel="piper", dtype="fp32", shape=shape, direction=found.direction)
        yield rows.row(case, found.timing)
    asked.report("messages of a small model")
    size, timing = messages()
    yield rows.row(Case(op=MESSAGE, kernel="piper", dtype="fp32", shape=(size,)), timing, ranks=2)
