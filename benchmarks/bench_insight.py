"""Slack and critical path of Llama-3-8B on 8 pipeline ranks, over growing numbers of microbatches."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from piper.predict import Job, compile_job
from piper.strategy import Strategy
from simulator import build_workload, simulate
from simulator.insight import critical_path, slack_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="16 and 64 microbatches, 1 repeat")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    sizes, repeats = ((16, 64), 1) if options.quick else ((16, 64, 256, 640, 1280), 3)
    rows = [measure(microbatches, repeats) for microbatches in sizes]
    if not options.json:
        for row in rows:
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    growth = rows[-1]["slack_s_per_task"] / rows[0]["slack_s_per_task"]
    result = {"benchmark": "insight", "repeats": repeats, "growth_per_task": growth, "rows": rows}
    print(json.dumps(result))


def measure(microbatches: int, repeats: int) -> dict[str, Any]:
    """Return seconds for one size: one isolated step."""
    strategy = Strategy.parse("pp=8,tp=2,schedule=1f1b")
    compiled = compile_job(Job(model="llama3-8b", strategy=strategy, global_batch=microbatches))
    workload = build_workload(compiled.plan, compiled.cost_model)
    timeline = simulate(compiled.plan, compiled.cost_model, steps=1, workload=workload)
    slack_s = best(lambda: slack_ns(workload, timeline), repeats)
    path_s = best(lambda: critical_path(workload, timeline), repeats)
    return {
        "microbatches": microbatches,
        "tasks": workload.num_tasks,
        "slack_s": slack_s,
        "path_s": path_s,
        "slack_s_per_task": slack_s / workload.num_tasks,
    }


def best(action: Callable[[], Any], repeats: int) -> float:
    """Run an action several times; return its shortest time."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
