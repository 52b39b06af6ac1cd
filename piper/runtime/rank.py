"""One rank from rendezvous to result: groups, agreement, clock, the steps, gathering what happened."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import takewhile
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from piper.errors import RunFailedError
from piper.runtime.context import RankContext
from piper.runtime.devices.cpu import CpuDevice
from piper.runtime.devices.device import Device
from piper.runtime.groups import Groups, group_table, require_agreement
from piper.runtime.known import KnownStep, References
from piper.runtime.ledger import Ledger
from piper.runtime.outcome import RankLedger, RunOutcome, StepFigures, run_result
from piper.runtime.pieces import Places
from piper.runtime.program import Program
from piper.runtime.progress import Phase, Report, Reporting
from piper.runtime.recorder import RankRecord, Recorder, measured_timeline, rank_record, step_times_s
from piper.runtime.reductions import Reducer
from piper.runtime.routes import Routes
from piper.runtime.settings import RunSettings
from piper.runtime.sources import Source
from piper.runtime.state import RankState
from piper.runtime.step import StepState
from piper.runtime.verify import Verifier, gather_evidence
from piper.runtime.worker import TaskFailedError, Worker
from simulator.plan import MemoryClass, Plan
from simulator.plan.codec import plan_hash

_CLOCK_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every rank gets.

    Args:
        plan, source, program, settings: the job, equal on all ranks.
        rank: which one this is.
        known: the references of all steps, where they are known [Note: known references].
        device: of this rank.
    """

    plan: Plan
    source: Source
    program: Program
    settings: RunSettings
    rank: int
    known: tuple[KnownStep, ...] = ()
    device: Device = field(default_factory=CpuDevice)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """What a rank contributes to the outcome: losses, counted tokens and norms per step, times and memory."""

    losses: list[dict[int, float]]
    tokens: list[int]
    grad_norms: list[float | None]
    reached: frozenset[str]
    record: RankRecord
    ledger: RankLedger


def train(job: RankJob, reporting: Reporting, *, limit_s: float) -> RunOutcome | None:
    """Run all steps, or those before an interruption; rank 0 returns the outcome, the others None.

    The default group must be initialised.

    Raises: RunFailedError when ranks disagree; TaskFailedError naming the task that failed.
    """
    torch.set_num_threads(1)
    plan, report = job.plan, reporting.report
    device = job.device
    groups = Groups.create(plan, rank=job.rank, timeout_s=limit_s, device=device)
    report(Phase.MEETING)
    require_agreement(groups, world_size=plan.num_ranks, what=_digest(job))
    offset_ns = _clock_offset_ns(groups, rank=job.rank, world_size=plan.num_ranks)
    context = _context(job, groups)
    static = np.array(context.ledger.totals, dtype=np.int64)
    recorder = Recorder(num_tasks=len(context.routes.tasks), on=job.settings.record)
    worker = Worker(context=context, recorder=recorder, report=report)
    device.reach(device.mark(), limit_s=limit_s)  # what was made so far belongs to none of the plan's streams
    verifier = _verifier(job, report)
    allowed = takewhile(reporting.may_begin, range(job.settings.steps))
    states = [_step(worker, number, verifier) for number in allowed]
    worker.drain()
    worker.close()
    report(Phase.MEETING)
    mine = _Gathered(
        losses=[state.losses for state in states],
        tokens=[state.tokens for state in states],
        grad_norms=[state.grad_norm for state in states],
        reached=frozenset(context.state.reached),
        record=rank_record(
            worker.recorder,
            rank=job.rank,
            offset_ns=offset_ns,
            memory=context.ledger.log,
            peak_memory_bytes=device.peak_bytes() or context.ledger.peak_bytes,
        ),
        ledger=RankLedger(
            rank=job.rank,
            static_bytes=static,
            task_bytes=np.array(worker.recorder.bytes_, dtype=np.int64),
            routed_rows=tuple(state.routed_rows for state in states),
        ),
    )
    everything: list[Any] | None = [None] * plan.num_ranks if job.rank == 0 else None
    dist.gather_object(mine, everything, dst=0, group=groups.control)
    outcome = None if everything is None else _outcome(plan, everything, verifier, device=device.name)
    dist.barrier(group=groups.control)
    return outcome


def train_in_group(job: RankJob, reporting: Reporting, *, store: Any, limit_s: float) -> RunOutcome | None:
    """Join all ranks in a default gloo group over `store`, and train."""
    dist.init_process_group(
        "gloo",
        store=store,
        rank=job.rank,
        world_size=job.plan.num_ranks,
        timeout=timedelta(seconds=limit_s),
    )
    outcome = train(job, reporting, limit_s=limit_s)
    dist.destroy_process_group()
    return outcome


def describe_failure(plan: Plan, rank: int, error: BaseException) -> tuple[str, bool]:
    """Return what went wrong on a rank, and whether it may only be the echo of another's failure."""
    if isinstance(error, TaskFailedError):
        task = plan.device_plans[plan.pipeline_rank_of(rank)].tasks.task(error.position)
        code = plan.device_plans[plan.pipeline_rank_of(rank)].codes()[error.position]
        cause = error.__cause__ or error
        echo = task.stream > 0 and isinstance(cause, RuntimeError)
        return f"rank {rank} failed in {code} (step {error.step}): {_first_line(cause)}", echo
    echo = isinstance(error, RuntimeError)
    return f"rank {rank} failed: {_first_line(error)}", echo


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, RunFailedError) else f"{type(error).__name__}: {text}"


def _step(worker: Worker, number: int, verifier: Verifier | None) -> StepState:
    state = worker.run_step(number)
    context = worker.context
    if context.settings.verify:
        worker.drain()
        worker.report(Phase.MEETING, step=number)
        evidence = gather_evidence(context, state)
        if verifier is not None and evidence is not None:
            worker.report(Phase.VERIFYING, step=number)
            verifier.compare(number, evidence)
        state.evidence.clear()
        dist.barrier(group=context.groups.control)
    return state


def _verifier(job: RankJob, report: Report) -> Verifier | None:
    if not job.settings.verify or job.rank != 0:
        return None
    report(Phase.VERIFYING)
    references = References(job.plan, job.source, program=job.program, settings=job.settings, known=job.known)
    return Verifier(job.plan, references, settings=job.settings)


def _context(job: RankJob, groups: Groups) -> RankContext:
    plan = job.plan
    routes = Routes(plan=plan, pipeline_rank=plan.pipeline_rank_of(job.rank))
    ledger = Ledger(counts=job.device.counts_bytes)
    for buffer in job.program.buffers.values():
        ledger.hold(buffer, MemoryClass.WORKSPACE)
    return RankContext(
        rank=job.rank,
        plan=plan,
        program=job.program,
        routes=routes,
        settings=job.settings,
        state=RankState.new(
            routes, rank=job.rank, settings=job.settings, ledger=ledger, place=job.device.place
        ),
        groups=groups,
        reducer=Reducer(ordered=job.settings.reductions == "ordered"),
        ledger=ledger,
        places=Places(plan=plan, rank=job.rank),
        device=job.device,
    )


def _digest(job: RankJob) -> str:
    """Return a short text that is equal exactly when plan, groups and options are."""
    parts = (plan_hash(job.plan), group_table(job.plan), job.settings, torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _clock_offset_ns(groups: Groups, *, rank: int, world_size: int) -> int:
    """Return this rank's clock minus that of rank 0 [Note: one clock]."""
    offset = 0
    for other in range(1, world_size):
        if rank == 0:
            offsets = [_ask_time(groups, other) for _ in range(_CLOCK_ROUNDS)]
            best = min(offsets)[1]
            dist.send(torch.tensor([best]), dst=other, group=groups.control)
        elif rank == other:
            for _ in range(_CLOCK_ROUNDS):
                _tell_time(groups)
            answer = torch.zeros(1, dtype=torch.int64)
            dist.recv(answer, src=0, group=groups.control)
            offset = int(answer)
    return offset


def _ask_time(groups: Groups, other: int) -> tuple[int, int]:
    """Return (round trip, other's clock minus ours)."""
    answer = torch.zeros(1, dtype=torch.int64)
    before = perf_counter_ns()
    dist.send(answer, dst=other, group=groups.control)
    dist.recv(answer, src=other, group=groups.control)
    after = perf_counter_ns()
    return after - before, int(answer) - (before + after) // 2


def _tell_time(groups: Groups) -> None:
    question = torch.zeros(1, dtype=torch.int64)
    dist.recv(question, src=0, group=groups.control)
    dist.send(torch.tensor([perf_counter_ns()]), dst=0, group=groups.control)


def _outcome(plan: Plan, gathered: list[_Gathered], verifier: Verifier | None, *, device: str) -> RunOutcome:
    records = [one.record for one in gathered]
    times = step_times_s(records)
    steps = [
        StepFigures(
            loss=sum(sum(one.losses[i].values()) for one in gathered) / gathered[0].tokens[i],
            step_time_s=seconds,
            grad_norm=gathered[0].grad_norms[i],
        )
        for i, seconds in enumerate(times)
    ]
    verification = None if verifier is None else verifier.verification()
    peak = max(record.peak_memory_bytes for record in records)
    return RunOutcome(
        result=run_result(plan, steps, device=device, peak_memory_bytes=peak, verification=verification)
        | {"gradient_coverage": _coverage(plan, frozenset().union(*(one.reached for one in gathered)))},
        timeline=measured_timeline(plan, records),
        differing=() if verification is None else verification.differing,
        ledgers=tuple(one.ledger for one in gathered),
    )


def _coverage(plan: Plan, reached: frozenset[str]) -> dict[str, int]:
    """Return how many tensors are trained, and how many got a gradient in the first step."""
    return {"trainable": sum(p.trainable for p in plan.parameters), "with_gradient": len(reached)}
