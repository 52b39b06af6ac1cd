"""`simulate`: plan and cost model in, timeline out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cost_models.errors import check_invariant, require_positive_int
from cost_models.price import CostModel
from simulator.engines import EngineRun, choose_engine, load_engine
from simulator.errors import PlanError
from simulator.memory import memory_curve
from simulator.plan import DevicePlan, Plan
from simulator.plan.codes import Codes
from simulator.timeline.timeline import RankTrack, Timeline
from simulator.workload import Workload, build_workload, require_in_range

MOST_STEPS = 4
SETTLED = 1e-6


def simulate(
    plan: Plan,
    cost_model: CostModel,
    *,
    steps: int | str = "auto",
    engine: str = "auto",
    contention: bool = True,
    workload: Workload | None = None,
) -> Timeline:
    """Simulate `plan` on the hardware that `cost_model` describes.

    Args:
        plan: what to run.
        cost_model: prices of operations, transfers and collectives.
        steps: how many steps, or "auto": 2 to 4, until two consecutive periods agree to 1e-6.
        engine: a name of `simulator.engines.ENGINES`, or "auto".
        contention: whether what runs at once shares links, processors and memory bandwidth.
        workload: `build_workload(plan, cost_model)` if the caller has it already; says itself what is shared.

    Raises: IllegalPlanError if the plan hangs or a task has no counterpart; PlanError for a bad option;
        CostModelError for a price that is no number.
    """
    if steps != "auto":
        fix = 'give "auto" or the number of steps to simulate'
        require_positive_int(steps, where="simulate", field="steps", fix=fix, error=PlanError)
    work = build_workload(plan, cost_model, contention=contention) if workload is None else workload
    most_steps = steps if isinstance(steps, int) else MOST_STEPS
    require_in_range(work, steps=most_steps)
    chosen, warnings = choose_engine(engine, num_tasks=work.num_tasks)
    run_engine = load_engine(chosen)
    if isinstance(steps, int):
        done = run_engine(work, max_steps=most_steps, settled=lambda _: False)
    else:
        done = run_engine(work, max_steps=most_steps, settled=has_settled)
        warnings += () if has_settled(done.step_end_ns.tolist()) else (_unsettled(done),)
    check_invariant(bool((done.end_ns >= done.start_ns).all()), "a task ends before it starts")
    return Timeline(
        source="simulated",
        tracks=tuple(_track(plan, work, done, number=number) for number in range(work.num_devices)),
        step_end_ns=done.step_end_ns,
        warnings=warnings,
    )


def has_settled(step_end_ns: Sequence[int]) -> bool:
    """Tell whether the last two periods between step ends agree to 1e-6 (the first begins at 0)."""
    periods = [after - before for before, after in pairwise([0, *step_end_ns])]
    if len(periods) == 1:
        return False
    return abs(periods[-1] - periods[-2]) <= SETTLED * periods[-1]


def steps_needed(step_end_ns: Sequence[int]) -> int | None:
    """Return after how many steps of a run its period had settled, or None: it had not."""
    counts = range(1, len(step_end_ns) + 1)
    return next((n for n in counts if has_settled(step_end_ns[:n])), None)


def _unsettled(done: EngineRun) -> str:
    periods = np.diff(done.step_end_ns, prepend=0).tolist()
    shown = ", ".join(f"{period / 1e9:.6g} s" for period in periods)
    return f"the step time had not settled after {len(periods)} steps ({shown}); the last period is reported"


def _track(plan: Plan, workload: Workload, done: EngineRun, *, number: int) -> RankTrack:
    device = plan.device_plans[number]
    first, last = workload.device_starts[number : number + 2].tolist()
    return rank_track(
        device,
        done.tasks(first, last),
        rank=plan.mesh.ranks(pp=device.pipeline_rank)[0] if len(plan.device_plans) > 1 else 0,
        n_devices=workload.n_devices,
        codes=_codes(workload, number),
    )


def _codes(workload: Workload, number: int) -> Sequence[str]:
    """Return the codes of one device plan, made when somebody looks at them if that is so in the workload."""
    codes = workload.codes
    if isinstance(codes, Codes):
        return codes.of_device(number)
    first, last = workload.device_starts[number : number + 2].tolist()
    return codes[first:last]


def rank_track(
    device: DevicePlan, done: EngineRun, *, rank: int, n_devices: int, codes: Sequence[str]
) -> RankTrack:
    """Return the track of a rank, whose tasks are those of `device`, from their times."""
    num_steps, num_tasks = done.end_ns.shape
    curve = memory_curve(device, start_ns=done.start_ns, end_ns=done.end_ns)
    return RankTrack(
        rank=rank,
        n_devices=n_devices,
        pipeline_rank=device.pipeline_rank,
        stages=device.stages,
        streams=device.streams,
        task=np.tile(np.arange(num_tasks, dtype=np.int64), num_steps),
        step=np.repeat(np.arange(num_steps, dtype=np.int64), num_tasks),
        stream=np.tile(device.tasks.stream, num_steps),
        dispatch_ns=done.dispatch_ns.ravel(),
        ready_ns=done.ready_ns.ravel(),
        start_ns=done.start_ns.ravel(),
        end_ns=done.end_ns.ravel(),
        memory_ns=curve.time_ns,
        memory_bytes=curve.class_bytes,
        codes=codes,
        kinds=device.tasks.kind,
    )
