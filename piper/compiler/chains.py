"""Collectives of a bucket around the compute tasks that use it: gathers before, reductions after.

[Note: bucket runs]
A bucket whose parameters are cut (ZeRO-3) is gathered before the compute tasks that need it, and freed after
them; a bucket whose gradients are cut (ZeRO-2, 3), or are reduced microbatch by microbatch, is reduced after
the backward tasks that make them. Consecutive compute tasks of the device with one bucket are one run: they
share one gather or one reduction. So a pipeline that takes several microbatches one after another through
a bucket communicates once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cost_models.ops import DTYPE_BYTES
from piper.compiler.blocks import BEFORE, LANES, REDUCE
from piper.compiler.columns import Numbers
from piper.compiler.emission import Emission
from piper.compiler.liveness import Buffer
from piper.compiler.static import bucket_message_bytes
from piper.errors import StrategyError
from piper.graph import Node
from piper.graph.buckets import rule_of
from simulator.plan import COMPUTE_KINDS, NONE, Bucket, MemoryClass, TaskKind

_BRINGING = frozenset({TaskKind.ALL_GATHER, TaskKind.RELOAD})
"""What brings parameters before their use."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Uses:
    """Compute tasks that use a bucket, in the order of the device: int64 [uses] each."""

    compute: Numbers
    tasks: Numbers
    microbatches: Numbers
    segments: Numbers
    phases: Numbers

    def runs(self, *, whole_step: bool = False) -> tuple[Numbers, Numbers]:
        """Return the index of the first and of the last use of every run."""
        gaps = np.flatnonzero(np.diff(self.compute) != 1)
        breaks = gaps[:0] if whole_step else gaps
        return np.r_[0, breaks + 1], np.r_[breaks, len(self.compute) - 1]


@dataclass(kw_only=True)
class _Gathers:
    """Runs of all buckets, to bound how many are gathered at one time."""

    first: list[Numbers] = field(default_factory=list)
    last: list[Numbers] = field(default_factory=list)
    tasks: list[Numbers] = field(default_factory=list)

    def add(self, uses: _Uses, runs: tuple[Numbers, Numbers], tasks: Numbers) -> None:
        """Add the runs of one bucket, (first, last) use of each, and their gathers."""
        self.first.append(uses.compute[runs[0]])
        self.last.append(uses.compute[runs[1]])
        self.tasks.append(tasks)


def add_chains(emission: Emission) -> None:
    """Add the gathers and reductions that run with the microbatches."""
    gathers = _Gathers()
    for name, nodes in _by_bucket(emission.templates.own).items():
        bucket = emission.buckets[emission.bucket_number[name]]
        for together in _brought_together(nodes):
            node = together[0]
            targets = [edge.target for one in together for edge in emission.graph.outgoing.get(one.uid, ())]
            uses = _uses(emission, targets)
            if uses is not None:
                found = _add_gather(emission, uses, bucket=bucket, node=node)
                if node.kind is TaskKind.ALL_GATHER:
                    gathers.add(uses, *found)
        reductions = [n for n in nodes if n.kind not in _BRINGING]
        if reductions:
            sources = [edge.source for edge in emission.graph.incoming.get(reductions[0].uid, ())]
            uses = _uses(emission, sources)
            if uses is not None:
                _add_reductions(emission, uses, bucket=bucket, nodes=reductions)
    _bound(emission, gathers)


def _by_bucket(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for node in nodes:
        if node.bucket and node.per_microbatch:
            found.setdefault(node.bucket, []).append(node)
    return found


def _brought_together(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the nodes that bring a bucket, gathers as one: a backward right after its forward needs none."""
    gathers = [n for n in nodes if n.kind is TaskKind.ALL_GATHER]
    gathers.sort(key=lambda n: n.phase is not TaskKind.F)
    reloads = [[n] for n in nodes if n.kind in _BRINGING and n.kind is not TaskKind.ALL_GATHER]
    return [gathers, *reloads] if gathers else reloads


def _uses(emission: Emission, uids: Sequence[str]) -> _Uses | None:
    """Return the compute tasks of some templates in order; None where the step has none."""
    found = [
        (emission.graph.node[uid], instances)
        for uid in dict.fromkeys(uids)
        if emission.graph.node[uid].kind in COMPUTE_KINDS
        for instances in emission.instances.get(uid, ())
    ]
    if not found:
        return None
    compute = np.concatenate([i.compute for _, i in found])
    order = np.argsort(compute, kind="stable")
    sizes = [len(i.tasks) for _, i in found]
    return _Uses(
        compute=compute[order],
        tasks=np.concatenate([i.tasks for _, i in found])[order],
        microbatches=np.concatenate([i.microbatches for _, i in found])[order],
        segments=np.repeat([node.first_segment for node, _ in found], sizes)[order],
        phases=np.repeat([int(node.kind) for node, _ in found], sizes)[order],
    )


def _add_gather(
    emission: Emission, uses: _Uses, *, bucket: Bucket, node: Node
) -> tuple[tuple[Numbers, Numbers], Numbers]:
    """Add one gather per run: dispatched some compute tasks ahead, and not started before these."""
    rule = rule_of(emission.graph, bucket)
    gathers = node.kind is TaskKind.ALL_GATHER
    first, last = uses.runs(whole_step=gathers and not rule.reshard)
    prefetch = (1 if rule.prefetch is None else rule.prefetch) if gathers else node.prefetch
    ahead = np.maximum(uses.compute[first] - prefetch, 0)
    tasks = _add_tasks(emission, uses, first, bucket=bucket, node=node, keys=ahead * LANES + BEFORE)
    gated = ahead > 0
    emission.columns.link("waits", tasks[gated], emission.compute_task[ahead[gated] - 1])
    emission.columns.link("waits", uses.tasks[first], tasks)
    states = emission.graph.state_dtypes
    arriving = DTYPE_BYTES[states.gather] if gathers else states.parameter_bytes(bucket.zero)
    size = bucket.padded_numel * max(DTYPE_BYTES[states.compute], arriving)
    buffers = _add_buffers(
        emission,
        f"{'gathered' if gathers else 'reloaded'} parameters of {bucket.name}",
        size,
        count=len(first),
    )
    emission.columns.link("allocates", tasks, buffers)
    emission.columns.link("reads", uses.tasks, np.repeat(buffers, last - first + 1))
    emission.columns.link("frees", uses.tasks[last], buffers)
    return (first, last), tasks


def _add_reductions(emission: Emission, uses: _Uses, *, bucket: Bucket, nodes: Sequence[Node]) -> None:
    """Add one reduction per run (and what follows it), of gradients that the run makes."""
    first, last = uses.runs()
    states = emission.graph.state_dtypes
    travelling = rule_of(emission.graph, bucket).reduce_dtype or states.reduce
    size = bucket.padded_numel * max(DTYPE_BYTES[states.gradient], DTYPE_BYTES[travelling])
    buffers = _add_buffers(emission, f"gradients of {bucket.name}", size, count=len(first))
    emission.columns.link("allocates", uses.tasks[first], buffers)
    emission.columns.link("reads", uses.tasks, np.repeat(buffers, last - first + 1))
    waited = uses.tasks[last]
    for i, node in enumerate(nodes):
        keys = uses.compute[last] * LANES + REDUCE + i
        tasks = _add_tasks(emission, uses, last, bucket=bucket, node=node, keys=keys)
        emission.columns.link("waits", tasks, waited)
        emission.columns.link("reads", tasks, buffers)
        waited = tasks
    emission.columns.link("frees", waited, buffers)


def _add_tasks(
    emission: Emission, uses: _Uses, served: Numbers, *, bucket: Bucket, node: Node, keys: Numbers
) -> Numbers:
    """Add one collective of a bucket per run; `served`: the use by which each is named."""
    tasks = emission.columns.add(
        {
            "kind": int(node.kind),
            "stage": bucket.stage,
            "microbatch": uses.microbatches[served],
            "part": uses.segments[served],
            "phase": uses.phases[served],
            "stream": emission.stream(node),
            "group": emission.group(node),
            "bucket": emission.bucket_number[bucket.name],
            "size_bytes": bucket_message_bytes(emission.graph, bucket, node),
        },
        keys,
    )
    emission.register(
        node.uid, tasks=tasks, compute=uses.compute[served], microbatches=uses.microbatches[served]
    )
    return tasks


def _add_buffers(emission: Emission, label: str, size_bytes: int, *, count: int) -> Numbers:
    """Add one buffer per run, int64 [runs]."""
    buffer = Buffer(size_bytes=size_bytes, memory_class=MemoryClass.BUCKETS, label=label, touches=())
    return emission.add_buffers([buffer], microbatches=np.full(count, NONE, dtype=np.int64)).ravel()


def _bound(emission: Emission, gathers: _Gathers) -> None:
    """Let a gather wait until one of the pool's buffers is free again."""
    stated = [rule_of(emission.graph, bucket).buffer_pool for bucket in emission.buckets]
    pools = [pool for pool in stated if pool is not None]
    if not pools or not gathers.tasks:
        return
    order, pool = np.argsort(np.concatenate(gathers.first), kind="stable"), min(pools)
    first, last = np.concatenate(gathers.first)[order], np.concatenate(gathers.last)[order]
    tasks = np.concatenate(gathers.tasks)[order]
    if np.any(last[:-pool] >= first[pool:]):
        raise StrategyError(
            where="strategy", field="replicate.buffer_pool", value=pool,
            rule="is less than the buckets that one task needs at the same time",
            fix=f"use at least {pool + 1}",
        )  # fmt: skip
    emission.columns.link("waits", tasks[pool:], emission.compute_task[last[:-pool]])
