"""`Workload`: (Plan, CostModel) -> flat arrays, the single input of every engine.

The tasks of all device plans lie one after another, each device plan in dispatch order; a task's number
here is `device_starts[device] + dispatch position`. Every distinct work, transfer, collective and host copy
is priced once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models.price import CostModel
from simulator import rules
from simulator.errors import PlanError
from simulator.host import host_waits
from simulator.matching import Matching, match_tasks
from simulator.overheads import overheads_ns
from simulator.plan import COMPUTE_KINDS, HOST_COPY_KINDS, NONE, IndexLists, Plan
from simulator.plan.codes import Codes
from simulator.pricing import PriceTable, price_tasks, whole_ns
from simulator.sharing import Sharing
from simulator.sharing.demands import share

Ints = npt.NDArray[np.int64]
COMPUTE_VALUES = np.array(sorted(COMPUTE_KINDS), dtype=np.int64)
HOST_COPY_VALUES = np.array(sorted(HOST_COPY_KINDS), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Everything an engine needs to know, and nothing else.

    Args:
        device_starts: int64 [device plans + 1], first task of each device plan.
        stream_starts: int64 [device plans + 1], first stream of each device plan.
        is_compute: bool [tasks]; not where computations flow over shared cores (`sharing.demands`).
        is_host_copy: bool [tasks], or a computation on shared cores: flows without a peer. What is neither is
            a transfer or a collective.
        stream: int64 [tasks], stream number over all device plans.
        duration_ns: int64 [tasks], device time, or time on the wire, alone at full speed. A meeting (a
            message, a collective) takes that of the task that drives it: the sender, the first member.
        noisy_ns: int64 [steps, tasks], durations that differ from step to step (the last row holds for later
            steps), or None: as `duration_ns` says.
        launch_ns: int64 [tasks], host time until the first kernel is launched.
        host_ns: int64 [tasks], host time until all kernels are launched.
        host_waits: by task, tasks of its device whose end the host awaits before it launches the task; a
            negative number is that of a task of the step before, less the number of tasks.
        waits, previous_step_waits: task numbers by task.
        is_send: bool [tasks].
        partner: int64 [tasks], the other end of a transfer, or NONE.
        eager: bool [tasks], transfers that do not wait for their receive.
        collective: int64 [tasks], number of the collective, or NONE.
        members: task numbers by collective: one per device plan that takes part (replicas are folded).
        price: int64 [tasks], row of `prices`, or NONE (nothing to do).
        prices: what each distinct work, transfer, collective and host copy costs, in seconds, with its
            provenance.
        codes: task codes, for people.
        pipeline_rank: int64 [device plans].
        n_devices: how many ranks share each device plan.
        sharing: what each priced thing holds while it runs, or None: nothing slows anything else.
    """

    device_starts: Ints
    stream_starts: Ints
    is_compute: npt.NDArray[np.bool_]
    is_host_copy: npt.NDArray[np.bool_]
    stream: Ints
    duration_ns: Ints
    launch_ns: Ints
    host_ns: Ints
    host_waits: IndexLists
    waits: IndexLists
    previous_step_waits: IndexLists
    is_send: npt.NDArray[np.bool_]
    partner: Ints
    eager: npt.NDArray[np.bool_]
    collective: Ints
    members: IndexLists
    price: Ints
    prices: PriceTable
    codes: Sequence[str]
    pipeline_rank: Ints
    n_devices: int
    sharing: Sharing | None = None
    noisy_ns: Ints | None = None

    def step_duration_ns(self, step: int) -> Ints:
        """Return the durations of a step, int64 [tasks]."""
        if self.noisy_ns is None:
            return self.duration_ns
        found: Ints = self.noisy_ns[min(step, len(self.noisy_ns) - 1)]
        return found

    @property
    def num_tasks(self) -> int:
        """Return the tasks of one step over all device plans."""
        return len(self.stream)

    @property
    def num_devices(self) -> int:
        """Return the number of device plans."""
        return len(self.device_starts) - 1

    @property
    def num_streams(self) -> int:
        """Return the number of streams over all device plans."""
        return int(self.stream_starts[-1])

    def device_of(self, task: int) -> int:
        """Return the device plan that `task` belongs to."""
        return int(np.searchsorted(self.device_starts, task, side="right")) - 1


def build_workload(plan: Plan, cost_model: CostModel, *, contention: bool = True) -> Workload:
    """Price and match the tasks of `plan`.

    Args:
        plan: what to run.
        cost_model: prices, and what things hold while they run.
        contention: False: nothing slows anything else.
    Raises: IllegalPlanError if a transfer or collective has no counterpart; CostModelError if a price is
        no finite number >= 0; PlanError if the step is longer than 2^62 ns.
    """
    stream_starts = _starts([len(device.streams) for device in plan.device_plans])
    matching = match_tasks(plan)
    device_starts = matching.device_starts
    tables = [device.tasks for device in plan.device_plans]
    kind = np.concatenate([table.kind for table in tables])
    is_compute = np.isin(kind, COMPUTE_VALUES)
    prices, price, questions = price_tasks(plan, cost_model)
    duration = np.where(price == NONE, 0, prices.duration_ns[price]) + overheads_ns(plan, cost_model)
    kernels = np.where(is_compute, np.where(price == NONE, 0, prices.num_kernels[price]), 1)
    stream = np.concatenate([t.stream + first for t, first in zip(tables, stream_starts[:-1], strict=True)])
    sharing = (
        share(
            plan,
            cost_model,
            questions=questions,
            prices=prices,
            price=price,
            stream=stream,
            is_compute=is_compute,
            matching=matching,
        )
        if contention
        else None
    )
    flows = is_compute & (sharing is not None and sharing.by_cores)  # [Note: shared cores]
    workload = Workload(
        device_starts=device_starts,
        stream_starts=stream_starts,
        is_compute=is_compute & ~flows,
        is_host_copy=np.isin(kind, HOST_COPY_VALUES) | flows,
        stream=stream,
        duration_ns=duration,
        launch_ns=_launch_ns(np.minimum(kernels, 1), is_compute, cost_model),
        host_ns=_launch_ns(kernels, is_compute, cost_model),
        host_waits=host_waits(plan, kernels=kernels, stream=stream, cost_model=cost_model),
        waits=_joined([table.waits for table in tables], device_starts),
        previous_step_waits=_joined([table.previous_step_waits for table in tables], device_starts),
        is_send=matching.is_send,
        partner=matching.partner,
        eager=_eager(plan, matching, cost_model),
        collective=matching.collective,
        members=matching.members,
        price=price,
        prices=prices,
        codes=Codes(plan.device_plans),
        pipeline_rank=np.array([device.pipeline_rank for device in plan.device_plans], dtype=np.int64),
        n_devices=plan.replicas,
        sharing=sharing,
    )
    require_in_range(workload, steps=1)
    return workload


def _starts(counts: list[int]) -> Ints:
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _joined(lists: list[IndexLists], firsts: Ints) -> IndexLists:
    """Put the lists of all device plans one after another, with task numbers over all of them."""
    starts, values, offset = [np.zeros(1, dtype=np.int64)], [], 0
    for rows, first in zip(lists, firsts[:-1].tolist(), strict=True):
        starts.append(rows.starts[1:] + offset)
        values.append(rows.values + first)
        offset += len(rows.values)
    return IndexLists(starts=np.concatenate(starts), values=np.concatenate(values))


def _launch_ns(kernels: Ints, is_compute: npt.NDArray[np.bool_], cost_model: CostModel) -> Ints:
    """Return the host time to launch so many kernels of each task."""
    distinct, inverse = np.unique(kernels, return_inverse=True)

    def times(launch_s: float) -> Ints:
        listed = [whole_ns(int(count) * launch_s, of="kernel launch") for count in distinct]
        return np.array(listed, dtype=np.int64)[inverse]

    return np.where(
        is_compute, times(cost_model.launch_overhead_s), times(cost_model.communication_overhead_s)
    )


def _eager(plan: Plan, matching: Matching, cost_model: CostModel) -> npt.NDArray[np.bool_]:
    size = np.concatenate([device.tasks.size_bytes for device in plan.device_plans])
    limit = cost_model.eager_limit_bytes
    eager = np.zeros(len(size), dtype=np.bool_)
    transfers = np.flatnonzero(matching.partner != NONE)
    sizes, inverse = np.unique(size[transfers], return_inverse=True)
    small = [rules.is_eager(bytes_, limit) for bytes_ in sizes.tolist()]
    eager[transfers] = np.array(small, dtype=np.bool_)[inverse]
    return eager


def require_in_range(workload: Workload, *, steps: int) -> None:
    """Refuse steps whose times could pass 2^62 ns: no schedule is longer than all its tasks in a row.

    Raises: PlanError.
    """
    step_ns = float(workload.duration_ns.sum(dtype=np.float64) + workload.host_ns.sum(dtype=np.float64))
    total_ns = steps * step_ns
    if not rules.within_range(total_ns):
        raise PlanError(
            where="workload",
            field="total time" if steps == 1 else f"total time of {steps} steps",
            value=f"{total_ns:.3g} ns",
            rule=f"must be at most 2^62 = {rules.MAX_TIME_NS} ns",
            fix="check the units of the cost model: prices are in seconds",
        )
