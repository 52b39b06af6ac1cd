"""What it costs to record the times of all tasks, in two ways.

Paired: processor seconds of a step of all ranks, with recording and without, in alternating order; processor
time, since other programs of the machine change it less than the time on the wall. Direct: what recording one
task takes, in a loop, times the tasks of a step; pairs find it only where it is larger than their noise.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import torch

from piper.predict import CompiledJob, Job, compile_job
from piper.runtime import run_local
from piper.runtime.ledger import Ledger
from piper.runtime.program import Program, program_of_plan
from piper.runtime.recorder import Recorder
from piper.strategy import load_strategy
from simulator.plan import MemoryClass

MODEL = "tiny-llama"
STRATEGIES = ("dp=1", "pp=2", "dp=2,zero=3", "pp=2,vp=2,schedule=interleaved_1f1b")
QUICK = ("pp=2",)
FIRST = 3
"""Steps in which bytes are counted."""
TASKS, REPEATS = 2000, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one strategy, few pairs")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    pairs, steps = (2, 6) if options.quick else (12, 20)
    rows = [compared(text, pairs=pairs, steps=steps) for text in (QUICK if options.quick else STRATEGIES)]
    if not options.json:
        for row in rows:
            shares = f"paired {row['paired']:+.1%}, direct {row['direct']:.3%}"
            print(f"{row['strategy']:40} {shares} of {row['step_s']:.3f} s, {row['tasks']} tasks")
    print(json.dumps({"benchmark": "recording_overhead", "model": MODEL, "cases": rows}))


def compared(text: str, *, pairs: int, steps: int) -> dict[str, object]:
    """Return both overheads of a strategy, as shares of a step without recording."""
    job = compile_job(
        Job(
            model=MODEL, strategy=load_strategy(text), global_batch=8, seq_len=64, cluster="cpu", dtype="fp32"
        )
    )  # fmt: skip
    program = program_of_plan(job.source, job.plan)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs):
        for record in (True, False) if number % 2 == 0 else (False, True):
            times[record].append(step_s(job, program, steps=steps, record=record))
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    tasks = sum(
        len(device.tasks) * len(job.plan.mesh.ranks(pp=device.pipeline_rank))
        for device in job.plan.device_plans
    )
    without = statistics.median(times[False])
    return {
        "strategy": text,
        "paired": statistics.median(ratios) - 1,
        "direct": tasks * recording_s() / without,
        "ratios": ratios,
        "tasks": tasks,
        "step_s": without,
    }


def step_s(job: CompiledJob, program: Program, *, steps: int, record: bool) -> float:
    """Return processor seconds of one step, of all ranks: a long run less one of steps that count bytes."""
    spent = []
    for count in (FIRST, FIRST + steps):
        before = used_s()
        run_local(
            job.plan, job.source, num_ranks=job.plan.num_ranks, steps=count, program=program, record=record
        )
        spent.append(used_s() - before)
    return (spent[1] - spent[0]) / steps


def used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def recording_s() -> float:
    """Return the seconds that recording one task takes: its times, and what is held."""
    found = []
    for _ in range(REPEATS):
        recorder, ledger = Recorder(num_tasks=TASKS), Ledger()
        tensors = [torch.empty(1) for _ in range(TASKS)]
        recorder.begin_step(0)
        for tensor in tensors:
            ledger.hold(tensor, MemoryClass.ACTIVATIONS)  # so that every look finds a change
        keys = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        spent = 0.0
        for position in range(TASKS):
            ledger.release(keys[position])
            begin = time.perf_counter()
            ledger.mark()
            recorder.record(0, position, (0, 1, 1, time.perf_counter_ns()))
            spent += time.perf_counter() - begin
        found.append(spent / TASKS)
    return min(found)


if __name__ == "__main__":
    main()
