"""What ranks held after each task, against what the simulation allocates."""

from __future__ import annotations

import numpy as np

from piper.predict import CompiledJob
from piper.runtime import RunOutcome
from simulator.memory import memory_curve
from simulator.plan import DevicePlan, MemoryClass

GROUPS = (
    (MemoryClass.PARAMETERS,),
    (MemoryClass.GRADIENTS,),
    (MemoryClass.OPTIMIZER,),
    (MemoryClass.BUCKETS,),
    (MemoryClass.ACTIVATIONS, MemoryClass.COMMUNICATION, MemoryClass.WORKSPACE),
)


def grouped(by_class: np.ndarray) -> np.ndarray:
    """Sum the classes of each group: [..., classes] -> [..., groups]."""
    return np.stack([by_class[..., list(group)].sum(axis=-1) for group in GROUPS], axis=-1)


def allocated_after_tasks(device: DevicePlan, *, steps: int) -> np.ndarray:
    """Return simulated bytes after each task, [steps, tasks, classes], when one runs after the other."""
    num_tasks = len(device.tasks)
    start_ns = 10 * np.arange(steps * num_tasks, dtype=np.int64).reshape(steps, num_tasks)
    curve = memory_curve(device, start_ns=start_ns, end_ns=start_ns + 5)
    return curve.class_bytes[np.searchsorted(curve.time_ns, start_ns + 7) - 1]


def differences(job: CompiledJob, outcome: RunOutcome) -> list[str]:
    found = []
    for ledger in outcome.ledgers:
        device = job.plan.device_plans[job.plan.pipeline_rank_of(ledger.rank)]
        changes = ledger.task_bytes
        simulated = allocated_after_tasks(device, steps=len(changes))
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
