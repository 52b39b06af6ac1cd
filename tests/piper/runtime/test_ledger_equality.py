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

from piper.predict import CompiledJob
from piper.runtime import RunOutcome
from simulator.plan import MemoryClass
from tests.piper.runtime.ledgers import (
    allocated_after_tasks,
    differences,
    differences_with_experts,
    grouped,
    held_after_tasks,
)
from tests.piper.runtime.named_runs import compiled_job, run_job
from tests.piper.runtime.toy import SEQ

STEPS = 2

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
    "dp=2,zero=2",
    "dp=4,zero=3",
    "dp=4,zero=2,hsdp=2",
    "dp=4,zero=3,hsdp=2",
    "dp=2,zero=3,prefetch=2",
    "pp=2,dp=2,zero=2,recompute=full",
    "pp=2,vp=2,dp=2,zero=3",
    "pp=2,dp=2,zero=3,recompute=full:4",
]


def run(job: CompiledJob) -> RunOutcome:
    return run_job(job, steps=STEPS, verify=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_every_task_a_rank_holds_the_bytes_that_the_simulation_allocates(strategy: str) -> None:
    job = compiled_job("tiny-llama", strategy)
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
        ("tiny-llama", "dp=2,zero=3", {"dtype": "bf16"}),
        ("tiny-llama", "pp=2", {"clip_grad_norm": None, "micro_batch": 2}),
    ],
)
def test_so_it_is_for_other_models_dtypes_and_optimizers(
    model: str, strategy: str, options: dict[str, object]
) -> None:
    job = compiled_job(model, strategy, **options)
    assert differences(job, run(job)) == []


EXPERTS = ["dp=4,ep=4", "dp=4,ep=2", "pp=2,dp=2,ep=2,zero=1"]


@pytest.mark.parametrize("strategy", EXPERTS)
def test_with_the_rows_that_were_routed_the_simulation_knows_the_bytes_of_experts(strategy: str) -> None:
    job = compiled_job("tiny-moe", strategy)
    outcome = run(job)
    assert differences_with_experts(job, outcome) == []
    assert len(differences(job, outcome)) > 0, "balanced routing would be a coincidence"


TABLES = 16 * 2 * 8 * 4 * 4
"""Cosines and sines of a rank's own 8 tokens, 4 numbers of 4 bytes: 16 layers take them out of the tables."""

CUT = [("tp=2,sp=off", 0), ("pp=2,tp=2", 0), ("cp=2", TABLES)]


@pytest.mark.parametrize(("strategy", "tables"), CUT)
def test_where_tensors_are_cut_the_simulation_is_one_message_off_at_most(strategy: str, tables: int) -> None:
    """Both let go of what they exchange: one when the exchange ends, the other when the next task begins."""
    job = compiled_job("tiny-llama", strategy, global_batch=4)
    found = run(job)
    for ledger in found.ledgers:
        device = job.plan.device_plans[job.plan.pipeline_rank_of(ledger.rank)]
        simulated = grouped(allocated_after_tasks(device, steps=STEPS))
        held = grouped(held_after_tasks(ledger))
        exchanged = device.buffers.memory_class == MemoryClass.COMMUNICATION
        message = device.buffers.size_bytes[exchanged].max()
        assert (held[..., :-1] == simulated[..., :-1]).all()
        assert np.abs(held[..., -1] - simulated[..., -1]).max() <= message + tables
        assert held[..., -1].max() == pytest.approx(simulated[..., -1].max(), rel=0.03)
        assert (held[:, -1] == simulated[:, -1]).all()


def test_four_bytes_too_many_in_one_buffer_are_noticed() -> None:
    job = compiled_job("tiny-llama", "pp=1")
    outcome = run(job)
    (device,) = job.plan.device_plans
    (buffer,) = np.flatnonzero(device.buffers.microbatch == 0)[:1]
    size = device.buffers.size_bytes.copy()
    size[buffer] += 4
    wrong = replace(device, buffers=replace(device.buffers, size_bytes=size))
    edited = replace(job, plan=replace(job.plan, device_plans=(wrong,)))
    assert differences(job, outcome) == []
    assert len(differences(edited, outcome)) == STEPS
