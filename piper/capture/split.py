"""Cut a recorded backward in two: what the gradients of the segment's inputs need (BI), and the rest (BW).

[Note: split backward]
A backward slice over storages: an operator belongs to BI if it writes what the gradient of an input is
computed from, so that the classes follow from the dataflow, not from names. A kernel that makes both kinds
of gradients (norms, embeddings beside an input gradient) is in BI. Where no input gets a gradient, BW is
all of B. BW runs later: what it reads of the saved tensors, of the gradients that BI made and of the
gradients of the segment's outputs stays alive until then. Gradients of parameters that BI makes wait for
BW, too, which adds them to those of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from piper.capture.records import PassRecord, SegmentRecord, Step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitBackward:
    """Both halves of a backward.

    Args:
        inputs, weights: BI and BW, in the order of B.
        made: gradients that BI makes and BW reads, or adds to those of the step: storage -> bytes.
        reads: every storage that BW reads.
    """

    inputs: PassRecord
    weights: PassRecord
    made: dict[int, int]
    reads: frozenset[int]


def split_backward(record: SegmentRecord) -> SplitBackward:
    """Cut the backward of a segment in two."""
    whole, has_input_gradient = record.backward, any(value.requires_grad for value in record.inputs)
    early, late = _sliced(whole.steps, wanted=set(record.grads_out) if has_input_gradient else set())
    written_early = {storage for step in early for storage in step.writes}
    reads = frozenset(storage for step in late for storage in step.reads)
    waiting = reads | record.parameter_grads
    return SplitBackward(
        inputs=whole.part(early, made=written_early, kept=waiting),
        weights=whole.part(late, made=whole.allocated.keys() - written_early, kept=()),
        made={n: nbytes for n, nbytes in whole.allocated.items() if n in written_early and n in waiting},
        reads=reads if has_input_gradient else reads.union(record.saved),
    )


def _sliced(steps: list[Step], *, wanted: set[int]) -> tuple[list[Step], list[Step]]:
    needed: list[Step] = []
    rest: list[Step] = []
    for step in reversed(steps):
        if wanted.isdisjoint(step.writes):
            rest.append(step)
        else:
            wanted.update(step.reads)
            needed.append(step)
    return needed[::-1], rest[::-1]
