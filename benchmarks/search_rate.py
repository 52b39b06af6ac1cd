"""How fast the search is: first answer, last answer, gap, points per second, memory.

Two jobs on this machine: a 70B model on 64 GPUs, and a 405B model on 16,384. Published for comparison: 45
points a second and core by Calculon, 5 to 7 by SimuMax (measured on two cores of another machine).
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import numpy as np

from piper.predict import Job
from piper.search import SearchRequest, search_strategies
from piper.search.choices import choices_of
from piper.search.evaluate import Evaluator

JOBS: dict[str, dict[str, Any]] = {
    "70B on 64 GPUs": {"model": "llama3-70b", "gpus": 64, "global_batch": 512, "seq_len": 8192},
    "405B on 16384 GPUs": {"model": "llama3.1-405b", "gpus": 16384, "global_batch": 2048, "seq_len": 8192},
}
TOP = 3
KIB = 1024
CELLS = 64
"""Cells whose points are estimated to measure the rate."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first job alone")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--jobs", type=int, default=2, help="processes that simulate")
    options = parser.parse_args()
    found: dict[str, Any] = {"estimates": estimates_per_s()}
    for name, job in list(JOBS.items())[: 1 if options.quick else None]:
        found[name] = searched(job, jobs=options.jobs)
        if not options.json:
            print(name, json.dumps(found[name], indent=1))
    print(json.dumps(found))


def searched(job: dict[str, Any], *, jobs: int) -> dict[str, Any]:
    """Search for a job; return what it found, and in which time."""
    began_s, used_s = time.perf_counter(), time.process_time()
    result = search_strategies(SearchRequest(**job, top=TOP, jobs=jobs)).to_json()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "best": result["best"] and result["best"]["strategy"]["shorthand"],
        "step_time_s": result["best"] and result["best"]["step_time_s"],
        "points": result["space_size"],
        "legal_points": result["space_size"] - result["pruned"]["illegal"] - result["pruned"]["duplicate"],
        "estimated": result["evaluated"],
        "simulated": result["simulated"],
        "ended_by": result["ended_by"],
        "gap": result["gap"],
        "first_answer_s": result["timings_s"]["first_answer"],
        "wall_s": time.perf_counter() - began_s,
        "cpu_s_of_this_process": time.process_time() - used_s,
        "memory_gib": usage.ru_maxrss * KIB / 2**30,
    }


def estimates_per_s() -> dict[str, float]:
    """Return how many points of a 70B model are estimated in a second of one core, costs of stages known."""
    job = Job(**JOBS["70B on 64 GPUs"])
    evaluator = Evaluator(job=job)
    limits = evaluator.limits
    space = evaluator.space(
        choices_of(
            gpus=(job.gpus or 1,),
            num_units=limits.num_units,
            cuts_tensors=True,
            cuts_sequences=True,
            values={"tp": (4, 8), "cp": (1,), "micro_batch": (1,), "async_tp": ("off",), "sp": ("on",)},
        )
    )
    table = evaluator.cells(space)
    estimator = evaluator.estimator(table)
    cells = np.random.default_rng(1).choice(len(table), size=CELLS, replace=False)
    table.refine(np.sort(cells))
    for cell in cells.tolist():  # orders of schedules are made once
        estimator.of(cell)
    began_s = time.process_time()
    points = sum(len(estimator.of(cell).step_ns) for cell in cells.tolist())
    seconds = time.process_time() - began_s
    return {"points": points, "seconds": seconds, "points_per_s_and_core": points / seconds}


if __name__ == "__main__":
    main()
