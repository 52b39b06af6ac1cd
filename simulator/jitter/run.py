"""One unfolded run: template, units, disturbance and seed in; ends, waits, and times of a few units out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.errors import check_invariant
from simulator.engines import EngineRun, Settled
from simulator.jitter.disturbance import Disturbance
from simulator.jitter.draws import step_key
from simulator.jitter.kernel import (
    ASIDE,
    BASE,
    CHANCE,
    COLLECTIVE,
    COMPUTE,
    COUNTER,
    DISPATCH,
    DRAW,
    DURATION,
    EAGER_RECV,
    EAGER_SEND,
    END,
    FIRST,
    FIRST_STREAM,
    FOLLOWING,
    FREE,
    HEAD_FIRST,
    HICCUP,
    HOST,
    HOST_COPY,
    KEY,
    KIND,
    LAST,
    LAST_STREAM,
    LAUNCH,
    NOISY,
    ON,
    OTHER,
    PENDING,
    READY,
    RECORD,
    RECORDED,
    RECV,
    SEND,
    START,
    STREAM_COLUMNS,
    TASK_COLUMNS,
    UNIT,
    UNIT_COLUMNS,
    WHERE,
    run_step,
)
from simulator.jitter.unfold import drivers
from simulator.jitter.unfolded_run import UnfoldedRun
from simulator.jitter.units import Units
from simulator.plan import NONE, Plan
from simulator.workload import Workload

Ints = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Template:
    """What all runs of a plan share, as the kernel takes it: tasks, waits and who meets whom.

    Args:
        workload: the folded workload.
        tasks: `kernel.TASK` [tasks].
        lists: waits, in this step and for the one before, by their names in `run_step`.
        task_streams: int64 [streams], first task of each stream of each device plan, or PENDING.
        aside_starts: int64 [device plans + 1].
        aside_tasks: int64 [aside], tasks whose ends the next step asks for.
    """

    workload: Workload
    tasks: npt.NDArray[Any]
    lists: Arrays
    task_streams: Ints
    aside_starts: Ints
    aside_tasks: Ints


def template_of(plan: Plan, workload: Workload) -> Template:
    """Lay out what all runs of a plan share."""
    aside_starts, aside_tasks, place = _aside(workload)
    host = workload.host_waits
    encoded = np.where(host.values < 0, -1 - place[host.values], host.values)
    tasks, task_streams = _tasks(plan, workload)
    lists: Arrays = {
        "wait_starts": workload.waits.starts,
        "waits": workload.waits.values,
        "previous_starts": workload.previous_step_waits.starts,
        "previous_waits": place[workload.previous_step_waits.values],
        "host_starts": host.starts,
        "host_waits": encoded,
    }
    return Template(
        workload=workload,
        tasks=tasks,
        lists=lists,
        task_streams=task_streams,
        aside_starts=aside_starts,
        aside_tasks=aside_tasks,
    )


def _aside(workload: Workload) -> tuple[Ints, Ints, Ints]:
    """Return the tasks that the next step asks for, by device plan, and their places in that list by task."""
    asked = np.zeros(workload.num_tasks, dtype=np.bool_)
    asked[workload.previous_step_waits.values] = True
    earlier = workload.host_waits.values[workload.host_waits.values < 0]
    asked[earlier] = True  # a negative number counts from the end of the step before
    tasks = np.flatnonzero(asked)
    starts = np.searchsorted(tasks, workload.device_starts)
    place = np.cumsum(asked) - asked - np.repeat(starts[:-1], np.diff(workload.device_starts))
    return starts.astype(np.int64), tasks, place.astype(np.int64)


def _tasks(plan: Plan, workload: Workload) -> tuple[npt.NDArray[Any], Ints]:
    count = workload.num_tasks
    tasks = np.zeros((count, TASK_COLUMNS), dtype=np.int64)
    in_collective, is_transfer = workload.collective != NONE, workload.partner != NONE
    kind = np.where(workload.is_send, SEND, RECV)
    kind = np.where(workload.eager, np.where(workload.is_send, EAGER_SEND, EAGER_RECV), kind)
    kind = np.where(in_collective, COLLECTIVE, kind)
    kind = np.where(workload.is_host_copy, HOST_COPY, kind)
    tasks[:, KIND] = np.where(workload.is_compute, COMPUTE, kind)
    driver = drivers(workload)
    tasks[:, DURATION] = workload.duration_ns[driver]
    tasks[:, LAUNCH], tasks[:, HOST] = workload.launch_ns, workload.host_ns
    tasks[:, KEY] = np.where(in_collective, count + workload.collective, driver)
    device = np.repeat(np.arange(workload.num_devices), np.diff(workload.device_starts))
    tasks[:, ON] = workload.stream - workload.stream_starts[device]
    tasks[:, OTHER] = np.maximum(workload.partner, workload.collective)
    group = np.concatenate([d.tasks.group for d in plan.device_plans])
    tasks[:, WHERE] = np.where(is_transfer, device[workload.partner], np.where(in_collective, group, NONE))
    order = np.argsort(workload.stream, kind="stable")
    follows = workload.stream[order[1:]] == workload.stream[order[:-1]]
    tasks[:, FOLLOWING] = PENDING
    tasks[order[:-1][follows], FOLLOWING] = order[1:][follows]
    first = np.full(workload.num_streams, PENDING, dtype=np.int64)
    first[workload.stream[order[::-1]]] = order[::-1]
    return tasks, first


def run_unfolded(
    template: Template,
    units: Units,
    disturbance: Disturbance,
    *,
    seed: int,
    max_steps: int,
    settled: Settled = lambda _: False,
    record: Sequence[int] = (),
    on_step: Callable[[], None] = lambda: None,
) -> UnfoldedRun:
    """Run up to `max_steps` steps, until `settled(ends of the steps so far)`.

    Args:
        template, units, disturbance: what is run; `units` are those of `disturbance`.
        seed: of the draws.
        record: units whose times are kept.
        on_step: called after every step.
    Raises: IllegalPlanError if the plan hangs.
    """
    work = template.workload
    state = _state(template, units, disturbance, record=record, max_steps=max_steps)
    instances = int(np.diff(work.device_starts)[units.device].sum())
    asked = _asked(template, units, state["units"])
    ends: list[int] = []
    by_step: dict[str, list[Ints]] = {"unit_end_ns": [], "waited_ns": [], "caused_ns": []}
    for step in range(max_steps):
        state["waited"][:] = state["caused"][:] = 0
        if run_step(step == 0, step_key(seed, step), *state.values()) < instances:
            _raise_hang(work, max_steps=max_steps)
        state["aside"][:] = state["end"][asked]
        state["units"][:, RECORD] += np.diff(work.device_starts)[units.device]
        unit_end = np.maximum.reduceat(state["streams"][:, FREE], state["units"][:, FIRST_STREAM])
        ends.append(int(unit_end.max()))
        found = (unit_end, state["waited"].copy(), state["caused"].copy())
        for rows, values in zip(by_step.values(), found, strict=True):
            rows.append(values)
        on_step()
        if settled(ends):
            break
    return UnfoldedRun(
        units=units,
        step_end_ns=np.array(ends, dtype=np.int64),
        recorded=_recorded(template, units, state["recorded"], record=record, ends=ends, max_steps=max_steps),
        **{name: np.stack(rows) for name, rows in by_step.items()},
    )


def _raise_hang(workload: Workload, *, max_steps: int) -> None:
    """Let the reference engine say who waits for whom: jitter changes times, not who waits."""
    from simulator.engines.reference import run

    run(replace(workload, sharing=None), max_steps=max_steps, settled=lambda _: False)
    check_invariant(False, "a plan hangs when it is unfolded only")


def _state(
    template: Template, units: Units, disturbance: Disturbance, *, record: Sequence[int], max_steps: int
) -> Arrays:
    """Return what `run_step` takes, in its order."""
    work = template.workload
    table = _units(template, units, disturbance)
    streams = _streams(template, units)
    instances = int(np.diff(work.device_starts)[units.device].sum())
    recorded = _record_places(table, record, max_steps=max_steps)
    counters, counts = _counters(template, units)
    return {
        "tasks": _with_counters(template.tasks, counters),
        "units": table,
        "streams": streams,
        "joined": np.empty(instances, dtype=np.int64),
        "end": np.empty(instances, dtype=np.int64),
        "recorded": np.empty((4, recorded), dtype=np.int64),
        "aside": np.zeros(int(np.diff(template.aside_starts)[units.device].sum()), dtype=np.int64),
        "todo": np.zeros(len(streams) + 1, dtype=np.int64),
        "waited": np.zeros(units.num_units, dtype=np.int64),
        "caused": np.zeros(units.num_units, dtype=np.int64),
        "compute_factor": _flat(disturbance.compute_factor[units.first_rank]),
        "compute_noise": disturbance.compute_noise,
        "noise": disturbance.communication_noise,
        **{name: _flat(values) for name, values in template.lists.items()},
        "peer": _flat(units.peer),
        "peer_factor": _flat(units.peer_factor),
        "counters": np.zeros(counts, dtype=np.int32),
        "group_starts": _flat(work.members.starts),
        "group_tasks": _flat(work.members.values),
        "set_of": _flat(units.set_of),
        "set_starts": _flat(units.set_starts),
        "set_factor": _flat(units.set_factor),
        "set_draw": _flat(units.set_draw),
        "member_starts": _flat(units.member_starts),
        "member": _flat(units.member),
        "member_place": _flat(units.member_place),
        "member_ranks": _flat(units.member_ranks),
    }


def _flat(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a column in the one layout that the kernel is compiled for."""
    return np.require(column, requirements=["C", "W"])


def _units(template: Template, units: Units, disturbance: Disturbance) -> npt.NDArray[Any]:
    work, device, rank = template.workload, units.device, units.first_rank
    table = np.zeros((units.num_units, UNIT_COLUMNS), dtype=np.int64)
    table[:, FIRST], table[:, LAST] = work.device_starts[device], work.device_starts[device + 1]
    table[:, BASE] = _before(table[:, LAST] - table[:, FIRST]) - table[:, FIRST]
    streams = np.diff(work.stream_starts)[device]
    table[:, FIRST_STREAM] = _before(streams)
    table[:, LAST_STREAM] = table[:, FIRST_STREAM] + streams
    table[:, ASIDE] = _before(np.diff(template.aside_starts)[device])
    table[:, CHANCE], table[:, HICCUP] = disturbance.hiccup_chance[rank], disturbance.hiccup_ns[rank]
    table[:, DRAW], table[:, NOISY] = disturbance.draw[rank], disturbance.noisy[rank]
    return table


def _streams(template: Template, units: Units) -> Ints:
    """Return the streams of all units, each with the first task of its kind."""
    work = template.workload
    counts = np.diff(work.stream_starts)[units.device]
    unit = np.repeat(np.arange(units.num_units), counts)
    place = np.arange(len(unit)) - _before(counts)[unit] + work.stream_starts[units.device[unit]]
    streams = np.zeros((len(unit), STREAM_COLUMNS), dtype=np.int64)
    streams[:, HEAD_FIRST] = template.task_streams[place]
    streams[:, UNIT] = unit
    return streams


def _asked(template: Template, units: Units, table: Ints) -> Ints:
    """Return the instances that the next step asks for, unit after unit."""
    counts = np.diff(template.aside_starts)[units.device]
    unit = np.repeat(np.arange(units.num_units), counts)
    place = np.arange(len(unit)) - _before(counts)[unit] + template.aside_starts[units.device[unit]]
    found: Ints = template.aside_tasks[place] + table[unit, BASE]
    return found


def _before(counts: Ints) -> Ints:
    return np.cumsum(counts) - counts


def _record_places(table: npt.NDArray[Any], record: Sequence[int], *, max_steps: int) -> int:
    """Say where the times of the units to record go, one unit after another; return how many there are."""
    place = 0
    for unit in record:
        table[unit, RECORDED] = 1
        table[unit, RECORD] = place - table[unit, FIRST]
        place += int(table[unit, LAST] - table[unit, FIRST]) * max_steps
    return place


def _recorded(
    template: Template, units: Units, times: Ints, *, record: Sequence[int], ends: list[int], max_steps: int
) -> dict[int, EngineRun]:
    found, place, steps = {}, 0, len(ends)
    for unit in record:
        width = int(np.diff(template.workload.device_starts)[units.device[unit]])
        rows = times[:, place : place + steps * width].reshape(4, steps, width)
        found[unit] = EngineRun(
            dispatch_ns=rows[DISPATCH],
            ready_ns=rows[READY],
            start_ns=rows[START],
            end_ns=rows[END],
            step_end_ns=np.array(ends, dtype=np.int64),
        )
        place += width * max_steps
    return found


def _counters(template: Template, units: Units) -> tuple[Ints, int]:
    """Return by collective where the arrivals at its first set are counted, and the number of counters."""
    work = template.workload
    first_tasks = work.members.values[work.members.starts[:-1]]
    groups = template.tasks[first_tasks, WHERE]
    counts = np.diff(units.set_starts)[groups]
    return _before(counts), int(counts.sum())


def _with_counters(tasks: npt.NDArray[Any], counters: Ints) -> npt.NDArray[Any]:
    found = tasks.copy()
    collective = found[:, KIND] == COLLECTIVE
    found[collective, COUNTER] = counters[found[collective, OTHER]]
    return found
