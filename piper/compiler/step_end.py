"""The end of the step: reductions once per step, gradient norm, updates, parameters back to the replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cost_models.ops import DTYPE_BYTES
from piper.compiler.blocks import BEFORE, LANES, REDUCE
from piper.compiler.columns import Numbers
from piper.compiler.emission import Emission
from piper.compiler.liveness import Buffer
from piper.compiler.static import bucket_message_bytes
from piper.graph import EdgeKind, Node
from simulator.plan import COLLECTIVE_KINDS, NONE, MemoryClass, TaskKind

AT_THE_END = 2**50
"""Dispatch key of the first task behind all microbatches."""


@dataclass(frozen=True, slots=True)
class _Last:
    """The last task of a template: dispatch key and number."""

    key: int
    task: int


def add_step_end(emission: Emission) -> None:
    """Add the tasks that run once per step, in topological order.

    A collective among the ranks of this pipeline rank is dispatched right after its last source. All that
    concerns several pipeline ranks stands at the end, in one order for all, so that no two wait for each
    other.
    """
    last: dict[str, _Last] = {}
    keys = emission.columns.keys()
    place = emission.templates.place
    own = (node for node in emission.templates.own if not node.per_microbatch)
    for node in sorted(own, key=lambda node: place[node.uid]):
        last[node.uid] = _add(emission, node, last, number=place[node.uid], keys=keys)
    for uid in [uid for uid in last if emission.graph.node[uid].kind is TaskKind.OFFLOAD]:
        _add_reloaded(emission, uid, last)


def _add(emission: Emission, node: Node, last: Mapping[str, _Last], *, number: int, keys: Numbers) -> _Last:
    graph = emission.graph
    before = (e.source for e in graph.incoming.get(node.uid, ()) if e.kind is not EdgeKind.PREVIOUS_STEP)
    found = {uid: last[uid] if uid in last else _last_instance(emission, uid, keys) for uid in before}
    sources = {uid: source for uid, source in found.items() if source is not None}
    key = AT_THE_END + number
    latest_source = max((s.key for s in sources.values()), default=AT_THE_END)
    if node.kind in COLLECTIVE_KINDS and node.group in emission.local_groups and latest_source < AT_THE_END:
        key = latest_source // LANES * LANES + REDUCE
    ahead = emission.layout.num_compute - node.prefetch
    if node.kind is TaskKind.RELOAD:
        key = max(ahead, 0) * LANES + BEFORE
    task = emission.columns.add(_fields(emission, node), np.array([key], dtype=np.int64))
    if node.kind is TaskKind.RELOAD and ahead > 0:
        emission.columns.link("waits", task, emission.compute_task[ahead - 1 : ahead])
    nobody = np.array([NONE], dtype=np.int64)
    emission.register(node.uid, tasks=task, compute=nobody, microbatches=nobody)
    _wait(emission, node, task, sources=sources)
    return _Last(key, int(task[0]))


def _add_reloaded(emission: Emission, offload: str, last: Mapping[str, _Last]) -> None:
    """Add the buffer of what comes from the host for the update, and goes back behind it."""
    graph = emission.graph
    node, reload = graph.node[offload], offload.replace(TaskKind.OFFLOAD.name, TaskKind.RELOAD.name)
    params = node.moves == "params"
    memory_class = MemoryClass.PARAMETERS if params else MemoryClass.OPTIMIZER
    size = bucket_message_bytes(graph, emission.buckets[emission.bucket_number[node.bucket]], node)
    label = f"{memory_class.name.lower()} of {node.bucket} from the host"
    made = Buffer(size_bytes=size, memory_class=memory_class, label=label, touches=())
    buffer = emission.add_buffers([made], microbatches=np.array([NONE], dtype=np.int64)).ravel()
    readers = dict.fromkeys(e.target for e in graph.outgoing[reload])
    readers |= dict.fromkeys(e.source for e in graph.incoming[offload])
    emission.columns.link("allocates", np.array([last[reload].task]), buffer)
    for uid in (*readers, offload):
        emission.columns.link("reads", np.array([last[uid].task]), buffer)
    emission.columns.link("frees", np.array([last[offload].task]), buffer)


def _last_instance(emission: Emission, uid: str, keys: Numbers) -> _Last | None:
    """Return the last task of a template that runs with the microbatches; None where the step has none."""
    tasks = [instances.tasks for instances in emission.instances.get(uid, ())]
    if not tasks:
        return None
    found = np.concatenate(tasks)
    last = int(found[np.lexsort((found, keys[found]))[-1]])
    return _Last(int(keys[last]), last)


def _wait(emission: Emission, node: Node, task: Numbers, *, sources: Mapping[str, _Last]) -> None:
    """Wait for the last source on each other stream."""
    latest: dict[str, _Last] = {}
    for uid, source in sources.items():
        stream = emission.graph.node[uid].stream
        known = latest.get(stream)
        later = known is None or (known.key, known.task) < (source.key, source.task)
        if stream != node.stream and later:
            latest[stream] = source
    waits = np.array([source.task for source in latest.values()], dtype=np.int64)
    emission.columns.link("waits", np.broadcast_to(task, waits.shape), waits)


def _fields(emission: Emission, node: Node) -> dict[str, Numbers | int]:
    fields: dict[str, Numbers | int] = {
        "kind": int(node.kind),
        "stage": node.stage,
        "stream": emission.stream(node),
        "group": emission.group(node),
        "bucket": emission.bucket_number.get(node.bucket, NONE),
        "phase": int(TaskKind.F) if node.moves == "params" else NONE,
    }
    if node.kind is TaskKind.NORM:
        return fields | {"work": emission.templates.works.of_norm(emission.buckets)}
    if not node.bucket:
        return fields | {"size_bytes": DTYPE_BYTES["fp32"]}
    bucket = emission.buckets[emission.bucket_number[node.bucket]]
    if node.kind is TaskKind.UPDATE:
        return fields | {"work": emission.templates.works.of_update(bucket)}
    return fields | {"size_bytes": bucket_message_bytes(emission.graph, bucket, node)}
