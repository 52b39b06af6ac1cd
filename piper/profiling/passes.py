"""What the runtime costs beside its kernels: tasks of models so small that their kernels take no time.

[Note: small passes]
Models of one family, a few layers of two widths, run in one process; a forward or backward takes a fixed
time, one for each of its kernels, and what their FLOPs and bytes take. `piper calibrate` reads off the first
two, less what the kernels take by themselves.

[Note: small messages]
A small model on two ranks: from when its sender has computed a message, and its receiver waits for it, to
when it is received. That is more than the link takes, since both processes have to notice.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from piper.predict import Job, compile_job
from piper.profiling.clock import Timing, timing, typical
from piper.runtime import run_local
from piper.strategy import Strategy
from simulator.plan import DevicePlan, Plan, TaskKind, Work
from simulator.timeline.timeline import Timeline

MODELS = ((1, 16), (10, 16), (4, 48), (12, 48))
"""(layers, width) of the models; a sequence has as many tokens as a token has elements."""

QUICK_MODELS = ((1, 16), (8, 48))
_STEPS = 10
_MESSAGES = (6, 16)
_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "attention_bias": False, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
_DIRECTIONS = {TaskKind.F: "fwd", TaskKind.B: "bwd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One kind of task of one model.

    Args:
        direction: fwd or bwd.
        kernels, flops, bytes: of one task.
        timing: of one task.
    """

    direction: str
    kernels: int
    flops: int
    bytes: int
    timing: Timing


def passes(*, models: tuple[tuple[int, int], ...] = MODELS, steps: int = _STEPS) -> Iterator[Pass]:
    """Run small models and yield what their passes take; raises RunFailedError."""
    for layers, width in models:
        plan, timeline = _run(layers, width, steps=steps, strategy="")
        for kind, direction in _DIRECTIONS.items():
            work = _work(plan, kind)
            yield Pass(
                direction=direction,
                kernels=work.num_kernels,
                flops=work.flops,
                bytes=sum(operation.bytes * operation.count for operation in work.operations),
                timing=timing(_durations_s(timeline, kind)),
            )


def messages(*, steps: int = _STEPS) -> tuple[int, Timing]:
    """Return the bytes of a small message and the time from ready to received; [Note: small messages]."""
    plan, timeline = _run(*_MESSAGES, steps=steps, strategy="pp=2")
    first, second = plan.device_plans
    receive = int(np.flatnonzero(second.tasks.kind == TaskKind.RECV_F)[0])
    waits = []
    for code, kind in ((first, TaskKind.SEND_F), (second, TaskKind.SEND_B)):
        waits += _waits_s(timeline, sender=code, kind=kind)
    return int(second.tasks.size_bytes[receive]), typical(waits)


def _run(layers: int, width: int, *, steps: int, strategy: str) -> tuple[Plan, Timeline]:
    shape = _SHAPE | {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 2 * width,
        "vocab_size": 4 * width, "max_position_embeddings": width,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(shape), encoding="utf-8")
        job = Job(
            model=str(config), strategy=Strategy.parse(strategy), cluster="local-cpu",
            gpus=2 if strategy else 1, seq_len=width, global_batch=8, micro_batch=1, dtype="fp32",
        )  # fmt: skip
        compiled = compile_job(job)
        outcome = run_local(compiled.plan, compiled.source, num_ranks=compiled.plan.num_ranks, steps=steps)
    return compiled.plan, outcome.timeline


def _work(plan: Plan, kind: TaskKind) -> Work:
    (device,) = plan.device_plans
    first = int(np.flatnonzero(device.tasks.kind == kind)[0])
    return plan.works[int(device.tasks.work[first])]


def _durations_s(timeline: Timeline, kind: TaskKind) -> list[float]:
    """Return the times of all tasks of a kind, the first step left out."""
    (track,) = timeline.tracks
    chosen = (track.kinds[track.task] == kind) & (track.step > 0)
    return [float(ns) / 1e9 for ns in (track.end_ns - track.start_ns)[chosen]]


def _waits_s(timeline: Timeline, *, sender: DevicePlan, kind: TaskKind) -> list[float]:
    """Return the times of all messages of a kind from one of two ranks, the first step left out."""
    found = []
    sending, receiving = timeline.tracks[:: 1 if sender.pipeline_rank == 0 else -1]
    received = {TaskKind.SEND_F: TaskKind.RECV_F, TaskKind.SEND_B: TaskKind.RECV_B}[kind]
    number = len(sending.codes)
    receives = np.flatnonzero(receiving.kinds == received)
    for order, send in enumerate(np.flatnonzero(sending.kinds == kind).tolist()):
        made = max(sender.tasks.task(send).waits)
        for step in range(1, timeline.num_steps):
            arrival = step * len(receiving.codes) + int(receives[order])
            begin = max(sending.end_ns[step * number + made], receiving.ready_ns[arrival])
            found.append(float(receiving.end_ns[arrival] - begin) / 1e9)
    return found
