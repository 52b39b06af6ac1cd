"""Tasks per second of the engines, over growing steps, beside a pass in plain Python.

The step is that of Llama-3-70B on 4 pipeline ranks with 64 microbatches, repeated on the same streams until
it has as many tasks as asked for. Times are those of the core, the shortest of three runs: the first one also
pays for fresh memory. The pass in plain Python takes tasks in topological order, by hand. Without contention,
but for `rows_contention`: the job that is also cut by tp=8, in which most tasks communicate, where links,
processors and memory bandwidth are shared.

End to end: from the plan to the text of `piper simulate --json`, of that job and of one that is also cut by
tp=8 with its sequence, whose collectives make it 73 times as many tasks.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from piper.predict import Job, compile_job
from piper.strategy import Strategy
from simulator import build_workload, simulate, summarize
from simulator.engines import load_engine
from simulator.plan import NONE, IndexLists
from simulator.workload import Workload

Ints = npt.NDArray[np.int64]


def job(strategy: str, gpus: int) -> Job:
    """Return Llama-3-70B with 64 microbatches."""
    parsed = Strategy.parse(strategy, where="engine_speed")
    return Job(model="llama3-70b", gpus=gpus, global_batch=64, strategy=parsed)


JOB, LARGE_JOB = job("pp=4", 4), job("tp=8,pp=4", 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="to 10^6 tasks")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    sizes, repeats = ((10**5, 10**6) if options.quick else (10**5, 10**6, 10**7)), 3
    compiled = compile_job(JOB)
    work = build_workload(compiled.plan, compiled.cost_model, contention=False)
    large = compile_job(LARGE_JOB)
    shared = build_workload(large.plan, large.cost_model)
    for some in (work, shared):
        one_step("fast", some)  # compiles, or loads what was compiled
    rows = [growing(repeated(work, size), repeats) for size in sizes]
    rows_contention = [growing(repeated(shared, size), repeats) for size in sizes]
    small = repeated(work, sizes[0])
    reference_s, expected = shortest(lambda: one_step("reference", small), repeats)
    python_s, by_hand = shortest(lambda: PlainPass(small).run(), repeats)
    if not expected == by_hand == one_step("fast", small):
        raise SystemExit("the engines and the pass in plain Python disagree")
    found = {
        "benchmark": "engine_speed",
        "repeats": repeats,
        "rows": rows,
        "tasks_per_s": rows[-1]["tasks_per_s"],
        "rows_contention": rows_contention,
        "tasks_per_s_contention": rows_contention[-1]["tasks_per_s"],
        "growth_per_task_contention": rows_contention[0]["tasks_per_s"] / rows_contention[-1]["tasks_per_s"],
        "reference_tasks_per_s": small.num_tasks / reference_s,
        "python_pass_tasks_per_s": small.num_tasks / python_s,
        "growth_per_task": rows[0]["tasks_per_s"] / rows[-1]["tasks_per_s"],
        "bytes_per_task": rows[-1]["bytes_per_task"],
        "after_pricing_s": after_pricing(compiled, work, repeats),
        "end_to_end": [end_to_end(job, repeats) for job in (JOB, LARGE_JOB)],
    }
    if not options.json:
        for name, value in found.items():
            print(name, value)
    print(json.dumps(found))


def growing(work: Workload, repeats: int) -> dict[str, Any]:
    """Return the speed of the fast engine on one step, and the memory that it takes for itself."""
    seconds, _ = shortest(lambda: one_step("fast", work), repeats)
    tracemalloc.start()
    one_step("fast", work)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "tasks": work.num_tasks,
        "tasks_per_s": work.num_tasks / seconds,
        "bytes_per_task": peak_bytes / work.num_tasks,
    }


def one_step(engine: str, work: Workload) -> int:
    """Run one step and return its end in ns."""
    return int(load_engine(engine)(work, max_steps=1, settled=lambda _: True).step_end_ns[0])


def after_pricing(compiled: Any, work: Workload, repeats: int) -> float:
    """Return the seconds from a priced step to its whole result: engine, memory, attribution, summary."""
    plan, cost_model = compiled.plan, compiled.cost_model

    def run() -> dict[str, Any]:
        timeline = simulate(plan, cost_model, workload=work, engine="fast")
        return summarize(plan, timeline, cost_model, workload=work)

    return shortest(run, repeats)[0]


def end_to_end(job: Job, repeats: int) -> dict[str, Any]:
    """Return the seconds from a plan to its result as text, and which of them come after pricing."""
    compiled = compile_job(job)
    plan, cost_model = compiled.plan, compiled.cost_model
    work = build_workload(plan, cost_model)

    def run() -> str:
        priced = build_workload(plan, cost_model)
        timeline = simulate(plan, cost_model, workload=priced, engine="fast")
        return json.dumps(summarize(plan, timeline, cost_model, workload=priced))

    return {
        "strategy": plan.strategy,
        "tasks": work.num_tasks,
        "end_to_end_s": shortest(run, repeats)[0],
        "after_pricing_s": after_pricing(compiled, work, repeats),
    }


def repeated(work: Workload, num_tasks: int) -> Workload:
    """Return a step in which every device does its tasks again and again, at least `num_tasks` in all."""
    copies = -(-num_tasks // work.num_tasks)
    starts, sizes = work.device_starts, np.diff(work.device_starts)
    device = np.repeat(np.arange(work.num_devices), sizes)
    origin = np.concatenate([np.tile(np.arange(a, b), copies) for a, b in pairwise(starts.tolist())])
    copy = np.concatenate([np.repeat(np.arange(copies), size) for size in sizes])

    def moved(task: Ints, at: Ints) -> Ints:
        return (copies - 1) * starts[device[task]] + at * sizes[device[task]] + task

    def lists(rows: IndexLists) -> IndexLists:
        lengths = np.diff(rows.starts)[origin]
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        place = np.arange(first[-1]) - np.repeat(first[:-1] - rows.starts[origin], lengths)
        value, at = rows.values[place], np.repeat(copy, lengths)
        before = value < 0  # a task of the time before: of the copy before, or of the step before
        task, at = np.where(before, value + work.num_tasks, value), at - before
        found = moved(task, np.where(at < 0, copies - 1, at))
        return IndexLists(starts=first, values=np.where(at < 0, found - copies * work.num_tasks, found))

    sharing = work.sharing and replace(work.sharing, processors=work.sharing.processors[origin])

    members, number = work.members, len(work.members.starts) - 1
    at = np.repeat(np.arange(copies), len(members.values))
    partner, collective = work.partner[origin], work.collective[origin]
    columns = ("is_compute", "is_host_copy", "stream", "duration_ns", "launch_ns", "host_ns", "is_send")
    return replace(
        work,
        device_starts=starts * copies,
        waits=lists(work.waits),
        previous_step_waits=lists(work.previous_step_waits),
        host_waits=lists(work.host_waits),
        sharing=sharing,
        partner=np.where(partner == NONE, NONE, moved(partner, copy)),
        collective=np.where(collective == NONE, NONE, collective + copy * number),
        members=IndexLists(
            starts=np.concatenate(
                [np.zeros(1, np.int64), np.cumsum(np.tile(np.diff(members.starts), copies))]
            ),
            values=moved(np.tile(members.values, copies), at),
        ),
        codes=(),
        **{name: getattr(work, name)[origin] for name in (*columns, "eager", "price")},
    )


class PlainPass:
    """Tasks in topological order: lists, integers, nothing else."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.durations, self.launches = work.duration_ns.tolist(), work.launch_ns.tolist()
        self.hosts, self.begun = work.host_ns.tolist(), _begun(work)
        self.is_compute, self.eager, self.is_send = (
            column.tolist() for column in (work.is_compute, work.eager, work.is_send)
        )
        self.partner, self.collective = work.partner.tolist(), work.collective.tolist()
        self.members = work.members.to_rows()
        self.before = work.waits.to_rows()
        last: dict[int, int] = {}
        for task, stream in enumerate(work.stream.tolist()):
            if stream in last:
                self.before[task].append(last[stream])
            last[stream] = task
        self.ready, self.joined = [0] * work.num_tasks, [NONE] * work.num_tasks

    def run(self) -> int:
        """Return the end of one step."""
        missing, later = [len(row) for row in self.before], [[] for _ in self.before]
        for task, row in enumerate(self.before):
            for wait in row:
                later[wait].append(task)
        todo = [task for task, count in enumerate(missing) if not count]
        makespan = 0
        while todo:
            for task, end in self.ends(todo.pop()):
                makespan = max(makespan, end)
                for after in later[task]:
                    self.ready[after] = max(self.ready[after], end)
                    missing[after] -= 1
                    if not missing[after]:
                        todo.append(after)
        return makespan

    def ends(self, task: int) -> list[tuple[int, int]]:
        """Return (task, end) of what is known to end once `task` is ready."""
        dispatch = self.begun[task] + self.hosts[task]
        if self.is_compute[task]:
            start = max(self.ready[task], self.begun[task] + self.launches[task])
            return [(task, max(start + self.durations[task], dispatch))]
        self.joined[task] = joined = max(self.ready[task], dispatch)
        if self.partner[task] != NONE:
            return self.transfer_ends(task, self.partner[task])
        if self.collective[task] == NONE:
            return [(task, joined + self.durations[task])]
        return self.ends_together(self.members[self.collective[task]])

    def transfer_ends(self, task: int, other: int) -> list[tuple[int, int]]:
        """Return what ends when one end of a transfer has joined."""
        if not self.eager[task]:
            return self.ends_together([task, other])
        send, recv = (task, other) if self.is_send[task] else (other, task)
        sent = [(send, self.joined[send] + self.durations[send])] if task == send else []
        if self.joined[other] == NONE:
            return sent
        end = max(self.joined[recv], self.joined[send] + self.durations[recv])
        return [*sent, (recv, end)]

    def ends_together(self, tasks: list[int]) -> list[tuple[int, int]]:
        """Return the ends of tasks that start with the last of them, once all have joined."""
        joined = [self.joined[task] for task in tasks]
        if NONE in joined:
            return []
        start = max(joined)
        return [(task, start + self.durations[task]) for task in tasks]


def _begun(work: Workload) -> list[int]:
    """Return when the host begins to launch every task."""
    hosts = [work.host_ns[first:last] for first, last in pairwise(work.device_starts.tolist())]
    return [begin for host in hosts for begin in (np.cumsum(host) - host).tolist()]


def shortest(action: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return the shortest time of an action on its core, whatever else runs, and its last result."""
    times, result = [], None
    for _ in range(repeats):
        start = time.process_time()
        result = action()
        times.append(time.process_time() - start)
    return min(times), result


if __name__ == "__main__":
    main()
