"""Check plans of Llama-3-8B on 64 H100 over growing numbers of microbatches: time, tasks per second."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from piper.predict import Job, compile_job
from piper.strategy import Strategy
from simulator.plan.check import check_plan

REPLICAS = 16
STRATEGY = "pp=4,dp=16,zero=1,schedule=1f1b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="to 512 microbatches, 1 repeat")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    sizes, repeats = ((32, 512), 1) if options.quick else ((32, 512, 8192, 65536), 3)
    rows = [measure(microbatches, repeats) for microbatches in sizes]
    if not options.json:
        for row in rows:
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    print(json.dumps({"benchmark": "check", "repeats": repeats, "rows": rows}))


def measure(microbatches: int, repeats: int) -> dict[str, Any]:
    """Return the shortest time of a check of one size, which must find nothing."""
    job = Job(model="llama3-8b", strategy=Strategy.parse(STRATEGY), global_batch=microbatches * REPLICAS)
    plan = compile_job(job).plan
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = check_plan(plan)
        times.append(time.perf_counter() - start)
        if found:
            raise SystemExit(f"a legal plan is flagged: {found[0]}")
    tasks = sum(len(device.tasks) for device in plan.device_plans)
    return {
        "microbatches": microbatches,
        "tasks": tasks,
        "check_s": min(times),
        "tasks_per_s": tasks / min(times),
    }


if __name__ == "__main__":
    main()
