"""Numbers of a plan that point at something must point at something that exists; its facts must be counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from simulator.plan.buffers import MemoryClass
from simulator.plan.mesh import GROUP_AXES
from simulator.plan.plan import TASK_COLUMNS, DevicePlan, IndexLists, Plan
from simulator.plan.task import COLLECTIVE_KINDS, COMPUTE_KINDS, NONE, RECV_KINDS, SEND_KINDS, TaskKind

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One number that points nowhere or counts nothing: its place as a path, the value, what it must be."""

    place: str
    value: int | str
    rule: str


def faults(plan: Plan) -> Iterator[Fault]:
    """Yield every index of `plan` that is out of range, and tables whose columns differ in length.

    A device plan with ragged columns yields that alone: nothing else can be said about it.
    """
    yield from _rank_faults(plan)
    if plan.device_plans:
        yield from _mesh_faults(plan)
    yield from _fact_faults(plan)
    yield from _model_faults(plan)
    yield from _group_faults(plan)
    for number, device in enumerate(plan.device_plans):
        place = f"device_plans[{number}]"
        ragged = list(_ragged(device, place))
        yield from ragged
        if not ragged:
            yield from _device_faults(plan, device, place)


def _mesh_faults(plan: Plan) -> Iterator[Fault]:
    """Yield meshes of single devices that are none of their ranks, or whose replicas share sequences."""
    for number, device in enumerate(plan.device_plans):
        place = f"device_plans[{number}].mesh.axes"
        if device.mesh is None:
            continue
        names = [name for name, _ in device.mesh.axes]
        sizes = ", ".join(f"{name} {size}" for name, size in device.mesh.axes)
        if not set(names) <= {"tp", "cp", "dp"} or len(set(names)) < len(names):
            yield Fault(place=place, value=sizes, rule="must name tp, cp and dp, each at most once")
        elif min((size for _, size in device.mesh.axes), default=1) < 1:
            yield Fault(place=place, value=sizes, rule="must be >= 1")
        elif device.mesh.num_ranks != plan.replicas:
            rule = f"must be the {plan.replicas} ranks that share a device plan"
            yield Fault(place=place, value=sizes, rule=rule)
        else:
            dp = device.mesh.size("dp")
            for size in plan.training.micro_batch_sizes:
                if size * plan.mesh.size("dp") % dp:
                    rule = f"must divide a microbatch of {size} x {plan.mesh.size('dp')} sequences"
                    yield Fault(place=f"{place}.dp", value=dp, rule=rule)


def _fact_faults(plan: Plan) -> Iterator[Fault]:
    training = plan.training
    for name in ("seq_len", "global_batch"):
        if getattr(training, name) < 1:
            yield Fault(place=f"training.{name}", value=getattr(training, name), rule="must be >= 1")
    for number, size in enumerate(training.micro_batch_sizes):
        if size < 1:
            yield Fault(place=f"training.micro_batch_sizes[{number}]", value=size, rule="must be >= 1")
    replica_batch = sum(training.micro_batch_sizes)
    if replica_batch * plan.batch_shares != training.global_batch:
        rule = f"must be {plan.batch_shares} replicas x {replica_batch} sequences in their microbatches"
        yield Fault(place="training.global_batch", value=training.global_batch, rule=rule)
    for field in fields(plan.model):
        value = getattr(plan.model, field.name)
        if isinstance(value, int) and value < 0:
            yield Fault(place=f"model.{field.name}", value=value, rule="must be >= 0")


def _model_faults(plan: Plan) -> Iterator[Fault]:
    outputs = [len(segment.outputs) for segment in plan.segments]
    num_stages = _num_stages(plan)
    for number, segment in enumerate(plan.segments):
        place = f"segments[{number}]"
        if not 0 <= segment.stage < num_stages:
            yield _outside(f"{place}.stage", segment.stage, num_stages)
        for producer, output in segment.inputs:
            if producer != NONE and not (0 <= producer < number and 0 <= output < outputs[producer]):
                rule = "must be an output of an earlier segment"
                yield Fault(place=f"{place}.inputs", value=f"[{producer}, {output}]", rule=rule)
    for number, edge in enumerate(plan.edges):
        place = f"edges[{number}]"
        for name in ("source_stage", "target_stage"):
            if not 0 <= getattr(edge, name) < num_stages:
                yield _outside(f"{place}.{name}", getattr(edge, name), num_stages)
        for producer, output in (*edge.values, *edge.grad_values):
            if not (0 <= producer < len(outputs) and 0 <= output < outputs[producer]):
                rule = "must be an output of a segment"
                yield Fault(place=f"{place}.values", value=f"[{producer}, {output}]", rule=rule)


def _group_faults(plan: Plan) -> Iterator[Fault]:
    for number, group in enumerate(plan.groups):
        place = f"groups[{number}]"
        ranks = [rank for member in group.members for rank in member]
        if group.axis not in GROUP_AXES:
            rule = f"must be one of {', '.join(GROUP_AXES)}"
            yield Fault(place=f"{place}.axis", value=group.axis, rule=rule)
        if not group.members or {len(member) for member in group.members} != {len(group.members[0])}:
            yield Fault(place=f"{place}.members", value=group.name, rule="must be sets of one size")
        if len(set(ranks)) < len(ranks):
            yield Fault(place=f"{place}.members", value=group.name, rule="must be disjoint")
        for rank in ranks:
            if not 0 <= rank < plan.num_ranks:
                yield _outside(f"{place}.members", rank, plan.num_ranks)
        for rank in group.pipeline_ranks:
            if not 0 <= rank < plan.num_pipeline_ranks:
                yield _outside(f"{place}.pipeline_ranks", rank, plan.num_pipeline_ranks)


def _rank_faults(plan: Plan) -> Iterator[Fault]:
    for name, size in plan.mesh.axes:
        if size < 1:
            yield Fault(place=f"mesh.axes.{name}", value=size, rule="must be >= 1")
    if plan.mesh.size("pp") != plan.num_pipeline_ranks:
        rule = f"must be the number of device plans, {plan.num_pipeline_ranks}"
        yield Fault(place="mesh.axes.pp", value=plan.mesh.size("pp"), rule=rule)
    stages: set[int] = set()
    for number, device in enumerate(plan.device_plans):
        if device.pipeline_rank != number:
            place = f"device_plans[{number}].pipeline_rank"
            yield Fault(place=place, value=device.pipeline_rank, rule=f"must be {number}")
        if len(set(device.stages)) < len(device.stages):
            shown = ", ".join(map(str, device.stages))
            yield Fault(place=f"device_plans[{number}].stages", value=shown, rule="must differ")
        stages.update(device.stages)
    if sorted(stages) != list(range(len(stages))):
        shown = ", ".join(map(str, sorted(stages)))
        yield Fault(place="device_plans.stages", value=shown, rule="must be 0, 1, ... without gaps")


def _ragged(device: DevicePlan, place: str) -> Iterator[Fault]:
    num_tasks, num_buffers = len(device.tasks), len(device.buffers.size_bytes)
    for name in TASK_COLUMNS:
        column = getattr(device.tasks, name)
        rows = len(column.starts) - 1 if isinstance(column, IndexLists) else len(column)
        if rows != num_tasks:
            rule = f"must have one entry per task ({num_tasks})"
            yield Fault(place=f"{place}.tasks.{name}", value=rows, rule=rule)
    for name in ("memory_class", "persistent", "owner", "microbatch"):
        rows = len(getattr(device.buffers, name))
        if rows != num_buffers:
            rule = f"must have one entry per buffer ({num_buffers})"
            yield Fault(place=f"{place}.buffers.{name}", value=rows, rule=rule)


def _device_faults(plan: Plan, device: DevicePlan, place: str) -> Iterator[Fault]:
    table, num_tasks, num_buffers = device.tasks, len(device.tasks), len(device.buffers.size_bytes)
    segments, stages = len(plan.segments), _num_stages(plan)
    limits: dict[str, tuple[int, int]] = {
        "kind": (0, len(TaskKind)),
        "stage": (NONE, stages),
        "microbatch": (NONE, plan.training.num_microbatches),
        "first_segment": (NONE, segments),
        "last_segment": (NONE, segments),
        "part": (NONE, max(segments, len(plan.edges))),
        "phase": (NONE, TaskKind.R + 1),
        "stream": (0, len(device.streams)),
        "work": (NONE, len(plan.works)),
        "peer": (NONE, plan.num_pipeline_ranks),
        "edge": (NONE, len(plan.edges)),
        "group": (NONE, len(plan.groups)),
        "bucket": (NONE, len(device.buckets)),
    }
    for name, (low, high) in limits.items():
        yield from _outside_rows(getattr(table, name), (low, high), f"{place}.tasks.{name}")
    yield from _rows(table.size_bytes, table.size_bytes < 0, f"{place}.tasks.size_bytes", "must be >= 0")
    for name in ("waits", "previous_step_waits"):
        yield from _outside_rows(getattr(table, name).values, (0, num_tasks), f"{place}.tasks.{name}.values")
    for name in ("allocates", "reads", "frees"):
        yield from _outside_rows(
            getattr(table, name).values, (0, num_buffers), f"{place}.tasks.{name}.values"
        )
    yield from _needed_faults(device, f"{place}.tasks")
    sizes, classes = device.buffers.size_bytes, device.buffers.memory_class.astype(np.int64)
    yield from _rows(sizes, sizes < 0, f"{place}.buffers.size_bytes", "must be >= 0")
    yield from _outside_rows(classes, (0, len(MemoryClass)), f"{place}.buffers.memory_class")
    for name, bounds in {
        "owner": (0, len(device.buffers.labels)),
        "microbatch": (NONE, plan.training.num_microbatches),
    }.items():
        yield from _outside_rows(getattr(device.buffers, name), bounds, f"{place}.buffers.{name}")
    for number, bucket in enumerate(device.buckets):
        if not NONE <= bucket.group < len(plan.groups):
            yield _outside(f"{place}.buckets[{number}].group", bucket.group, len(plan.groups))
        if bucket.stage not in device.stages:
            rule = "must be a stage of this device plan"
            yield Fault(place=f"{place}.buckets[{number}].stage", value=bucket.stage, rule=rule)
    yield from _stream_rule_faults(device, f"{place}.stream_rules")


def _stream_rule_faults(device: DevicePlan, place: str) -> Iterator[Fault]:
    ruled: set[int] = set()
    for number, rule in enumerate(device.stream_rules):
        if not 0 <= rule.stream < len(device.streams):
            yield _outside(f"{place}[{number}].stream", rule.stream, len(device.streams))
        if rule.stream in ruled:
            once = "must have one rule at most"
            yield Fault(place=f"{place}[{number}].stream", value=rule.stream, rule=once)
        if rule.sms is not None and rule.sms < 1:
            yield Fault(place=f"{place}[{number}].sms", value=rule.sms, rule="must be >= 1")
        ruled.add(rule.stream)


def _needed_faults(device: DevicePlan, place: str) -> Iterator[Fault]:
    """Yield fields that a task of its kind cannot do without."""
    table = device.tasks
    transfer = np.isin(table.kind, list(SEND_KINDS | RECV_KINDS))
    passes = np.isin(table.kind, list(COMPUTE_KINDS - {TaskKind.NORM, TaskKind.UPDATE}))
    needs = {
        "peer": transfer,
        "edge": transfer,
        "microbatch": transfer | passes,
        "stage": passes,
        "first_segment": passes,
        "last_segment": passes,
        "group": np.isin(table.kind, list(COLLECTIVE_KINDS)),
    }
    for name, needed in needs.items():
        column = getattr(table, name)
        yield from _rows(
            column, needed & (column == NONE), f"{place}.{name}", "is needed by a task of this kind"
        )
    own = transfer & (table.peer == device.pipeline_rank)
    yield from _rows(table.peer, own, f"{place}.peer", "must be another pipeline rank")
    backwards = passes & (table.first_segment > table.last_segment)
    yield from _rows(table.first_segment, backwards, f"{place}.first_segment", "must be <= last_segment")


def _num_stages(plan: Plan) -> int:
    return len({stage for device in plan.device_plans for stage in device.stages})


def _outside(place: str, value: int, limit: int) -> Fault:
    return Fault(
        place=place, value=value, rule=f"must be in 0..{limit - 1}" if limit else "points at nothing"
    )


def _outside_rows(column: Column, bounds: tuple[int, int], place: str) -> Iterator[Fault]:
    low, high = bounds
    rule = f"must be in {low}..{high - 1}" if high > low else "points at nothing"
    yield from _rows(column, (column < low) | (column >= high), place, rule)


def _rows(column: Column, bad: npt.NDArray[np.bool_], place: str, rule: str) -> Iterator[Fault]:  # noqa: PLR0917
    for index in np.flatnonzero(bad).tolist():
        yield Fault(place=f"{place}[{index}]", value=int(column[index]), rule=rule)
