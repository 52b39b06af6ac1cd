"""How much longer the computation of a pass takes, at least, because exchanges run beside it.

[Note: exchanges beside computation]
While an exchange runs it holds processors of its device (`simulator.rules`, [Note: spinning kernels]); a
kernel that is bound by processors goes on with what is left of them. An exchange that waits for a kernel of
its pass, and that a later kernel of the pass waits for, can only run beside those between the two, whatever
else happens; the parts of these that are bound by memory or latency may hide it, at most all of it. What is
left of it takes k of P processors from what is bound by them: k / P of its time, or more, is lost; where
nothing computes, all of it. Exchanges of several streams take processors together, and their losses add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from simulator.plan import NONE, DevicePlan, Plan, TaskKind
from simulator.pricing import COLLECTIVE_OF

if TYPE_CHECKING:
    from cost_models.models.cluster import ClusterCostModel
    from cost_models.use import OperationUse

_LEAST_MEMORY = 0.5
"""Of the bandwidth of the memory that computation keeps beside communication (`simulator.rules`)."""


@dataclass(slots=True, kw_only=True)
class Window:
    """Exchanges of one stream, and the kernels that they can only run beside: tasks of a device."""

    exchanges: list[int]
    kernels: list[int]


def windows(tasks: Sequence[int], *, stream: Sequence[int], waits: Sequence[Sequence[int]]) -> list[Window]:
    """Return the windows of the exchanges of a pass: those that lie between kernels, and have some beside.

    Args:
        tasks: of the pass, in the order of dispatch.
        stream, waits: by task of the device.
    """
    kernels = [i for i in tasks if stream[i] == 0]
    place = {task: number for number, task in enumerate(kernels)}
    after = {i: place.get(i, NONE) for i in tasks}
    before = {i: place.get(i, len(kernels)) for i in tasks}
    previous: dict[int, int] = {}
    needs: dict[int, list[int]] = {}
    for i in tasks:
        if i not in place:
            needs[i] = [w for w in (*waits[i], previous.get(stream[i], NONE)) if w in after]
            after[i] = max((after[w] for w in needs[i]), default=NONE)
            previous[stream[i]] = i
    for i in reversed(tasks):
        for w in waits[i] if i in place else needs[i]:
            if w in before and w not in place:
                before[w] = min(before[w], before[i])
    found: dict[int, list[tuple[Window, int]]] = {}
    for i in tasks:
        inside = kernels[after[i] + 1 : before[i]]
        if i in place or after[i] == NONE or before[i] == len(kernels) or not inside:
            continue
        listed = found.setdefault(stream[i], [])
        if listed and after[i] + 1 < listed[-1][1]:
            window = listed[-1][0]
            window.exchanges.append(i)
            window.kernels += [kernel for kernel in inside if kernel not in window.kernels]
            listed[-1] = (window, max(before[i], listed[-1][1]))
        else:
            listed.append((Window(exchanges=[i], kernels=inside), before[i]))
    return [window for listed in found.values() for window, _ in listed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a probe's tasks hold of a device.

    Args:
        plan, cost_model: of the probe.
        sequences: of its microbatch; exchanges count with the processors that those of one sequence hold,
            so that what is lost is no less, in proportion, for smaller microbatches.
    """

    plan: Plan
    cost_model: ClusterCostModel
    sequences: int

    def slowed_ns(
        self,
        device: DevicePlan,
        tasks: Sequence[int],
        *,
        time_ns: Sequence[float],
        waits: Sequence[Sequence[int]],
    ) -> float:
        """Return by how much the computation of a pass is longer than its kernels, at least.

        Args:
            device: of the plan.
            tasks: of the pass, in the order of dispatch.
            time_ns: alone, by task of the device.
            waits: by task of the device.
        """
        machine = self.cost_model.machine(self.plan.num_ranks)
        if machine is None or machine.cores is not None:
            return 0.0
        bandwidth, lost = machine.memory_bytes_per_s, 0.0
        for window in windows(tasks, stream=device.tasks.stream.tolist(), waits=waits):
            held = {i: self._processors(device, i) for i in window.exchanges}
            free = sum(
                self._free_ns(device, i, time_ns[i], memory_bytes_per_s=bandwidth) for i in window.kernels
            )
            taken = sum(time_ns[i] * count for i, count in held.items())
            lost += max(0.0, taken - max(held.values()) * free) / machine.processors
        return lost

    def processor_ns(self, device: DevicePlan, task: int) -> float:
        """Return for how long processors bound a task that computes."""
        return sum(use.processor_s * count for use, count in self._uses(device, task)) * 1e9

    def _uses(self, device: DevicePlan, task: int) -> list[tuple[OperationUse, int]]:
        work = int(device.tasks.work[task])
        operations = self.plan.works[work].operations if work != NONE else ()
        return [(self.cost_model.operation_use(o), o.count) for o in operations]

    def _processors(self, device: DevicePlan, task: int) -> int:
        """Return what an exchange of one sequence holds."""
        table = device.tasks
        group = self.plan.groups[int(table.group[task])]
        use = self.cost_model.collective_use(
            COLLECTIVE_OF[TaskKind(int(table.kind[task]))],
            size_bytes=max(1, int(table.size_bytes[task]) // self.sequences),
            members=np.array(group.members, dtype=np.int64),
            num_ranks=self.plan.num_ranks,
        )
        return use.processors

    def _free_ns(self, device: DevicePlan, task: int, time_ns: float, *, memory_bytes_per_s: float) -> float:
        """Return for how long, at most, a kernel needs no processors; time_ns: alone."""
        uses = self._uses(device, task)
        by_processors = self.processor_ns(device, task)
        by_memory = sum(use.memory_s * count for use, count in uses) * 1e9
        moved = sum(use.memory_bytes * count for use, count in uses)
        need = min(moved / by_memory * 1e9 / memory_bytes_per_s, 1.0) if by_memory else 0.0
        return max(0.0, time_ns - by_processors - by_memory) + by_memory * max(1.0, need / _LEAST_MEMORY)
