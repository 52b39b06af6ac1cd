"""Price a plan of 64 GPUs with a new cost model and with one that has answered before; build its workload."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import piper
from cost_models import cluster_cost_model
from simulator import build_workload
from simulator.pricing import price_tasks

CLUSTER = "dgx-h100"
STRATEGY = "tp=4,pp=4"
MODEL, GPUS = "llama3-70b", 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="32 sequences per step instead of 256, 3 repeats"
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    batch, repeats = (32, 3) if options.quick else (256, 10)
    found = {"benchmark": "pricing_speed", **measured(batch, repeats)}
    if not options.json:
        for name, value in found.items():
            print(f"{name:24}{value}")
    print(json.dumps(found))


def measured(global_batch: int, repeats: int) -> dict[str, Any]:
    """Return sizes and the shortest times of `repeats`, in ms."""
    plan = piper.compile_plan(MODEL, STRATEGY, gpus=GPUS, global_batch=global_batch, cluster=CLUSTER)
    warm = cluster_cost_model(CLUSTER)
    build_workload(plan, warm)
    return {
        "model": MODEL,
        "strategy": STRATEGY,
        "gpus": GPUS,
        "tasks": sum(len(device.tasks) for device in plan.device_plans),
        "works": len(plan.works),
        "new_model_ms": _shortest_ms(lambda: price_tasks(plan, cluster_cost_model(CLUSTER)), repeats),
        "warm_ms": _shortest_ms(lambda: price_tasks(plan, warm), repeats),
        "workload_ms": _shortest_ms(lambda: build_workload(plan, warm), repeats),
    }


def _shortest_ms(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        before_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - before_s)
    return round(min(times) * 1e3, 2)


if __name__ == "__main__":
    main()
