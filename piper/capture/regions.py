"""Which dimension of a kernel, and of a parameter, tensor parallelism cuts inside an annotated region.

[Note: tensor regions]
A region is a scope tagged TP (or EP: the experts of one rank may themselves be cut). What enters it is
whole on every rank. A matmul of something whole with a parameter is column-parallel: output features are
cut. What follows works on its own features or heads, up to the next matmul with a parameter, which is
row-parallel: input features are cut, and its result is a partial sum. A third such matmul in a row is
refused by whoever wants to cut. A table that is looked up is cut over its entries, its result is a partial
sum too. Features may be gathered ("gather_features", of a loss over logits that are not cut): from there
on every rank has them whole, and all that is made of them, until their gradient is split again. A vector
with one number per head is cut with the heads. Backward kernels follow: one that takes a parameter is cut
where the parameter is, one that makes a parameter's gradient is cut where its cut operand is. What is
made with a mean (or another reduction) over all cut features is wrong on every rank: whatever parameter
it meets next is refused. No names are asked, except what an operator does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from torch import Tensor

from cost_models.ops import OpKind
from piper.annotation import Stack

TENSOR_TAGS = frozenset({"TP", "EP"})
"""Names of scopes that are such regions."""

M, N, K = 1, 2, 3
"""Positions in the shape of a matmul [batch, m, n, k] and of a grouped one."""

HEADS, COLUMNS, ENTRIES = 1, 1, 2
"""Positions in the shapes of attention, of softmax and cross-entropy, of the gradient of a table."""

WHOLE = -1

GATHER, SPLIT = "gather_features", "split_features"
"""Operators that leave a region's features whole on every rank, and that split their gradient again."""

REDUCTIONS = frozenset({"mean", "var", "std", "var_mean", "norm", "linalg_vector_norm"})
"""Operators of norms that are no single kernel."""


class Level(IntEnum):
    """What one rank holds of a tensor: all of it, a partial sum, or its own features or heads."""

    WHOLE = 0
    PARTIAL = 1
    CUT = 2


@dataclass(frozen=True, slots=True)
class State:
    """Of a storage inside a region.

    Args:
        region: its number.
        level: what a rank holds.
        extent: how many features (or entries) the cut dimension has.
        scores: made of two activations, so that its last dimension is of tokens, whatever its size.
        reduced: made with a reduction over the features that are cut.
        gathered: made of gathered features.
    """

    region: int
    level: Level
    extent: int = 0
    scores: bool = False
    reduced: bool = False
    gathered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What the rules ask of a kernel.

    Args:
        kind, shape: as in `Operation`.
        op: name of the operator.
        operands, results: the tensors that it takes, in order; that it makes.
        reads, writes: numbers of storages.
        parameters: names of operands that are parameters, by position among the operands.
        backward: whether it runs in the backward pass.
    """

    kind: OpKind
    op: str
    shape: tuple[int, ...]
    operands: Sequence[Tensor]
    results: Sequence[Tensor]
    reads: Sequence[int]
    writes: Sequence[int]
    parameters: dict[int, str]
    backward: bool


def region_of(stack: Stack) -> int | None:
    """Return the number of the innermost region of a stack."""
    return next((scope.uid for scope in reversed(stack) if scope.name in TENSOR_TAGS), None)


@dataclass(slots=True)
class Regions:
    """Follows the storages of one recording.

    Attributes:
        layout: parameter -> dimension that is cut, or WHOLE.
        refused: parameters that no rule cuts.
        shapes: parameter -> its shape.
    """

    layout: dict[str, int] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _states: dict[int, State] = field(default_factory=dict)
    _casts: dict[int, str] = field(default_factory=dict)
    _gathers: set[int] = field(default_factory=set)

    def cut_storages(self) -> frozenset[int]:
        """Return the storages of which one rank holds its own features or heads only."""
        return frozenset(number for number, state in self._states.items() if state.level is Level.CUT)

    def gathered_storages(self) -> dict[int, bool]:
        """Return the storages that every rank has whole because a region gathered them, or what they are of.

        The value tells whether a gather itself made it.
        """
        return {n: n in self._gathers for n, state in self._states.items() if state.gathered}

    def parameters(self, named: Sequence[str | None], reads: Sequence[int]) -> dict[int, str]:
        """Return the operands that are parameters, or casts of parameters, by position.

        Args:
            named: by operand, the parameter that it is, or None.
            reads: their storages.
        """
        known = (name or self._casts.get(storage) for name, storage in zip(named, reads, strict=True))
        return {side: name for side, name in enumerate(known) if name is not None}

    def position(self, kernel: Kernel, region: int) -> int:
        """Return the position in the kernel's shape that is cut, and remember what it makes."""
        if kernel.kind is OpKind.COPY and len(kernel.reads) == len(kernel.parameters) == 1:
            self._casts[kernel.writes[0]] = kernel.parameters[0]
            return -1
        if kernel.op in {GATHER, SPLIT}:
            position, made = -1, _regathered(kernel, region)
            self._gathers.update(kernel.writes if kernel.op == GATHER else ())
        elif kernel.kind in {OpKind.MATMUL, OpKind.GROUPED_MATMUL}:
            position, made = self._matmul(kernel, region)
        elif kernel.kind is OpKind.EMBEDDING:
            position, made = self._table(kernel, region)
        else:
            position, made = self._other(kernel, region)
        for storage in kernel.writes:
            self._states[storage] = made
        return position

    def _state(self, storage: int, region: int) -> State:
        found = self._states.get(storage)
        return found if found is not None and found.region == region else State(region, Level.WHOLE)

    def _strongest(self, kernel: Kernel, region: int) -> State:
        states = [self._state(storage, region) for storage in kernel.reads]
        found = max(states, key=lambda state: state.level, default=State(region, Level.WHOLE))
        gathered = found.level is not Level.CUT and any(state.gathered for state in states)
        return replace(found, reduced=any(state.reduced for state in states), gathered=gathered)

    def _matmul(self, kernel: Kernel, region: int) -> tuple[int, State]:
        count = len(kernel.operands)
        left, right = _factors(kernel)
        first, second = kernel.operands[left], kernel.operands[right]
        names = {side: name for side, name in kernel.parameters.items() if side in {left, right}}
        if len(names) == 1:
            ((side, name),) = names.items()
            other = self._state(kernel.reads[left if side == right else right], region)
            parameter = first if side == left else second
            outer, inner = (-2, -1) if side == left else (-1, -2)
            lost = self._dims_selected(name, parameter)
            sides = lost + _dim_of(parameter, outer), lost + _dim_of(parameter, inner)
            bias = kernel.parameters.get(0) if count > 2 and left > 0 else None  # noqa: PLR2004
            if not kernel.backward:
                self._decide(name, sides, other, bias=bias)
            at = self.layout.get(name, WHOLE)
            position = M if side == left else N
            if at == sides[0]:
                return position, State(region, Level.CUT, kernel.shape[position])
            return (K, State(region, Level.PARTIAL)) if at == sides[1] else (-1, other)
        if len(names) > 1:
            return -1, State(region, Level.WHOLE)
        states = self._state(kernel.reads[left], region), self._state(kernel.reads[right], region)
        cut = [state.level is Level.CUT for state in states]
        if not any(cut):
            return -1, max(states, key=lambda state: state.level)
        made = State(region, Level.CUT, max(state.extent for state in states))
        if all(cut) or (kernel.kind is OpKind.MATMUL and kernel.shape[0] > 1):
            scores = not any(state.scores for state in states)
            return 0, replace(made, scores=scores)  # of activations: over heads, which are in the batch
        return _free_position(kernel, left=cut[0]), made

    def _dims_selected(self, name: str, view: Tensor) -> int:
        """Return how many leading dimensions of a parameter a view of a part lost (one expert of many)."""
        shape = self.shapes.get(name, ())
        return max(0, len(shape) - view.dim()) if view.numel() < math.prod(shape) else 0

    def _decide(self, name: str, sides: tuple[int, int], taken: State, *, bias: str | None) -> None:
        if taken.level is Level.PARTIAL or taken.reduced:
            self.refused.setdefault(name)
            return
        column = taken.level is Level.WHOLE
        at = sides[0] if column else sides[1]
        if self.layout.setdefault(name, at) != at:
            self.refused.setdefault(name)
        if bias is not None:
            self.layout.setdefault(bias, 0 if column else WHOLE)

    def _table(self, kernel: Kernel, region: int) -> tuple[int, State]:
        if kernel.backward:
            return ENTRIES, State(region, Level.CUT)
        for name in kernel.parameters.values():
            if self.layout.setdefault(name, 0) != 0:
                self.refused.setdefault(name)
        return -1, State(region, Level.PARTIAL)

    def _other(self, kernel: Kernel, region: int) -> tuple[int, State]:
        state = self._strongest(kernel, region)
        over_features = _normalised(kernel) == state.extent and not state.scores
        for side, name in kernel.parameters.items():
            if kernel.backward or state.level is not Level.CUT:
                continue
            if state.reduced or (kernel.kind is OpKind.NORM and over_features):
                self.refused.setdefault(name)
            tensor = kernel.operands[side]
            of_features = tensor.numel() == state.extent  # a vector, or a row for each head
            of_heads = _of_heads(tensor, state.extent) or (
                kernel.kind is OpKind.ATTENTION and tensor.shape == (kernel.shape[HEADS],)
            )
            self.layout.setdefault(name, 0 if of_features or of_heads else WHOLE)
        if state.level is not Level.CUT:
            return -1, state
        if kernel.parameters:  # where it is wrong, one of them has been refused
            state = replace(state, reduced=False)
        elif not kernel.backward and (
            _reduces(kernel, state.extent) or (kernel.kind is OpKind.NORM and over_features)
        ):
            state = replace(state, reduced=True)
        if kernel.kind is OpKind.ATTENTION:
            return HEADS, state
        return (COLUMNS if over_features and kernel.kind is not OpKind.NORM else 0), state


def _regathered(kernel: Kernel, region: int) -> State:
    """Return what a gather of features makes, or (its gradient) their split."""
    if kernel.op == GATHER:
        return State(region, Level.WHOLE, gathered=True)
    return State(region, Level.CUT, kernel.results[0].shape[-1])


def _factors(kernel: Kernel) -> tuple[int, int]:
    """Return which operands are multiplied: the last two, or the first two of a grouped matmul."""
    if kernel.kind is OpKind.GROUPED_MATMUL:
        return 0, 1
    return len(kernel.operands) - 2, len(kernel.operands) - 1


def _free_position(kernel: Kernel, *, left: bool) -> int:
    """Return the position of the dimension that only one operand of a weight gradient has."""
    if kernel.kind is OpKind.GROUPED_MATMUL:
        return K if left else N  # [groups, rows, n, k]: the rows are summed, the result is [groups, k, n]
    return M if left else N


def _normalised(kernel: Kernel) -> int:
    """Return the size of the dimension over which a kernel normalises, or -1."""
    wanted = {OpKind.NORM, OpKind.SOFTMAX, OpKind.CROSS_ENTROPY}
    return kernel.shape[1] if kernel.kind in wanted else -1


def _reduces(kernel: Kernel, extent: int) -> bool:
    """Whether a kernel makes one number of all cut features of each row."""
    taken, made = kernel.operands[0], kernel.results[0]
    rows = made.numel() * extent == taken.numel() and made.shape[-1:] != taken.shape[-1:]
    return kernel.op in REDUCTIONS and taken.shape[-1:] == (extent,) and rows


def _of_heads(view: Tensor, extent: int) -> bool:
    """Whether a view of a vector has one number for each head: it varies over one dimension, not the last."""
    sizes = zip(view.shape, view.stride(), strict=True)
    varying = [(dim, size) for dim, (size, stride) in enumerate(sizes) if stride and size > 1]
    return len(varying) == 1 and varying[0][0] < view.dim() - 1 and extent % varying[0][1] == 0


def _dim_of(view: Tensor, dim: int) -> int:
    """Return which dimension of the stored parameter a dimension of a view is: memory order tells."""
    strides = view.stride()
    return sum(1 for stride in strides if stride > strides[dim])
