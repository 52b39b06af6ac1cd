"""Which dimension of a kernel is proportional to the tokens of a sequence.

[Note: token dimensions]
A recording at one sequence more per microbatch shows which sizes grow with it: rows, elements, the m of a
matmul, the k of a weight gradient. All tokens of a microbatch are in that dimension. Where sequences have a
dimension of their own (attention, batched matmuls), the tokens of one are in the rows: queries, or m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from cost_models.ops import Operation, OpKind
from piper.capture.records import PassRecord, Record, ReplayRecord, SegmentRecord
from piper.capture.run import Run

QUERIES, M, K = 3, 1, 3
"""Positions in the shapes of attention and matmul."""


def mark_token_dims(runs: tuple[Run, Run, Run], *, sizes: tuple[int, int]) -> None:
    """State `token_dim` of every kernel of the first two recordings.

    Args:
        runs: with gradients, without, and with them at a larger microbatch.
        sizes: sequences of a microbatch, in the first two and in the third.
    """
    trained, thrown_away, larger = (run.recorder.segments for run in runs)
    done: set[int] = set()
    for record, bare, more in zip(trained, thrown_away, larger, strict=True):
        original, grown = _original(record), _original(more)
        pairs = [
            (original.forward, grown.forward),
            (original.backward, grown.backward),
            (_original(bare).forward, grown.forward),
        ]
        for one, other in pairs:
            if id(one) not in done:
                done.add(id(one))
                _mark_pass(one, other, sizes)
        if isinstance(record, ReplayRecord) and isinstance(more, ReplayRecord):
            record.extra_backward = _marked(record.extra_backward, more.extra_backward, sizes)


def _original(record: Record) -> SegmentRecord:
    return record.original if isinstance(record, ReplayRecord) else record


def _mark_pass(one: PassRecord, other: PassRecord, sizes: tuple[int, int]) -> None:
    kernels = [step for step in one.steps if step.operation is not None]
    for step, operation in zip(kernels, _marked(one.operations, other.operations, sizes), strict=True):
        step.operation = operation


def _marked(
    operations: Sequence[Operation], larger: Sequence[Operation], sizes: tuple[int, int]
) -> list[Operation]:
    partner = _partners(operations, larger)
    found: dict[tuple[Operation, tuple[int, ...]], Operation] = {}
    marked = []
    for i, operation in enumerate(operations):
        other = partner.get(i)
        if other is None:
            marked.append(operation)
            continue
        key = (operation, other.shape)
        if key not in found:
            position = _position(operation, other.shape, sizes)
            found[key] = operation if position < 0 else replace(operation, token_dim=position)
        marked.append(found[key])
    return marked


def _partners(operations: Sequence[Operation], larger: Sequence[Operation]) -> dict[int, Operation]:
    """Return for each kernel the one of the other recording that stands in its place.

    A microbatch of one sequence needs fewer copies: what one recording has alone has no partner.
    """
    names, others = [[operation.name for operation in part] for part in (operations, larger)]
    if names == others:
        return dict(enumerate(larger))
    blocks = SequenceMatcher(None, names, others, autojunk=False).get_matching_blocks()
    return {block.a + i: larger[block.b + i] for block in blocks for i in range(block.size)}


def _position(operation: Operation, larger: tuple[int, ...], sizes: tuple[int, int]) -> int:
    pairs = enumerate(zip(operation.shape, larger, strict=True))
    grown = [i for i, (size, more) in pairs if more != size and more * sizes[0] == size * sizes[1]]
    if not grown:
        return -1
    if operation.kind is OpKind.ATTENTION:
        return QUERIES
    if operation.kind is OpKind.MATMUL and grown[0] == 0:
        return K if operation.direction == "wgrad" else M
    return grown[0]
