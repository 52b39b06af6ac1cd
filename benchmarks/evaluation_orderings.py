"""The orderings that the published system's evaluation found, predicted: what beats what, by how much.

Models, cluster and batches are those of the evaluation (folder `published_evaluation`); what it does not say
is swept. `docs/evaluation.md` has the figures side by side, and where they differ, why.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rank_order import replica_by_replica

from piper.predict import Job, compile_job
from piper.strategy import Strategy, load_strategy
from simulator import build_workload, simulate, summarize
from simulator.plan import NONE, Plan, TaskKind

DATA = Path(__file__).parent / "published_evaluation"
CLUSTER = str(DATA / "a100_efa.yaml")
SEQ_LEN = 512
MICRO_BATCH = 4
"""Tokens of a sequence, and sequences of a microbatch, in the artifact's sweep over schedules."""

PUBLISHED: Mapping[str, Any] = {
    "interleaved_over_1f1b": 1.05,
    "dualpipe_v_over_1f1b": {"1b": 1.13},
    "dualpipe_v_over_interleaved": {"9b": 1.10},
    "largest_micro_batch": {"zero1": "none fits", "zero2": 32, "zero3": 40},
    "tokens_per_s_pp8_dp4": 390_000,
    "all_to_all_slowdown": 1.46,
}
"""Piper over Piper; the sources are listed in `docs/evaluation.md`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training job of the evaluation; 2 microbatches per pipeline rank.

    Args:
        model: "1b" or "9b".
        pp, dp, ep: degrees.
        schedule: its name.
        micro_batch: sequences per microbatch.
        zero: stage.
        bucket_mb: most gradients in a bucket, 0: one bucket per stage.
        by_replica: whether the ranks of a replica, not of a stage, are neighbours.
        weights_again: whether gradients of weights that were put off go through the backward again, as they
            do in the published system; ours keeps what they need.
        cross_entropy: how the loss is computed, of `model.cross_entropy`.
    """

    model: str
    pp: int
    dp: int
    ep: int = 1
    schedule: str = "1f1b"
    micro_batch: int = MICRO_BATCH
    zero: int = 1
    bucket_mb: int = 0
    by_replica: bool = False
    weights_again: bool = False
    cross_entropy: str = "unfused"

    @property
    def strategy(self) -> str:
        """Return the shorthand."""
        parts = [f"pp={self.pp},dp={self.dp},schedule={self.schedule},zero={self.zero}"]
        parts += [f"micro_batch={self.micro_batch}"]
        parts += [f"ep={self.ep}"] if self.ep > 1 else []
        parts += ["vp=2"] if self.schedule == "interleaved_1f1b" else []
        parts += [f"bucket_mb={self.bucket_mb}"] if self.bucket_mb else []
        return ",".join(parts)


@cache
def predicted(run: Run) -> dict[str, Any]:
    """Return the summary of a simulated run."""
    compiled = compile_job(
        Job(
            model=str(DATA / f"qwen3_moe_{run.model}.json"),
            strategy=Strategy.parse(run.strategy),
            cluster=CLUSTER,
            seq_len=SEQ_LEN,
            global_batch=2 * run.pp * run.micro_batch * run.dp,
            clip_grad_norm=None,
            settings=(("model.cross_entropy", run.cross_entropy),),
        )
    )
    plan, prices = compiled.plan, compiled.cost_model
    if run.weights_again:
        plan = with_weights_again(plan)
    if run.by_replica:
        prices = replica_by_replica(prices, pp=run.pp, dp=run.dp)
    workload = build_workload(plan, prices)
    timeline = simulate(plan, prices, workload=workload)
    return summarize(plan, timeline, prices, workload=workload)


def with_weights_again(plan: Plan) -> Plan:
    """Return a plan in which every BW first does what the BIs of its stage and microbatch did."""
    works = list(plan.works)
    for device in plan.device_plans:
        table = device.tasks
        for task in np.flatnonzero(table.kind == TaskKind.BW).tolist():
            same = (table.stage == table.stage[task]) & (table.microbatch == table.microbatch[task])
            inputs = table.work[same & (table.kind == TaskKind.BI)].tolist()
            work = plan.works[table.work[task]]
            again = [operation for number in inputs for operation in plan.works[number].operations]
            works[table.work[task]] = replace(work, operations=(*again, *work.operations))
    return replace(plan, works=tuple(works))


SCHEDULE_SETUPS = ({"model": "1b", "pp": 8, "dp": 4, "ep": 4}, {"model": "9b", "pp": 4, "dp": 4, "ep": 4})
ARTIFACT_SETUP = {"model": "9b", "pp": 2, "dp": 2, "ep": 2}
"""The artifact's sweep over schedules: one node, microbatches of `MICRO_BATCH`."""
SCHEDULES = ("1f1b", "interleaved_1f1b", "dualpipe_v")


def schedules(micro_batches: Iterable[int]) -> list[dict[str, Any]]:
    """Return step times of the schedules with experts cut over the replicas, and their ratios."""
    return [schedule_row(Run(**ARTIFACT_SETUP))] + [
        schedule_row(Run(**setup, micro_batch=size, by_replica=by_replica))
        for setup in SCHEDULE_SETUPS
        for by_replica in (False, True)
        for size in micro_batches
    ]


def schedule_row(run: Run) -> dict[str, Any]:
    found = {name: predicted(replace(run, schedule=name)) for name in SCHEDULES}
    times = {name: result["step_time_s"] for name, result in found.items()}
    again_s = predicted(replace(run, schedule="dualpipe_v", weights_again=True))["step_time_s"]
    return {
        "model": run.model,
        "gpus": run.pp * run.dp,
        "neighbours": "replica" if run.by_replica else "stage",
        "micro_batch": run.micro_batch,
        "step_time_s": times,
        "bubble_fraction": {name: result["bubble_fraction"] for name, result in found.items()},
        "interleaved_over_1f1b": times["1f1b"] / times["interleaved_1f1b"],
        "dualpipe_v_over_1f1b": times["1f1b"] / times["dualpipe_v"],
        "dualpipe_v_over_interleaved": times["interleaved_1f1b"] / times["dualpipe_v"],
        "dualpipe_v_weights_again": {
            "over_1f1b": times["1f1b"] / again_s,
            "over_interleaved": times["interleaved_1f1b"] / again_s,
        },
    }


ZERO_SETUPS = ({"model": "9b", "pp": 8, "dp": 4}, {"model": "1b", "pp": 8, "dp": 2})
ZERO_BUCKET_MB = 256
"""In the published system a bucket is a segment at most; here the experts of a layer are the largest ones."""


def zero_memory(setups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return by ZeRO stage the memory of the fullest rank, and the largest microbatch that fits."""
    rows = []
    for setup in setups:
        runs = {f"zero{z}": Run(**setup, zero=z, bucket_mb=ZERO_BUCKET_MB) for z in range(4)}
        rows.append(
            {
                "model": setup["model"],
                "gpus": setup["pp"] * setup["dp"],
                "micro_batch": MICRO_BATCH,
                "peak_memory_bytes": {z: predicted(run)["peak_memory_bytes"] for z, run in runs.items()},
                "state_bytes": {z: _state_bytes(run) for z, run in runs.items()},
                "largest_micro_batch": {z: largest_micro_batch(run) for z, run in runs.items()},
            }
        )
    return rows


def _state_bytes(run: Run) -> int:
    """Return parameters, gradients and optimizer state of the rank that has most of them."""
    classes = [rank["memory_by_class_bytes"] for rank in predicted(run)["ranks"]]
    return max(sum(c[name] for name in ("parameters", "gradients", "optimizer")) for c in classes)


def largest_micro_batch(run: Run) -> int:
    """Return the largest microbatch with which a run fits on its devices, 0 if none does."""

    def fits(size: int) -> bool:
        return size == 0 or bool(predicted(replace(run, micro_batch=size))["fits"])

    low, high = 0, 8
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def scaling(micro_batch: int, *, cross_entropy: str = "unfused") -> list[dict[str, Any]]:
    """Return throughput over numbers of pipeline ranks and replicas.

    `fullest_rank`: the part of all work that the rank with the most of it has; `busy_of_fullest_rank`: how
    much of the step it computes.
    """
    rows = []
    for pp in (2, 4, 8):
        for dp in (2, 4):
            run = Run(model="1b", pp=pp, dp=dp, zero=0, micro_batch=micro_batch, cross_entropy=cross_entropy)
            found = predicted(run)
            busy_s = [rank["busy_s"] for rank in found["ranks"]]
            rows.append(
                {
                    "pp": pp,
                    "dp": dp,
                    "micro_batch": micro_batch,
                    "cross_entropy": cross_entropy,
                    "tokens_per_s": found["tokens_per_s"],
                    "fullest_rank": max(busy_s) / sum(busy_s),
                    "busy_of_fullest_rank": max(busy_s) / found["step_time_s"],
                }
            )
    return rows


PP, DP = 8, 4


def all_to_all_slowdowns() -> dict[str, dict[str, float]]:
    """Return how much longer an all-to-all of experts takes beside an all-reduce of data parallelism.

    By what neighbours are: mean and largest over those that meet one, in a step of the 9B model that
    runs its all-reduces as early as it can (each microbatch).
    """
    return {name: _in_step(by_replica=name == "replica") for name in ("stage", "replica")}


def _in_step(*, by_replica: bool) -> dict[str, float]:
    compiled = compile_job(
        Job(
            model=str(DATA / "qwen3_moe_9b.json"),
            strategy=load_strategy(str(DATA / "reduce_each_microbatch.json")),
            cluster=CLUSTER,
            seq_len=SEQ_LEN,
            global_batch=2 * PP * MICRO_BATCH * DP,
        )
    )
    plan = compiled.plan
    prices = replica_by_replica(compiled.cost_model, pp=PP, dp=DP) if by_replica else compiled.cost_model
    workload = build_workload(plan, prices)
    timeline = simulate(plan, prices, workload=workload, steps=2)
    slowed = []
    for first, track, device in zip(workload.device_starts, timeline.tracks, plan.device_plans, strict=False):
        start, end = (times.reshape(2, -1)[1] for times in (track.start_ns, track.end_ns))
        reduces = np.flatnonzero((device.tasks.kind == TaskKind.ALL_REDUCE) & (device.tasks.bucket != NONE))
        for task in np.flatnonzero(device.tasks.kind == TaskKind.ALL_TO_ALL):
            meets = (start[reduces] < end[task]) & (end[reduces] > start[task])
            alone = workload.duration_ns[first + task]
            slowed += [(end[task] - start[task]) / alone] if meets.any() else []
    return {"mean": float(np.mean(slowed)), "largest": float(np.max(slowed)), "all_to_alls": len(slowed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one batch size, and the larger model's memory")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    result = {
        "benchmark": "evaluation_orderings",
        "published": PUBLISHED,
        "schedules": schedules([MICRO_BATCH] if options.quick else [1, 2, 4, 8, 16]),
        "zero_memory": zero_memory(ZERO_SETUPS[:1] if options.quick else ZERO_SETUPS),
        "scaling": [
            row
            for size, loss in ((MICRO_BATCH, "unfused"), (16, "unfused"), (16, "fused"))
            for row in scaling(size, cross_entropy=loss)
        ],
        "all_to_all_slowdown": all_to_all_slowdowns(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
