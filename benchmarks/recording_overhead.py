"""What it costs to record the times of all tasks: the same run with and without, in alternating order.

Other programs of the machine only ever slow steps down, so the lower quartile of a run's steps stands for it.
"""

from __future__ import annotations

import argparse
import json
import statistics

from piper.predict import CompiledJob, Job, compile_job
from piper.runtime import run_local
from piper.runtime.program import Program, program_of_plan
from piper.strategy import load_strategy

MODEL = "tiny-llama"
STRATEGIES = ("dp=1", "pp=2", "dp=2,zero=3", "pp=2,vp=2,schedule=interleaved_1f1b")
QUICK = ("pp=2",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one strategy, few pairs")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    pairs, steps = (4, 10) if options.quick else (12, 20)
    rows = [compared(text, pairs=pairs, steps=steps) for text in (QUICK if options.quick else STRATEGIES)]
    if not options.json:
        for row in rows:
            print(
                f"{row['strategy']:40} {row['overhead']:+.2%} ({row['tasks']} tasks, {row['step_s']:.4f} s)"
            )
    print(json.dumps({"benchmark": "recording_overhead", "model": MODEL, "cases": rows}))


def compared(text: str, *, pairs: int, steps: int) -> dict[str, object]:
    """Return the median over pairs of time with recording over time without, less 1."""
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
    return {
        "strategy": text,
        "overhead": statistics.median(ratios) - 1,
        "ratios": ratios,
        "tasks": max(len(device.tasks) for device in job.plan.device_plans),
        "step_s": statistics.median(times[True]),
    }


def step_s(job: CompiledJob, program: Program, *, steps: int, record: bool) -> float:
    """Return the lower quartile of the steps after those in which bytes are counted."""
    outcome = run_local(
        job.plan, job.source, num_ranks=job.plan.num_ranks, steps=steps, program=program, record=record
    )
    return statistics.quantiles([step["step_time_s"] for step in outcome.result["steps"][3:]], n=4)[0]


if __name__ == "__main__":
    main()
