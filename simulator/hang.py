"""Hang report: from the state in which no event is left to "who is blocked, and waits for whom"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.plan import NONE
from simulator.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Where every stream stands when nothing can happen any more.

    Args:
        workload: what was run.
        heads: by stream, the instance (step * num_tasks + task) that it could not finish, or NONE.
        end, joined, dispatch: by instance, negative where it has not happened.
    """

    workload: Workload
    heads: Sequence[int]
    end: Sequence[int]
    joined: Sequence[int]
    dispatch: Sequence[int]

    def sentences(self) -> list[str]:
        """Return one sentence per blocked stream, the streams of a circular wait first, in its order."""
        waits = {head: self._waits_for(head) for head in self.heads if head != NONE}
        circle = _circle({head: [self._head_before(i) for i in found] for head, found in waits.items()})
        order = [*circle, *(head for head in waits if head not in circle)]
        return [self._sentence(head, waits[head]) for head in order if waits[head]]

    def _waits_for(self, instance: int) -> list[int]:
        work, task = self.workload, instance % self.workload.num_tasks
        offset = instance - task
        waited = [offset + wait for wait in work.waits.row(task)]
        if offset:
            waited += [offset - work.num_tasks + wait for wait in work.previous_step_waits.row(task)]
        found = [wait for wait in waited if self.end[wait] < 0]
        if found:
            return found
        if self.dispatch[instance] < 0:
            return self._host_waits_for(instance)
        others: tuple[int, ...] = ()
        if work.partner[task] != NONE:
            others = (int(work.partner[task]),)
        elif work.collective[task] != NONE:
            others = work.members.row(int(work.collective[task]))
        return [offset + other for other in others if self.joined[offset + other] < 0]

    def _host_waits_for(self, instance: int) -> list[int]:
        """Return the tasks whose end the host awaits; it has not come to `instance` yet."""
        work, step = self.workload, instance // self.workload.num_tasks
        device = work.device_of(instance % work.num_tasks)
        first, last = work.device_starts[device : device + 2].tolist()
        for at in range(step + 1):
            for task in range(first, last):
                if self.dispatch[at * work.num_tasks + task] < 0:
                    waited = [at * work.num_tasks + wait for wait in work.host_waits.row(task)]
                    return [wait for wait in waited if wait >= 0 and self.end[wait] < 0]
        return []

    def _head_before(self, instance: int) -> int:
        """Return the head of the stream on which `instance` is queued."""
        return self.heads[int(self.workload.stream[instance % self.workload.num_tasks])]

    def _sentence(self, head: int, waited: Sequence[int]) -> str:
        whom = ", ".join(self._awaited(instance) for instance in waited)
        host = "" if self.dispatch[head] >= 0 else " for its host, which waits"
        return f"{self._name(head)} waits{host} for {whom}"

    def _awaited(self, instance: int) -> str:
        before = self._head_before(instance)
        behind = "" if before == instance else f" (queued behind {self._name(before)})"
        return f"{self._name(instance)}{behind}"

    def _name(self, instance: int) -> str:
        work, task = self.workload, instance % self.workload.num_tasks
        return f"{work.codes[task]} of pipeline rank {work.pipeline_rank[work.device_of(task)]}"


def _circle(follows: dict[int, list[int]]) -> list[int]:
    """Return the heads of one circular wait, in order; of the first one found."""
    for first in follows:
        path: list[int] = []
        head = first
        while head not in path and follows.get(head):
            path.append(head)
            head = follows[head][0]
        if head in path:
            return path[path.index(head) :]
    return []
