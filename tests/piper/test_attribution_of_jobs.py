"""Attribution of compiled jobs against an interval-by-interval labelling written from its definition."""

from __future__ import annotations

from itertools import pairwise

import pytest

from piper.predict import Job, predict
from piper.strategy import Strategy
from simulator.plan import COLLECTIVE_KINDS, DevicePlan, Plan, TaskKind
from simulator.timeline.timeline import RankTrack

BUSY = dict.fromkeys((TaskKind.F, TaskKind.B), "compute") | {
    TaskKind.R: "recompute", TaskKind.NORM: "optimizer", TaskKind.UPDATE: "optimizer",
}  # fmt: skip
Instance = tuple[int, int]
"""(step, task)."""


def wire_label(plan: Plan, device: DevicePlan, task: int) -> str:
    kind, group = TaskKind(int(device.tasks.kind[task])), int(device.tasks.group[task])
    reduces = kind in COLLECTIVE_KINDS and not plan.groups[group].name.startswith("tied")
    return "exposed_dp" if reduces else "exposed_pp"


def waited_for(device: DevicePlan, upcoming: Instance) -> set[Instance]:
    """Return all communication that must end before `upcoming` may start."""
    tasks = list(device.tasks)
    on_stream: dict[int, list[int]] = {}
    for number, task in enumerate(tasks):
        on_stream.setdefault(task.stream, []).append(number)
    found: set[Instance] = set()
    pending = [upcoming]
    while pending:
        step, number = pending.pop()
        task = tasks[number]
        row = on_stream[task.stream]
        at = row.index(number)
        before = [(step, wait) for wait in task.waits]
        before += [(step - 1, wait) for wait in task.previous_step_waits]
        before.append((step, row[at - 1]) if at else (step - 1, row[-1]))
        new = {i for i in before if i[0] >= 0 and tasks[i[1]].kind not in BUSY} - found
        found |= new
        pending += new
    return found


def labels(plan: Plan, track: RankTrack, begin: int, end: int) -> dict[str, int]:
    """Return ns by label; every interval between two events is looked at on its own."""
    device = plan.device_plans[track.pipeline_rank]
    kinds = [TaskKind(kind) for kind in device.tasks.kind.tolist()]
    count, steps = len(kinds), len(track.task) // len(kinds)
    columns = (track.dispatch_ns, track.ready_ns, track.start_ns, track.end_ns)
    dispatch, ready, start, stop = (column.tolist() for column in columns)
    events = {t for column in (dispatch, ready, start, stop) for t in column if begin < t < end}
    computes = [(step, i) for step in range(steps) for i in range(count) if kinds[i] in BUSY]
    computes.append((steps, computes[0][1]))
    needs = {instance: waited_for(device, instance) for instance in computes}

    def label(at: int) -> str:
        step, task = upcoming = next(i for i in computes if i[0] == steps or stop[i[0] * count + i[1]] > at)
        number = step * count + task
        if step < steps and start[number] <= at:
            return BUSY[kinds[task]]
        joined = (i for i in range(len(start)) if kinds[i % count] in COLLECTIVE_KINDS)
        if any(ready[i] <= at < start[i] for i in joined):
            return "straggler"
        wires = [s * count + i for s, i in needs[upcoming] if s < steps]
        wires = [i for i in wires if start[i] <= at < stop[i]]
        if wires:
            return wire_label(plan, device, max(wires, key=lambda i: (stop[i], start[i])) % count)
        return "host" if step < steps and at < dispatch[number] else "bubble"

    found: dict[str, int] = {}
    for at, until in pairwise(sorted({begin, end} | events)):
        found[label(at)] = found.get(label(at), 0) + until - at
    return found


@pytest.mark.parametrize(
    ("strategy", "gpus", "global_batch", "clip_grad_norm"),
    [
        ("pp=4,dp=3,zero=1,recompute=full,micro_batch=2", 12, 15, 1.0),
        ("pp=5,dp=2,schedule=gpipe,micro_batch=3", 10, 14, None),
        ("pp=3,dp=5,zero=1,schedule=gpipe,recompute=full", 15, 20, None),
        ("pp=1,dp=8,micro_batch=2", 8, 40, 1.0),
    ],
)
def test_every_instant_has_the_label_of_the_definition(
    strategy: str, gpus: int, global_batch: int, clip_grad_norm: float | None
) -> None:
    job = Job(
        model="tiny-llama", strategy=Strategy.parse(strategy), gpus=gpus, global_batch=global_batch,
        clip_grad_norm=clip_grad_norm,
    )  # fmt: skip
    prediction = predict(job)
    assert prediction.compiled is not None
    timeline, result = prediction.timeline, prediction.result
    by_rank = [labels(prediction.compiled.plan, track, *timeline.window_ns) for track in timeline.tracks]
    for part, seconds in result["breakdown_s"].items():
        mean_ns = sum(found.get(part, 0) for found in by_rank) / len(by_rank)
        assert seconds == pytest.approx(mean_ns / 1e9, rel=1e-12, abs=1e-15), part
    busy_s = [sum(found.get(part, 0) for part in set(BUSY.values())) / 1e9 for found in by_rank]
    assert [row["busy_s"] for row in result["ranks"]] == pytest.approx(busy_s)
