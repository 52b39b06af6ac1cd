"""The tasks of all microbatches of a device: templates times microbatches, placed by the order row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from piper.compiler.blocks import BEFORE, COMPUTE, LANES, BlockKey
from piper.compiler.columns import Numbers
from piper.compiler.emission import Emission
from piper.compiler.receives import Transfers
from piper.compiler.templates import KindTemplate
from simulator.plan import RECV_KINDS, SEND_KINDS, TaskKind

_TRANSFERS = SEND_KINDS | RECV_KINDS


def add_microbatches(emission: Emission) -> None:
    """Add the tasks, waits and buffers of every microbatch of the device."""
    for (size, keys), microbatches in _kinds(emission).items():
        template = emission.templates.kind(size, keys)
        _add(emission, template, keys, microbatches=np.array(microbatches, dtype=np.int64))
    for tasks, ahead in emission.ahead:
        emission.columns.link("waits", tasks, emission.compute_task[ahead - 1])


def _ahead(template: KindTemplate, compute: Numbers) -> dict[int, Numbers]:
    """Return, by row of a copy to the device, the compute numbers before which it is dispatched.

    So many compute tasks ahead of its use as it states, but behind the copy to the host.
    """
    row_of = {node.uid: row for row, node in enumerate(template.nodes)}
    found: dict[int, Numbers] = {}
    for row, node in enumerate(template.nodes):
        if node.kind is TaskKind.RELOAD:
            out = row_of[node.uid.replace(TaskKind.RELOAD.name, TaskKind.OFFLOAD.name)]
            found[row] = np.maximum(compute[row] - node.prefetch, compute[out] + 1)
    return found


def _kinds(emission: Emission) -> Mapping[tuple[int, tuple[BlockKey, ...]], list[int]]:
    """Return microbatches by kind: sequences, and blocks in the order of the row."""
    sizes = emission.sizes
    found: dict[tuple[int, tuple[BlockKey, ...]], list[int]] = {}
    for microbatch, keys in emission.names.by_microbatch().items():
        found.setdefault((sizes[microbatch], keys), []).append(microbatch)
    return found


def _add(
    emission: Emission, template: KindTemplate, keys: tuple[BlockKey, ...], *, microbatches: Numbers
) -> None:
    placed = [emission.layout.placed[key] for key in keys]
    numbered = np.concatenate([p.compute[microbatches] for p in placed], axis=1)
    compute = np.ascontiguousarray(numbered.T[template.anchors])
    dispatch = compute * LANES + template.lanes[:, None]
    ahead = _ahead(template, compute)
    for row, numbers in ahead.items():
        dispatch[row] = numbers * LANES + BEFORE
    tasks = emission.columns.add({**template.columns, "microbatch": microbatches}, dispatch)
    computes = template.lanes == COMPUTE
    emission.compute_task[compute[computes]] = tasks[computes]
    emission.ahead += [(tasks[row], numbers) for row, numbers in ahead.items()]
    for i, node in enumerate(template.nodes):
        emission.register(node.uid, tasks=tasks[i], compute=compute[i], microbatches=microbatches)
        if node.kind in _TRANSFERS:
            sends = node.kind in SEND_KINDS
            place = dispatch[i] if sends else emission.layout.slot_of_compute(compute[i])
            found = Transfers(edge=node.edge, microbatches=microbatches, tasks=tasks[i], place=place)
            ends = emission.sent if sends else emission.received
            ends.setdefault((node.kind, node.peer), []).append(found)
    buffers = emission.add_buffers(template.buffers, microbatches=microbatches)
    for name, values in (("waits", tasks), ("allocates", buffers), ("reads", buffers), ("frees", buffers)):
        rows, columns = getattr(template, name)
        emission.columns.link(name, tasks[rows], values[columns])
