"""Start the ranks of a run: `run_local` forks them on this machine, `run_rank` is one of `torchrun`'s.

Importing this module loads no torch, so that a wrong world size is refused at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cost_models.errors import require_known, require_positive_int
from piper.errors import JobError, RunFailedError
from piper.runtime.delays import Delays
from piper.runtime.devices import DEVICES, open_device
from piper.runtime.outcome import RunOutcome
from piper.runtime.progress import Phase, ProgressBoard, Reporting
from piper.runtime.runnable import require_runnable, require_runnable_on_gpus
from piper.runtime.settings import OptimizerSettings, RunSettings, default_optimizer
from piper.runtime.watch import Child, die_with_parent, end, watch
from simulator.plan import Plan

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from piper.runtime.devices.device import Device
    from piper.runtime.known import KnownReferences
    from piper.runtime.program import Program
    from piper.runtime.rank import RankJob

_LIMIT_FACTOR = 2.0
"""Local ranks give up transfers later than the watcher blames the culprit, which knows more."""

_FAILURE_KEY = "piper/failure"
_GRACE_S = 2.0
"""So long a rank whose transfer failed waits to hear who failed first."""


def run_local(
    plan: Plan,
    source: Any,
    *,
    num_ranks: int,
    steps: int,
    seed: int = 0,
    verify: bool = False,
    reductions: str | None = None,
    timeout_s: float = 600.0,
    optimizer: OptimizerSettings | None = None,
    program: Program | None = None,
    references: KnownReferences | None = None,
    padding: float = 0.0,
    record: bool = True,
    delays: Delays | None = None,
) -> RunOutcome:
    """Train `steps` steps of `plan` with `num_ranks` processes on this machine's CPUs.

    Args:
        plan: compiled for exactly `num_ranks` ranks.
        source: `piper.models.ModelSource`, or a callable that returns the annotated module.
        num_ranks: processes to start.
        steps: optimizer steps.
        seed: of initial values, data and dropout.
        verify: compare every step with one process; the verdict is in the result.
        reductions: "native" or "ordered"; default native, and ordered with `verify`.
        timeout_s: a rank that is silent for so long ends the job.
        optimizer: default: the plan's optimizer with the defaults of `torch.optim`.
        program: the traced model, if at hand.
        references: keeps those of verified runs that are equal bit for bit from one call to the next.
        padding: share of the tokens that are padding, which no loss counts.
        record: keep the times of all tasks; without, the timeline has steps only.
        delays: start every task late, each stream in a thread of its own (to find missing waits).

    Raises: JobError for a world size other than the plan's, or a model that takes no known token numbers;
        RunFailedError naming the culprit. Ctrl-C ends the run after the step under way: the outcome has the
        steps so far, and says that it was interrupted; KeyboardInterrupt before the first step, or if pressed
        again.
    """
    require_runnable(plan)
    _require_world_size(plan, num_ranks, field="--local")
    _require_vocabulary(plan)
    settings = _settings(plan, steps, seed, verify, reductions, timeout_s, optimizer)
    settings = replace(settings, delays=delays, padding=padding, record=record)
    _prepare_torch()
    from piper.runtime.program import check_program, local_program, program_of_plan
    from piper.runtime.rank import RankJob

    if program is None:
        program = program_of_plan(source, plan)
    else:
        check_program(program, plan)
        program = local_program(program, source, plan)
    job = partial(RankJob, plan=plan, source=source, program=program, settings=settings)
    exact = settings.reductions == "ordered" and not plan.cuts.regions
    if references is not None and verify and exact:
        job = partial(job, known=references.of(plan, source, program=program, settings=settings))
    outcome: RunOutcome = _fork_and_watch(plan, job, timeout_s=settings.timeout_s)
    return outcome


def run_rank(
    plan: Plan,
    source: Any,
    *,
    steps: int,
    seed: int = 0,
    verify: bool = False,
    reductions: str | None = None,
    timeout_s: float = 600.0,
    optimizer: OptimizerSettings | None = None,
    padding: float = 0.0,
    record: bool = True,
    device: str | None = None,
) -> RunOutcome | None:
    """Be the rank that `torchrun` says in RANK, WORLD_SIZE and MASTER_ADDR; arguments as in `run_local`.

    Args:
        device: "cuda": the GPU of number LOCAL_RANK; "cpu"; None: "cuda" where there is one.

    Returns: the outcome on rank 0, None on the others.
    Raises: JobError for a world size other than the plan's, or what `device` cannot run; RunFailedError.
    """
    rank, world_size = (_environment(name) for name in ("RANK", "WORLD_SIZE"))
    require_runnable(plan)
    _require_world_size(plan, world_size, field="WORLD_SIZE")
    _require_vocabulary(plan)
    settings = _settings(plan, steps, seed, verify, reductions, timeout_s, optimizer)
    settings = replace(settings, padding=padding, record=record)
    _prepare_torch()
    import torch.distributed as dist

    from piper.runtime.program import program_of_plan
    from piper.runtime.rank import RankJob, train_in_group

    opened = _open(device, plan, rank, verify=verify)
    program = program_of_plan(source, plan, place=opened.place)
    job = RankJob(plan=plan, source=source, program=program, settings=settings, rank=rank, device=opened)
    store, _, _ = next(dist.rendezvous("env://", rank, world_size))  # type: ignore[attr-defined]
    try:
        return train_in_group(job, Reporting(), store=store, limit_s=timeout_s)
    except Exception as error:
        raise RunFailedError(_agreed_culprit(job, store, error)) from error


def _open(name: str | None, plan: Plan, rank: int, *, verify: bool) -> Device:
    """Open the device of a rank that torchrun started."""
    import torch

    there = torch.cuda.is_available()
    name = name or ("cuda" if there else "cpu")
    require_known(name, list(DEVICES), where="piper run", field="--device", error=JobError)
    if name == "cpu":
        return open_device(name)
    if not there:
        raise JobError(
            where="piper run",
            field="--device",
            value=name,
            rule="needs a GPU and a torch that was built for it",
            fix="leave --device out; `piper doctor` says what there is",
        )
    require_runnable_on_gpus(plan, verify=verify)
    planned = plan.device_plans[plan.pipeline_rank_of(rank)]
    priorities = {planned.streams[rule.stream]: rule.priority or 0 for rule in planned.stream_rules}
    return open_device(name, index=_environment("LOCAL_RANK"), priorities=priorities)


def _prepare_torch() -> None:
    """Load torch for one thread, with what its first backward would import in the middle of a step."""
    import importlib

    import torch

    torch.set_num_threads(1)
    importlib.import_module("torch.fx.experimental.symbolic_shapes")


def _fork_and_watch(plan: Plan, job: Callable[..., RankJob], *, timeout_s: float) -> RunOutcome:
    """Fork one process per rank: torch and the program are inherited, so ranks start in milliseconds."""
    import multiprocessing

    import torch.distributed as dist

    fork = multiprocessing.get_context("fork")
    board = ProgressBoard(plan.num_ranks)
    children: list[Child] = []
    ports = [fork.Pipe(duplex=False) for _ in range(plan.num_ranks)]
    store = None
    try:
        for rank in range(plan.num_ranks):
            receive, send = fork.Pipe(duplex=False)
            target = partial(_be_rank, job(rank=rank), board, pipe=send, port=ports[rank][0])
            process = fork.Process(target=target, daemon=True)
            process.start()
            send.close()
            children.append(Child(rank=rank, process=process, pipe=receive))
        # Started after the forks: a child must inherit neither the store's thread nor its socket.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        for _, tell in ports:
            tell.send(store.port)
        outcome: RunOutcome
        outcome, interrupted = watch(children, board, plan, timeout_s=timeout_s)
        return replace(outcome, result=outcome.result | {"interrupted": interrupted})
    finally:
        # A traceback may keep this frame alive; a store in it would hang the next run's children on exit.
        del store
        end(children)
        for hear, tell in ports:
            hear.close()
            tell.close()


def _be_rank(job: Any, board: ProgressBoard, *, pipe: Connection, port: Connection) -> None:
    """Run one rank in a forked process, say how it went, and leave without any clean-up that could hang."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = RunFailedError.exit_code
    try:
        pipe.send(_rank_message(job, board, port.recv()))
        code = 0
    finally:
        os._exit(code)


def _rank_message(job: Any, board: ProgressBoard, port: int) -> tuple[Any, ...]:
    import torch.distributed as dist

    from piper.runtime.rank import describe_failure, train_in_group

    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if os.uname().sysname == "Linux" else "lo0"
    limit_s = job.settings.timeout_s * _LIMIT_FACTOR
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        reporting = Reporting(
            report=partial(board.report, job.rank), may_begin=partial(board.begins, job.rank)
        )
        outcome = train_in_group(job, reporting, store=store, limit_s=limit_s)
        board.report(job.rank, Phase.DONE)
        return ("done", outcome)
    except Exception as error:  # noqa: BLE001  whatever it is, the launcher must hear of it
        return ("failed", *describe_failure(job.plan, job.rank, error))


def _agreed_culprit(job: Any, store: Any, error: Exception) -> str:
    """Return this rank's failure, or, where it is only an echo, the one that another rank published."""
    from datetime import timedelta

    from piper.runtime.rank import describe_failure

    text, echo = describe_failure(job.plan, job.rank, error)
    try:
        if echo:
            store.wait([_FAILURE_KEY], timedelta(seconds=_GRACE_S))
        known = store.compare_set(_FAILURE_KEY, "", text).decode()
    except RuntimeError:
        return text
    return text if known == text else f"rank {job.rank} stopped: {known}"


def _require_world_size(plan: Plan, found: object, *, field: str) -> None:
    number = require_positive_int(
        found, where="piper run", field=field, fix=f"give {plan.num_ranks}", error=JobError
    )
    if number != plan.num_ranks:
        raise JobError(
            where="piper run",
            field=field,
            value=number,
            rule=f"must be {plan.num_ranks}, the ranks of strategy {plan.strategy!r}",
            fix=f"start {plan.num_ranks} processes, or change the degrees of the strategy",
        )


def _require_vocabulary(plan: Plan) -> None:
    if plan.model.vocabulary == 0:
        raise JobError(
            where=f"model {plan.model.name}",
            field="vocabulary",
            value=0,
            rule="is not known, so that no tokens can be made: neither tokens nor labels index a table",
            fix="look the tokens up in an nn.Embedding",
        )


def _environment(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise JobError(
            where="piper run",
            field=name,
            value=text,
            rule="must be set to a whole number",
            fix="start with `torchrun --nproc-per-node N -m piper run ...`, or use --local N",
        )
    return int(text)


def _settings(  # noqa: PLR0917
    plan: Plan,
    steps: int,
    seed: int,
    verify: bool,
    reductions: str | None,
    timeout_s: float,
    optimizer: OptimizerSettings | None,
) -> RunSettings:
    return RunSettings(
        steps=steps,
        seed=seed,
        verify=verify,
        reductions=reductions or ("ordered" if verify else "native"),
        timeout_s=timeout_s,
        optimizer=optimizer or default_optimizer(plan.training.optimizer),
    )
