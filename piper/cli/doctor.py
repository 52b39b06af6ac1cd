"""`piper doctor`: what this machine can do, and what is wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from piper.cli.options import json_option
from piper.cli.output import emit, progress

_TIMEOUT_S = 120
_OLDEST_PYTHON = (3, 11)
_ENOUGH_MEMORY_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at: what was found, and the problem with it if there is one."""

    name: str
    value: Any
    problem: str = ""
    fix: str = ""


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say what this machine can do (torch, CUDA, NCCL, gloo, memory), and what is wrong.

    Planning, simulating and searching need none of torch's devices; `piper run` does. Exit code 0 also when
    something is wrong: the problems are in the output.

    \b
    Examples:
      piper doctor
      piper doctor --json
    """
    with progress("looking at this machine"):
        findings = [_python(), _packages(), *_torch(), _gloo(), _cores(), _memory(), _cache()]
    problems = [finding for finding in findings if finding.problem]
    found = {
        "schema_version": 1,
        "findings": [asdict(finding) for finding in findings],
        "n_problems": len(problems),
    }
    emit(found, as_json=as_json, text=lambda: _text(findings))


def _text(findings: list[Finding]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        mark = "problem" if finding.problem else "ok"
        lines.append(f"{mark:<8} {finding.name:<{width}}  {_shown(finding.value)}")
        if finding.problem:
            lines += [f"{'':<9}{finding.problem}", f"{'':<9}fix: {finding.fix}"]
    count = sum(bool(finding.problem) for finding in findings)
    return "\n".join([*lines, "", "no problem found" if not count else f"{count} problem(s) found"])


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_shown(entry) for entry in value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{key}={entry}" for key, entry in value.items())
    return "none" if value is None else str(value)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _OLDEST_PYTHON:
        return Finding(
            name="python", value=version, problem="older than 3.11", fix="install Python 3.11 or newer"
        )
    return Finding(name="python", value=version)


def _packages() -> Finding:
    from piper.installation import foreign_packages

    foreign = foreign_packages()
    if foreign:
        return Finding(
            name="packages",
            value=foreign,
            problem="these packages hide the ones that belong to piper",
            fix="rename or move them, or start Python elsewhere",
        )
    import piper

    return Finding(name="packages", value=str(Path(piper.__file__).parent.parent))


def _torch() -> list[Finding]:
    found, problem = _probe("torch")
    if problem:
        return [
            Finding(name="torch", value=None, problem=problem, fix="`make install`, or: pip install torch")
        ]
    devices = found["devices"]
    return [
        Finding(name="torch", value=found["torch"]),
        _cuda(found),
        Finding(name="devices", value=devices or "CPU only (`piper run` uses CPU processes over gloo)"),
        Finding(name="nccl", value=found["nccl"]),
    ]


def _cuda(found: dict[str, Any]) -> Finding:
    built = found["cuda_build"]
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if has_driver and not built:
        return Finding(
            name="cuda",
            value=None,
            problem="this machine has an NVIDIA driver, but torch was built without CUDA",
            fix="install a CUDA build of torch",
        )
    if has_driver and not found["devices"]:
        return Finding(
            name="cuda",
            value=built,
            problem="this machine has an NVIDIA driver, but torch sees no device",
            fix="check CUDA_VISIBLE_DEVICES, and that the driver is new enough for this torch",
        )
    return Finding(name="cuda", value=built or "torch was built without CUDA")


def _gloo() -> Finding:
    found, problem = _probe("gloo")
    if problem or found.get("sum_over_two_processes") != [2.0, 2.0]:
        return Finding(
            name="gloo",
            value=found or None,
            problem=problem or "two processes did not get the right sum",
            fix="`piper run --local` needs gloo: does the loopback network work (GLOO_SOCKET_IFNAME=lo)?",
        )
    return Finding(name="gloo", value="two processes exchanged data")


def _probe(what: str) -> tuple[dict[str, Any], str]:
    """Run the probe in a process of its own; return what it found, and the problem if it failed."""
    command = [sys.executable, "-m", "piper.profiling.probe", what]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {_TIMEOUT_S} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {}, lines[-1] if lines else f"ended with code {done.returncode}"
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer, ""


def _cores() -> Finding:
    return Finding(
        name="cores",
        value=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    )


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    value = f"{total / 2**30:.1f} GiB"
    if total < _ENOUGH_MEMORY_BYTES:
        return Finding(
            name="memory", value=value, problem="little memory", fix="`piper run` needs about 2 GiB"
        )
    return Finding(name="memory", value=value)


def _cache() -> Finding:
    from piper.capture.cache import cache_folder

    folder = cache_folder(None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"write-test-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as problem:
        return Finding(
            name="cache",
            value=str(folder),
            problem=f"cannot be written: {problem.strerror}",
            fix="set PIPER_CACHE_DIR to a folder that you may write; without it every command captures again",
        )
    return Finding(name="cache", value=str(folder))
