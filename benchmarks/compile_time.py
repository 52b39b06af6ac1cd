"""Compile Llama-3.1-405B for 16,384 GPUs, change its order only, and compile growing numbers of tasks."""

from __future__ import annotations

import argparse
import json
import resource
import time
from itertools import count
from typing import Any

from piper.capture import capture
from piper.compiler.compile import CompiledGraph, rewritten
from piper.graph import build_graph
from piper.models import find_model
from piper.schedules import schedule_rows
from piper.strategy import Strategy, complete, resolve
from simulator.plan import Plan

LARGE = "tp=8,pp=16,vp=8,dp=128,zero=1,schedule=interleaved_1f1b"
GROWING = "pp=4,dp=16,zero=1,schedule=1f1b"
SEQ_LEN = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="to 10^5 tasks, 1 repeat")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    repeats = 1 if options.quick else 3
    sizes = (640, 6400) if options.quick else (640, 6400, 64000)
    found = {
        "benchmark": "compile_time",
        "large": large(repeats),
        "growing": [growing(microbatches, repeats) for microbatches in sizes],
        "demo": growing(32, 10),
    }
    if not options.json:
        for name, value in found.items():
            print(name, value)
    print(json.dumps(found))


def large(repeats: int) -> dict[str, Any]:
    """Return the shortest times to compile the job, and to make and emit another order; rows included."""
    microbatches, pp, vp = 128, 16, 8
    compiled, compile_s = _shortest(
        lambda: _compiled("llama3.1-405b", LARGE, global_batch=128 * microbatches), repeats
    )
    tasks = sum(len(device.tasks) for device in compiled.plan().device_plans)

    def reordered() -> Plan:
        rows = schedule_rows(
            "looped_bfs",
            num_pipeline_ranks=pp,
            num_microbatches=microbatches,
            virtual_stages_per_rank=vp,
            where=_fresh(),
        )
        return compiled.reordered(rows, schedule="looped_bfs", directives=compiled.directives)

    _, reorder_s = _shortest(reordered, repeats)
    return {
        "tasks": tasks,
        "compile_s": compile_s,
        "reorder_s": reorder_s,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def growing(microbatches: int, repeats: int) -> dict[str, Any]:
    """Return the shortest time to compile Llama-3-8B on 64 GPUs with some microbatches."""
    compiled, compile_s = _shortest(
        lambda: _compiled("llama3-8b", GROWING, global_batch=16 * microbatches), repeats
    )
    tasks = sum(len(device.tasks) for device in compiled.plan().device_plans)
    return {
        "microbatches": microbatches,
        "tasks": tasks,
        "compile_s": compile_s,
        "s_per_task": compile_s / tasks,
    }


def _compiled(model: str, text: str, *, global_batch: int) -> tuple[CompiledGraph, float]:
    """Return a job compiled to a plan, and the seconds of that, without capture and reading the strategy."""
    resolved = resolve(
        Strategy.parse(text, where=_fresh()),
        gpus=None,
        gpus_per_node=8,
        global_batch=global_batch,
        micro_batch=1,
    )
    captured = capture(find_model(model), micro_batch=1, seq_len=SEQ_LEN, dtype="bf16")
    start = time.perf_counter()
    stages, directives = complete(resolved, captured)
    graph = build_graph(
        [captured], stages, replica_batch=resolved.replica_batch, dtype="bf16", optimizer="adamw",
        clip_grad_norm=1.0,
    )  # fmt: skip
    compiled = rewritten(graph, directives, strategy=text)
    compiled.plan()
    return compiled, time.perf_counter() - start


_RUNS = count()


def _fresh() -> str:
    """Return a place that no strategy came from yet: rows are kept by place, and must be made anew."""
    return f"run {next(_RUNS)}"


def _shortest(run: Any, repeats: int) -> tuple[Any, float]:
    """Return the last result and the shortest time; `run` may return (result, seconds) itself."""
    times = []
    result: Any = None
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        if isinstance(result, tuple):
            result, seconds = result
        times.append(seconds)
    return result, min(times)


if __name__ == "__main__":
    main()
