"""What ranks held after each task, against what the simulation allocates."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from cost_models.ops import DTYPE_BYTES
from piper.predict import CompiledJob
from piper.runtime import RunOutcome
from piper.runtime.outcome import RankLedger
from simulator.memory import memory_curve
from simulator.plan import DevicePlan, IndexLists, MemoryClass, Plan, Region, Task, TaskKind, TensorSpec

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
        simulated = allocated_after_tasks(device, steps=len(ledger.task_bytes))
        found += differences_of_rank(device, ledger, simulated)
    return found


def differences_with_experts(job: CompiledJob, outcome: RunOutcome) -> list[str]:
    """Hold the run against a simulation that knows how many rows each rank's experts took."""
    found = []
    for ledger in outcome.ledgers:
        device = job.plan.device_plans[job.plan.pipeline_rank_of(ledger.rank)]
        simulated = [
            allocated_after_tasks(with_rows(job.plan, device, rows), steps=1) for rows in ledger.routed_rows
        ]
        found += differences_of_rank(device, ledger, np.concatenate(simulated))
    return found


def differences_of_rank(device: DevicePlan, ledger: RankLedger, simulated: np.ndarray) -> list[str]:
    changes, held = ledger.task_bytes, held_after_tasks(ledger)
    wrong = np.argwhere((grouped(held) != grouped(simulated)).any(axis=-1))
    found = [
        f"rank {ledger.rank} step {step} after {device.codes()[task]}: "
        f"simulated {simulated[step, task]}, held {held[step, task]}"
        for step, task in wrong.tolist()
    ]
    if changes.sum(axis=(0, 1)).any():
        found.append(f"rank {ledger.rank} does not return to its static bytes: {changes.sum(axis=(0, 1))}")
    return found


def held_after_tasks(ledger: RankLedger) -> np.ndarray:
    """Return what a rank held after each task, [steps, tasks, classes]."""
    changes = ledger.task_bytes
    return ledger.static_bytes + changes.reshape(-1, len(MemoryClass)).cumsum(axis=0).reshape(changes.shape)


def with_rows(plan: Plan, device: DevicePlan, rows: dict[tuple[int, int], int]) -> DevicePlan:
    """Return a device plan whose experts take so many rows, not what balanced routing gives them.

    Rows and their ends also leave earlier than in the plan, which keeps what is sent to experts until these
    have run, and the ends of all experts' rows until their backward; the ends of a rank's own it leaves out.
    """
    size = device.buffers.size_bytes.copy()
    frees = [list(row) for row in device.tasks.frees.to_rows()]
    tasks = list(device.tasks)
    for (microbatch, first), taken in rows.items():
        region = next(one for one in plan.cuts.regions if one.axis == "ep" and one.first == first)
        specs = [plan.segments[made].outputs[number] for made, number in plan.segments[first].inputs]
        sent, ends = (next(s for s in specs if (len(s.shape) == 1) is flat) for flat in (False, True))
        here = [(at, task) for at, task in enumerate(tasks) if task.microbatch == microbatch]
        for _, task in here:
            if is_inside(region, task):
                for buffer in task.allocates:
                    size[buffer], rest = divmod(int(size[buffer]) * taken, sent.shape[0])
                    assert rest == 0
        enters = next(at for at, task in here if is_way_in(region, task, TaskKind.F))
        (arrived,), leaving = tasks[enters].allocates, tasks[enters].reads
        size[arrived] += weight(ends) // region.degree
        expert = next(task for _, task in here if task.kind is TaskKind.F and task.first_segment == first)
        gone = [*leaving, *(b for b in expert.reads if b != arrived and size[b] == weight(ends))]
        frees = [[b for b in row if b not in gone] for row in frees]
        frees[enters] += gone
    return replace(
        device,
        tasks=replace(device.tasks, frees=IndexLists.from_rows(frees)),
        buffers=replace(device.buffers, size_bytes=size),
    )


def weight(spec: TensorSpec) -> int:
    return prod(spec.shape) * DTYPE_BYTES[spec.dtype]


def is_way_in(region: Region, task: Task, phase: TaskKind) -> bool:
    at = region.first if phase is TaskKind.F else region.last + 1
    return task.kind is TaskKind.ALL_TO_ALL and (task.part, task.phase) == (at, phase)


def is_inside(region: Region, task: Task) -> bool:
    """Return whether what a task makes has as many rows as the rank's experts take."""
    if task.kind in {TaskKind.F, TaskKind.B}:
        return task.first_segment >= region.first and task.last_segment <= region.last
    return any(is_way_in(region, task, phase) for phase in (TaskKind.F, TaskKind.B))
