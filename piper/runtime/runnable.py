"""Which plans the runtime can run: what it cannot is refused by name before any process starts."""

from __future__ import annotations

from itertools import pairwise

from piper.errors import JobError
from simulator.plan import (
    COMPUTE_KINDS,
    HOST_COPY_KINDS,
    DevicePlan,
    Plan,
    Region,
    StateDtypes,
    Task,
    TaskKind,
)

_OPTIMIZERS = ("adamw", "sgd", "momentum")
_FLOATS = ("fp32", "bf16", "fp16")


def require_runnable(plan: Plan) -> None:
    """Raise JobError naming what of a plan the runtime does not run; everything else is simulated only."""
    if any(device.mesh is not None for device in plan.device_plans):
        raise _refused("stages with meshes of their own", "use one mesh for all stages")
    _check_cuts(plan)
    _check_states(plan.training.states, StateDtypes.of(plan.training.dtype))
    if plan.training.optimizer not in _OPTIMIZERS:
        raise _refused(f"optimizer={plan.training.optimizer}", "use adamw, momentum or sgd")
    for device in plan.device_plans:
        check_rings(device)
        _check_buckets(device)


def require_runnable_on_gpus(plan: Plan, *, verify: bool) -> None:
    """Raise JobError naming what of a plan runs on CPU processes only."""
    here = "run on CPU processes: --device cpu"
    for device in plan.device_plans:
        kinds = set(device.tasks.kind.tolist())
        if kinds & HOST_COPY_KINDS:
            raise _refused("offload on GPUs", f"use offload=none, or {here}")
        if TaskKind.RING_SHIFT in kinds:
            raise _refused("rings of attention on GPUs", f'use shard_sequence with "all_to_all", or {here}')
    if any(region.asynchronous for region in plan.cuts.regions):
        raise _refused("async_tp on GPUs", f"use async_tp=off, or {here}")
    if verify:
        raise _refused("--verify on GPUs", "compare on CPU processes: --local N, or --device cpu")


def _check_states(states: StateDtypes, usual: StateDtypes) -> None:
    """Refuse what travels or is kept in numbers other than those that sums and parameters are in."""
    for name, value in (("reduce", states.gradient), ("gather", usual.gather), ("shard", usual.shard)):
        found = getattr(states, name)
        if found != value:
            raise _refused(f"{name}_dtype={found}", f"leave {name}_dtype out: here it is {value}")
    for name in ("gradient", "moment"):
        found = getattr(states, name)
        if found not in _FLOATS:
            raise _refused(f"{name}_dtype={found}", f"use one of {', '.join(_FLOATS)}")


def _check_cuts(plan: Plan) -> None:
    """Refuse cuts that ranks cannot make, or for which exchanges are not told apart."""
    whole = {parameter.name: parameter.shape for parameter in plan.parameters}
    for cut in plan.cuts.parameters:
        for axis, dim in cut.dims:
            parts = plan.mesh.size(axis)
            if axis == "tp" and whole[cut.name][dim] % parts:
                what = f"{cut.name} of {whole[cut.name][dim]} rows or columns over {axis}={parts}"
                raise _refused(what, f"use a divisor of {whole[cut.name][dim]} as {axis}")
    for region in plan.cuts.regions:
        _check_sequences(plan, region)
        _check_experts(plan, region)
    for axis in ("tp", "ep", "cp"):
        regions = sorted((r.first, r.last) for r in plan.cuts.regions if r.axis == axis)
        for (_, last), (first, _) in pairwise(regions):
            if first == last + 1:
                raise _refused(
                    f"regions of {axis} side by side at segment {first}",
                    "annotate what lies between them, or one scope around both",
                )


def _check_sequences(plan: Plan, region: Region) -> None:
    """Refuse sequences that cannot be cut into equal pieces."""
    pieces = plan.mesh.size("cp") * (2 if plan.cuts.balanced else 1)
    if region.axis == "tp" and plan.cuts.sequence_parallel:
        pieces = plan.mesh.size("cp") * plan.mesh.size("tp")
    seq_len = plan.training.seq_len
    if region.axis != "ep" and (region.axis == "cp" or plan.cuts.sequence_parallel) and seq_len % pieces:
        raise _refused(f"seq_len={seq_len} in {pieces} pieces", f"use a multiple of {pieces} as --seq-len")


def _check_experts(plan: Plan, region: Region) -> None:
    """Refuse what the exchange of rows cannot do: it moves rows that are sorted by expert, all of them."""
    if region.axis != "ep":
        return
    if region.tensor_degree > 1:
        raise _refused(f"etp={region.tensor_degree}", "leave etp out: each expert then is on one rank")
    if region.capacity is not None:
        raise _refused(f"capacity={region.capacity}", "leave capacity out: all tokens reach their experts")
    others = {r.degree for r in plan.cuts.regions if r.axis == "ep"} - {region.degree}
    if others:
        raise _refused(f"experts over {region.degree} and over {others.pop()} ranks", "use one degree of ep")
    inside = range(region.first, region.last + 1)
    taken = {value for i in inside for value in plan.segments[i].inputs if value[0] not in inside}
    specs = [plan.segments[value[0]].outputs[value[1]] for value in taken if value[0] >= 0]
    ends = [spec for spec in specs if spec.batch_dim is None and len(spec.shape) == 1]
    rows = {spec.shape[0] for spec in specs if spec.batch_dim is not None}
    if len(ends) != 1 or len(specs) != len(taken) or len(rows) != 1:
        raise _refused(
            f"experts of segment {region.first} without rows sorted by expert",
            "give the annotated experts rows [tokens x top_k, hidden] sorted by expert, and the end of each "
            "expert's rows, [experts]",
        )


def check_rings(device: DevicePlan) -> None:
    """Refuse attention that waits for the end of a ring that cannot end before it: it would wait for ever.

    A ring ends when the attention that it feeds has run; the rings of a stream end in their order.
    """
    tasks = tuple(device.tasks)
    rings = [task for task in tasks if task.kind is TaskKind.RING_SHIFT]
    feeds = {_attention(ring): -1 for ring in rings}
    for place, task in enumerate(tasks):
        if task.kind not in COMPUTE_KINDS:
            continue
        kind = TaskKind.B if task.kind is TaskKind.BI else task.kind
        parts = range(task.first_segment, task.last_segment + 1) if rings else ()
        mine = [(kind, task.stage, task.microbatch, part) for part in parts]
        feeds |= {key: place for key in mine if key in feeds}
        for ring in (tasks[waited] for waited in task.waits if tasks[waited].kind is TaskKind.RING_SHIFT):
            if _attention(ring) in mine:
                what = f"a ring whose buffers {task.kind.name} of segment {ring.part} frees"
                raise _refused(what, "use recompute=full or recompute=none with it")
    for before, ring in pairwise(rings):
        if 0 <= feeds[_attention(ring)] < feeds[_attention(before)] and ring.stream == before.stream:
            what = f"a ring of {_phase(ring)} behind one of {_phase(before)}, which runs later"
            raise _refused(what, "use recompute=none, or a schedule without overlapped passes")


def _attention(ring: Task) -> tuple[int, int, int, int]:
    """Return which pass of which segment a ring feeds."""
    return ring.phase, ring.stage, ring.microbatch, ring.part


def _phase(ring: Task) -> str:
    return f"{TaskKind(ring.phase).name} of segment {ring.part}"


def _check_buckets(device: DevicePlan) -> None:
    for bucket in device.buckets:
        if bucket.kind not in {"dense", "sequence", "expert", "tied"}:
            raise _refused(f"{bucket.kind} buckets", "leave shard out")


def _refused(what: str, fix: str) -> JobError:
    return JobError(
        where="piper run",
        field="what the plan has",
        value=what,
        rule="can be simulated, but not run yet",
        fix=fix,
    )
