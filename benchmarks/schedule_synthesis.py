"""Synthesized schedules: how far above the bound, in how long, and against known ones at equal bytes."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from piper.predict import Job, predict
from piper.schedules import parse_costs
from piper.schedules.rows import stages_by_rank
from piper.schedules.synthesis import Pipeline
from piper.schedules.synthesis.equal import equal_pipeline
from piper.schedules.synthesis.find import synthesize
from piper.schedules.synthesis.library import known_schedules
from piper.schedules.synthesis.timing import Timer, order_of_rows
from piper.search.synthesis import OrderRequest, find_order
from piper.strategy import Shorthand, Strategy
from piper.workbench import Workbench

RANK_COSTS = "F=10,BI=10,BW=10,comm=1"
STAGE_COSTS = "F=5,BI=5,BW=5,comm=1"
RIVALS = ("zbv", "v_half", "dualpipe_v")
JOBS: tuple[dict[str, Any], ...] = (
    {"model": "llama3-8b", "gpus": 4, "seq_len": 4096, "global_batch": 12},
    {"model": "llama3-8b", "gpus": 8, "seq_len": 4096, "global_batch": 32},
)
"""All GPUs are pipeline ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="8 ranks and 32 microbatches instead of 16 and 128"
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    ranks, microbatches = (8, 32) if options.quick else (16, 128)
    began_s = time.perf_counter()
    synthesize(equal_pipeline("loop", (2, 2, 1), costs=parse_costs(), memory_cap=None))
    found = {
        "benchmark": "schedule_synthesis",
        "compile_s": round(time.perf_counter() - began_s, 2),
        "equal_stages": equal_stages(ranks, microbatches),
        "unequal_stages": [
            against_rivals(name, ranks, microbatches) for name in ("dear_inputs", "heavy_head", "attention")
        ],
        "jobs": [simulated(**case) for case in (JOBS[:1] if options.quick else JOBS)],
    }
    if not options.json:
        print(json.dumps(found, indent=1))
    print(json.dumps(found))


def equal_stages(ranks: int, microbatches: int) -> list[dict[str, Any]]:
    """Return gaps to the bounds at several caps, in microbatches of a rank's model part."""
    asked = [
        *(("loop", 1, RANK_COSTS, cap) for cap in (ranks, 2 * ranks, ranks // 2)),
        *(("v", 2, STAGE_COSTS, cap) for cap in (ranks, ranks // 2 + 1, ranks // 3 + 1)),
        ("loop", 2, STAGE_COSTS, ranks),
    ]
    rows = []
    for layout, per_rank, costs, cap in asked:
        exact = parse_costs(costs)
        pipeline = equal_pipeline(layout, (ranks, microbatches, per_rank), costs=exact, memory_cap=cap)
        # What the last rank cannot avoid: to wait for the first forward, and all its passes.
        loose_ns = (ranks - 1) * int(exact["F"] + exact["comm"]) + max(pipeline.work_ns)
        rows.append({"layout": layout, "stages_per_rank": per_rank, "cap": cap} | _answer(pipeline, loose_ns))
    return rows


def _answer(pipeline: Pipeline, loose_ns: int) -> dict[str, Any]:
    began_s = time.perf_counter()
    found = synthesize(pipeline)
    return {
        "makespan": found.makespan_ns,
        "bound": found.bound_ns,
        "gap": round(found.gap, 5),
        "gap_to_loose_bound": round(found.makespan_ns / loose_ns - 1, 5),
        "method": found.method,
        "orders_tried": found.tried,
        "seconds": round(time.perf_counter() - began_s, 2),
    }


def against_rivals(name: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """Return what each rival takes, and what is found under exactly its bytes."""
    free = unequal_v(name, ranks, microbatches, cap=2**40)
    timer = Timer(pipeline=free)
    rows = []
    for known in known_schedules(free):
        if known.name in RIVALS:
            (makespan, _), _, peaks = timer.replay(order_of_rows(free, known.rows))
            cap = int(peaks.max())
            found = synthesize(unequal_v(name, ranks, microbatches, cap=cap))
            rows.append(
                {
                    "rival": known.name,
                    "bytes": cap,
                    "rival_makespan": makespan,
                    "makespan": found.makespan_ns,
                    "bound": found.bound_ns,
                    "saved": round(1 - found.makespan_ns / makespan, 5),
                }
            )
    return {"costs": name, "rivals": rows}


def simulated(model: str, gpus: int, *, seq_len: int, global_batch: int) -> dict[str, Any]:
    """Return the simulated step times of rivals, and of what is found under the bytes that each needs."""
    job = Job(model=model, gpus=gpus, seq_len=seq_len, global_batch=global_batch)
    bench = Workbench()
    results = {}
    for name in RIVALS:
        stated = Shorthand(pp=gpus, dp=1, schedule=name)
        result = predict(Job(**_fields(job), strategy=Strategy(stated=stated)), bench=bench).result
        results[name] = (result["needed_memory_bytes"], result["step_time_s"])
    rows = []
    for name, (needed, step_s) in results.items():
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.perf_counter()
            request = OrderRequest(
                job=job,
                strategy=Shorthand(pp=gpus, dp=1),
                path=Path(folder) / "order.csv",
                memory_bytes=needed,
            )
            found = find_order(request, bench=bench)
            row: dict[str, Any] = {"rival": name, "needed_gib": needed / 2**30, "rival_s": step_s}
            row["best_rival_that_fits_s"] = min(s for bytes_, s in results.values() if bytes_ <= needed)
            if found is not None:
                row |= {"step_s": found.result["step_time_s"], "method": found.synthesis.method}
                row |= {"found_needs_gib": found.result["needed_memory_bytes"] / 2**30}
            rows.append(row | {"seconds": round(time.perf_counter() - began_s, 1)})
    return {"model": model, "pp": gpus, "seq_len": seq_len, "microbatches": global_batch, "rivals": rows}


def _fields(job: Job) -> dict[str, Any]:
    return {"model": job.model, "gpus": job.gpus, "seq_len": job.seq_len, "global_batch": job.global_batch}


def unequal_v(name: str, ranks: int, microbatches: int, *, cap: int) -> Pipeline:
    """Return a V with unequal costs.

    dear_inputs: F 100, BI 130, BW 80: attention's backward needs no weight gradient.
    heavy_head: as before; the last stage also has a head that costs 60 in each pass.
    attention: BI 200, BW 60: long sequences.
    """
    count = 2 * ranks
    head = [0] * (count - 1) + [60 if name == "heavy_head" else 0]
    inputs, weights = (200, 60) if name == "attention" else (130, 80)
    return Pipeline(
        stages=stages_by_rank(ranks, 2, layout="v"),
        num_microbatches=microbatches,
        forward_ns=tuple(100 + extra for extra in head),
        inputs_ns=tuple(inputs + extra for extra in head),
        weights_ns=tuple(weights + extra for extra in head),
        hop_ns=tuple(0 if stage == ranks - 1 else 4 for stage in range(count - 1)),
        held_bytes=(100,) * count,
        left_bytes=(60,) * count,
        cap_bytes=(cap,) * ranks,
    )


if __name__ == "__main__":
    main()
