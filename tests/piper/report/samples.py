"""Small made-up results: a GPipe timeline with known times, and figures that add up."""

from __future__ import annotations

from typing import Any

import numpy as np

from piper.report.result import Result
from simulator.plan.task import TaskKind
from simulator.timeline.timeline import RankTrack, Timeline

GIB = 2**30
FORWARD_NS = 1_000_000
BACKWARD_NS = 2_000_000


def gpipe_timeline(*, pipeline_ranks: int = 2, microbatches: int = 3, steps: int = 2) -> Timeline:
    """Forwards as early as possible, then backwards, then an all-reduce of 1 ms and an update of 1 ms."""
    tracks = [_track(rank, pipeline_ranks, microbatches, steps) for rank in range(pipeline_ranks)]
    ends = np.max([track.end_ns.reshape(steps, -1)[:, -1] for track in tracks], axis=0)
    return Timeline(source="simulated", tracks=tuple(tracks), step_end_ns=ends)


def _track(rank: int, pipeline_ranks: int, microbatches: int, steps: int) -> RankTrack:
    turn = (pipeline_ranks + microbatches - 1) * (FORWARD_NS + BACKWARD_NS) + 2_000_000
    spans = [(f"{rank}F{m}", TaskKind.F, 0, (rank + m) * FORWARD_NS, FORWARD_NS) for m in range(microbatches)]
    begin = (pipeline_ranks + microbatches - 1) * FORWARD_NS
    spans += [
        (f"{rank}B{m}", TaskKind.B, 0, begin + (pipeline_ranks - 1 - rank + m) * BACKWARD_NS, BACKWARD_NS)
        for m in range(microbatches)
    ]
    spans += [
        (f"{rank}ALL_REDUCE@dense0", TaskKind.ALL_REDUCE, 1, turn - 2_000_000, 1_000_000),
        (f"{rank}UPDATE@dense0", TaskKind.UPDATE, 0, turn - 1_000_000, 1_000_000),
    ]
    count = len(spans)
    starts = np.array([step * turn + span[3] for step in range(steps) for span in spans], dtype=np.int64)
    lengths = np.array([span[4] for span in spans] * steps, dtype=np.int64)
    memory = np.zeros((3, 7), dtype=np.int64)
    memory[:, 0] = 2 * GIB
    memory[1, 3] = GIB
    return RankTrack(
        rank=rank,
        n_devices=2,
        pipeline_rank=rank,
        stages=(rank,),
        streams=("compute", "dp"),
        task=np.tile(np.arange(count, dtype=np.int64), steps),
        step=np.repeat(np.arange(steps, dtype=np.int64), count),
        stream=np.array([span[2] for span in spans] * steps, dtype=np.int64),
        dispatch_ns=starts,
        ready_ns=starts,
        start_ns=starts,
        end_ns=starts + lengths,
        memory_ns=np.array([0, starts[0], int(starts[-1] + lengths[-1])], dtype=np.int64),
        memory_bytes=memory,
        codes=tuple(span[0] for span in spans),
        kinds=np.array([span[1] for span in spans], dtype=np.int64),
    )


def figures(*, step_time_s: float = 0.014, fits: bool = True, **changes: Any) -> dict[str, Any]:
    """The object of `piper simulate --json` for that timeline."""
    classes = dict.fromkeys(
        ["parameters", "gradients", "optimizer", "activations", "buckets", "communication", "workspace"], 0
    ) | {"parameters": 2 * GIB, "activations": GIB}
    return {
        "schema_version": 1,
        "model": "tiny-llama",
        "n_parameters": 8_030_261_248,
        "cluster": "dgx-h100",
        "n_gpus": 4,
        "strategy": {"shorthand": "pp=2,dp=2,schedule=gpipe", "directives": []},
        "schedule": "gpipe",
        "stack": "piper",
        "defaults": {"optimizer": "adamw", "clip_grad_norm": 1.0},
        "step_time_s": step_time_s,
        "makespan_s": 2 * step_time_s,
        "tokens_per_s": 505_000.0 * 0.014 / step_time_s,
        "tokens_per_s_per_gpu": 7_890.0,
        "model_flops_per_step": 10**15,
        "tflops_per_gpu": 377.0,
        "mfu": 0.381,
        "hfu": 0.5,
        "mfu_convention": "palm",
        "peak_memory_bytes": 3 * GIB,
        "peak_reserved_bytes": 3 * GIB + GIB // 2,
        "context_bytes": GIB // 2,
        "communicator_bytes": GIB // 4,
        "needed_memory_bytes": 4 * GIB + GIB // 4,
        "device_memory_bytes": 80 * GIB if fits else 3 * GIB,
        "fits": fits,
        "bubble_fraction": 0.25,
        "idle_fraction": 0.3,
        "breakdown_s": {
            "compute": 0.5 * step_time_s,
            "recompute": 0.0,
            "exposed_tp": 0.0,
            "exposed_dp": 0.05 * step_time_s,
            "exposed_pp": 0.1 * step_time_s,
            "exposed_ep": 0.0,
            "exposed_cp": 0.0,
            "exposed_offload": 0.0,
            "bubble": 0.25 * step_time_s,
            "host": 0.0,
            "optimizer": 0.1 * step_time_s,
            "straggler": 0.0,
        },
        "ranks": [
            {
                "pipeline_rank": rank,
                "n_devices": 2,
                "stages": [rank],
                "busy_s": 0.6 * step_time_s,
                "peak_memory_bytes": 3 * GIB,
                "peak_at_s": 0.001,
                "memory_by_class_bytes": classes,
            }
            for rank in range(2)
        ],
        "error_band": {
            "step_time_low_s": 0.9 * step_time_s,
            "step_time_high_s": 1.2 * step_time_s,
            "basis": "datasheet",
        },
        "provenance": {"measured": 0.0, "interpolated": 0.0, "fitted": 0.25, "datasheet": 0.75},
        "warnings": [],
        "timings_s": {"capture": 0.0, "compile": 0.1, "price": 0.0, "simulate": 0.2},
    } | changes


def sample_result(name: str = "pp=2,dp=2,schedule=gpipe", **changes: Any) -> Result:
    """A result whose step is 14 ms long."""
    return Result(name=name, summary=figures(**changes), timeline=gpipe_timeline())
