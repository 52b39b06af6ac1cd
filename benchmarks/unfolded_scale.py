"""Simulate Llama-3.1-405B on 16,384 GPUs with a straggler and noise: the command, and the kernel alone."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

from piper.predict import Job, compile_job
from piper.strategy import Strategy
from simulator import build_workload
from simulator.jitter import parse_jitter, resolve
from simulator.jitter.run import run_unfolded, template_of
from simulator.jitter.units import folded

MODEL, BATCH_PER_REPLICA = "llama3.1-405b", 16
JITTER = "straggler:rank=17,factor=1.3;noise:sigma=0.05"
BYTES_PER_WORD, WORDS_PER_TASK = 8, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="256 GPUs instead of 16,384")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    replicas = 2 if options.quick else 128
    found = {
        "benchmark": "unfolded_scale",
        "gpus": replicas * 128,
        "command": command(replicas),
        "kernel": [kernel(replicas, jitter) for jitter in (JITTER, f"{JITTER},per=rank")],
    }
    if not options.json:
        for name, value in found.items():
            print(name, value)
    print(json.dumps(found))


def strategy_of(replicas: int) -> str:
    return f"tp=8,pp=16,dp={replicas},zero=1"


def command(replicas: int) -> dict[str, Any]:
    """Return seconds and peak memory of the whole command, in a process of its own."""
    arguments = [
        "simulate", MODEL, "--gpus", str(replicas * 128), "--strategy", strategy_of(replicas),
        "--global-batch", str(replicas * BATCH_PER_REPLICA), "--jitter", JITTER, "--json",
    ]  # fmt: skip
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "piper", *arguments], capture_output=True, text=True, check=True
    )
    seconds = time.perf_counter() - start_s
    section = json.loads(done.stdout)["jitter"]
    return {
        "seconds": seconds,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
        "runs": section["runs"],
        "steps": section["steps"],
        "slowdown": section["slowdown"],
        "worst_rank": section["blame"][0]["ranks"],
    }


def kernel(replicas: int, jitter: str) -> dict[str, Any]:
    """Return seconds of one run of two steps (compiled before), and the memory per task of its state."""
    job = Job(
        model=MODEL, strategy=Strategy.parse(strategy_of(replicas)), gpus=replicas * 128,
        global_batch=replicas * BATCH_PER_REPLICA,
    )  # fmt: skip
    compiled = compile_job(job)
    workload = build_workload(compiled.plan, compiled.cost_model)
    clauses = parse_jitter(jitter)
    start_s = time.perf_counter()
    disturbance = resolve(clauses, compiled.plan, gpus_per_node=compiled.cluster.gpus_per_node)
    units = folded(compiled.plan, disturbance)
    fold_s = time.perf_counter() - start_s
    template = template_of(compiled.plan, workload)
    run_unfolded(template, units, disturbance, seed=0, max_steps=1)
    start_s = time.perf_counter()
    run_unfolded(template, units, disturbance, seed=0, max_steps=2)
    seconds = time.perf_counter() - start_s
    tasks = int(np.diff(workload.device_starts)[units.device].sum())
    return {
        "jitter": jitter,
        "units": units.num_units,
        "tasks_per_step": tasks,
        "fold_s": fold_s,
        "seconds": seconds,
        "tasks_per_s": 2 * tasks / seconds,
        "state_bytes_per_task": BYTES_PER_WORD * WORDS_PER_TASK,
        "peak_rss_bytes_per_task": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / tasks,
    }


if __name__ == "__main__":
    main()
