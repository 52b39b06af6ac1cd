"""Compile, price and simulate one step of Llama-3-8B on 64 H100, over growing numbers of microbatches."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from piper.predict import Job, compile_job, load_hardware
from piper.strategy import Strategy
from simulator import build_workload, simulate

REPLICAS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 and 32 microbatches, 1 repeat")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    sizes, repeats = ((8, 32), 1) if options.quick else ((8, 32, 128, 512), 3)
    rows = [measure(microbatches, repeats) for microbatches in sizes]
    if not options.json:
        for row in rows:
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    print(json.dumps({"benchmark": "simulate", "repeats": repeats, "rows": rows}))


def measure(microbatches: int, repeats: int) -> dict[str, Any]:
    """Return seconds per phase and simulated tasks per second for one size; capture is not counted."""
    job = Job(
        model="llama3-8b",
        strategy=Strategy.parse("pp=4,dp=16,zero=1,schedule=1f1b,recompute=full"),
        global_batch=microbatches * REPLICAS,
    )
    compiled = compile_job(job)
    plan = compiled.plan
    _, cost_model = load_hardware(job.cluster, job.stack)
    compile_s = min(compile_job(job).timings_s["compile"] for _ in range(repeats))
    price_s, workload = best(lambda: build_workload(plan, cost_model), repeats)
    simulate_s, timeline = best(lambda: simulate(plan, cost_model, workload=workload), repeats)
    tasks = sum(len(track.task) for track in timeline.tracks)
    return {
        "microbatches": microbatches,
        "tasks": tasks,
        "compile_s": compile_s,
        "price_s": price_s,
        "simulate_s": simulate_s,
        "tasks_per_s": tasks / simulate_s,
    }


def best(action: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Run an action several times; return its shortest time and its last result."""
    times = []
    result = None
    for _ in range(repeats):
        start = time.perf_counter()
        result = action()
        times.append(time.perf_counter() - start)
    return min(times), result


if __name__ == "__main__":
    main()
