"""What a rank really holds after each task is what the simulation says that it holds.

The runtime counts storages of real tensors as they come and go (`piper.runtime.ledger`); the simulator adds
up the buffers that tasks allocate and free, with sizes that capture found on tensors without numbers. Both
are compared after each task of all ranks and steps, in dispatch order. Activations, messages and scratch
count together: a tensor that is received, then kept for backward, has one storage. Scratch that lives within
a task is in neither.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from piper.predict import CompiledJob, Job, compile_job
from piper.runtime import RunOutcome, run_local
from piper.strategy import load_strategy
from simulator.memory import memory_curve
from simulator.plan import DevicePlan, MemoryClass
from tests.piper.runtime.toy import SEQ

STEPS = 2
GROUPS = (
    (MemoryClass.PARAMETERS,),
    (MemoryClass.GRADIENTS,),
    (MemoryClass.OPTIMIZER,),
    (MemoryClass.BUCKETS,),
    (MemoryClass.ACTIVATIONS, MemoryClass.COMMUNICATION, MemoryClass.WORKSPACE),
)

STRATEGIES = [
    "pp=1",
    "pp=2,schedule=gpipe",
    "pp=2,schedule=1f1b",
    "pp=2,vp=2,schedule=interleaved_1f1b",
    "pp=2,vp=2,schedule=looped_bfs",
    "pp=4,schedule=gpipe",
    "pp=4,schedule=1f1b",
    "dp=2",
    "dp=2,zero=1",
    "dp=4,zero=1",
    "pp=2,dp=2,zero=0",
    "pp=2,dp=2,zero=1",
    "pp=2,recompute=full",
    "pp=1,recompute=full:8",
    "pp=2,dp=2,vp=2,zero=1,recompute=full",
    "pp=2,micro_batch=3",
    "dp=2,zero=1,bucket_mb=1",
]


def compiled_job(strategy: str, *, model: str = "tiny-llama", **options: object) -> CompiledJob:
    sizes = {"seq_len": 16, "global_batch": 8, "cluster": "cpu", "dtype": "fp32"} | options
    return compile_job(Job(model=model, strategy=load_strategy(strategy), **sizes))


def run(job: CompiledJob) -> RunOutcome:
    return run_local(job.plan, job.source, num_ranks=job.plan.num_ranks, steps=STEPS, timeout_s=60.0)


def grouped(by_class: np.ndarray) -> np.ndarray:
    """Sum the classes of each group: [..., classes] -> [..., groups]."""
    return np.stack([by_class[..., list(group)].sum(axis=-1) for group in GROUPS], axis=-1)


def allocated_after_tasks(device: DevicePlan) -> np.ndarray:
    """Return simulated bytes after each task, [steps, tasks, classes], when one runs after the other."""
    num_tasks = len(device.tasks)
    start_ns = 10 * np.arange(STEPS * num_tasks, dtype=np.int64).reshape(STEPS, num_tasks)
    curve = memory_curve(device, start_ns=start_ns, end_ns=start_ns + 5)
    return curve.class_bytes[np.searchsorted(curve.time_ns, start_ns + 7) - 1]


def differences(job: CompiledJob, outcome: RunOutcome) -> list[str]:
    found = []
    for ledger in outcome.ledgers:
        device = job.plan.device_plans[job.plan.pipeline_rank_of(ledger.rank)]
        simulated = allocated_after_tasks(device)
        changes = ledger.task_bytes
        held = ledger.static_bytes + changes.reshape(-1, len(MemoryClass)).cumsum(axis=0).reshape(
            changes.shape
        )
        wrong = np.argwhere((grouped(held) != grouped(simulated)).any(axis=-1))
        found += [
            f"rank {ledger.rank} step {step} after {device.codes()[task]}: "
            f"simulated {simulated[step, task]}, held {held[step, task]}"
            for step, task in wrong.tolist()
        ]
        if changes.sum(axis=(0, 1)).any():
            found.append(
                f"rank {ledger.rank} does not return to its static bytes: {changes.sum(axis=(0, 1))}"
            )
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_every_task_a_rank_holds_the_bytes_that_the_simulation_allocates(strategy: str) -> None:
    job = compiled_job(strategy)
    outcome = run(job)
    assert differences(job, outcome) == []


@pytest.mark.parametrize(
    ("model", "strategy", "options"),
    [
        ("tiny-moe", "pp=2,dp=2,zero=1,recompute=full", {}),
        ("tests.piper.runtime.toy:crossing", "pp=3,dp=2,zero=1,recompute=full", {"seq_len": SEQ}),
        ("tests.piper.runtime.toy:crossing", "pp=6", {"seq_len": SEQ}),
        ("tests.piper.runtime.toy:frozen", "pp=2,recompute=full", {"seq_len": SEQ}),
        ("tests.piper.runtime.toy:frozen", "pp=3,dp=2,zero=1", {"seq_len": SEQ}),
        ("tiny-llama", "pp=2,dp=2,zero=1", {"dtype": "bf16"}),
        ("tiny-llama", "dp=2,zero=1", {"optimizer": "sgd"}),
        ("tiny-llama", "pp=2", {"clip_grad_norm": None, "micro_batch": 2}),
    ],
)
def test_so_it_is_for_other_models_dtypes_and_optimizers(
    model: str, strategy: str, options: dict[str, object]
) -> None:
    job = compiled_job(strategy, model=model, **options)
    assert differences(job, run(job)) == []


def test_four_bytes_too_many_in_one_buffer_are_noticed() -> None:
    job = compiled_job("pp=1")
    outcome = run(job)
    (device,) = job.plan.device_plans
    (buffer,) = np.flatnonzero(device.buffers.microbatch == 0)[:1]
    size = device.buffers.size_bytes.copy()
    size[buffer] += 4
    wrong = replace(device, buffers=replace(device.buffers, size_bytes=size))
    edited = replace(job, plan=replace(job.plan, device_plans=(wrong,)))
    assert differences(job, outcome) == []
    assert len(differences(edited, outcome)) == STEPS
