"""Time in which a device waits for its host: once per pass of a stage, and once per step.

A framework synchronises where a pass begins (it received an activation, or reads the loss) and where a step
does (data, logging). The first task of a pass, and the first update of a step, last longer by that.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cost_models.price import CostModel
from simulator.plan import Plan, TaskKind
from simulator.plan.plan import TaskTable
from simulator.pricing import whole_ns

_PASSES = (TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.BW)


def overheads_ns(plan: Plan, cost_model: CostModel) -> npt.NDArray[np.int64]:
    """Return what every task lasts longer, int64 [tasks], device plan by device plan."""
    of_pass = whole_ns(cost_model.pass_wait_s, of="pass")
    of_step = whole_ns(cost_model.step_wait_s, of="step")
    if not of_pass and not of_step:
        return np.zeros(sum(len(device.tasks) for device in plan.device_plans), dtype=np.int64)
    passes, updates = first_tasks(plan)
    return passes * of_pass + updates * of_step


def first_tasks(plan: Plan) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return which tasks begin a pass, and which is a device's first update: bool [tasks] each."""
    passes, updates = [], []
    for device in plan.device_plans:
        tasks = device.tasks
        begins, updating = np.zeros(len(tasks), dtype=np.bool_), np.zeros(len(tasks), dtype=np.bool_)
        begins[_first_of_passes(tasks)] = True
        updating[np.flatnonzero(tasks.kind == TaskKind.UPDATE)[:1]] = True
        passes.append(begins)
        updates.append(updating)
    return np.concatenate(passes), np.concatenate(updates)


def _first_of_passes(tasks: TaskTable) -> npt.NDArray[np.int64]:
    listed = np.flatnonzero(np.isin(tasks.kind, [int(kind) for kind in _PASSES]))
    keys = np.stack([tasks.kind[listed], tasks.stage[listed], tasks.microbatch[listed]], axis=1)
    _, first = np.unique(keys, axis=0, return_index=True)
    return listed[first]
