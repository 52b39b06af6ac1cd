"""From a call of an aten operator to the `Operation` that a device executes.

Bytes are what the kernel reads and writes at least once: every distinct element of its tensors, except where
a rule below knows better (a gather reads only the rows it takes). FLOPs count the arithmetic of the kernel,
1 multiply-add = 2; for memory-bound kernels they are a count per element, given in `_PER_ELEMENT`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cost_models.ops import Operation, OpKind
from piper.capture.dtypes import name_of
from piper.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One kernel as torch sees it.

    Args:
        name: "aten.mm.default".
        op: "mm".
        args: as passed.
        reads, writes: distinct tensors.
        direction: as in `Operation`.
        where: the model, for messages.
    """

    name: str
    op: str
    args: Sequence[Any]
    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    direction: str
    where: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What a rule says of a call; bytes None: everything that is read and written."""

    kind: OpKind
    shape: tuple[int, ...]
    flops: int
    bytes: int | None = None
    causal: bool = False


def operation_of(call: Call) -> Operation:
    """Return the operation of a call; raises ModelError for a compute kernel without a rule."""
    cost = COSTS.get(call.op, _elementwise)(call)
    moved = cost.bytes
    if moved is None:
        moved = sum(map(touched_bytes, call.reads)) + sum(map(touched_bytes, call.writes))
    return Operation(
        kind=cost.kind,
        name=call.name,
        shape=cost.shape,
        dtype=name_of(_compute_dtype(call), where=f"{call.where}: {call.name}"),
        flops=cost.flops,
        bytes=moved,
        causal=cost.causal,
        direction=call.direction,
    )


def kind_of(op: str, args: Sequence[Any], *, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> OpKind:
    """Return the kind of one forward call of an aten operator, such as "mm"."""
    call = Call(
        name=f"aten.{op}", op=op, args=args, reads=reads, writes=writes, direction="fwd", where="runtime"
    )
    return COSTS.get(op, _elementwise)(call).kind


def touched_bytes(tensor: Tensor) -> int:
    """Return the bytes of the distinct elements of a tensor (an expanded dimension counts once)."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


def _compute_dtype(call: Call) -> torch.dtype:
    for tensor in (*call.writes, *call.reads):
        if tensor.dtype.is_floating_point:
            return tensor.dtype
    return (call.writes or call.reads)[0].dtype


def _matmul(call: Call) -> Cost:
    a, b = [value for value in call.args if isinstance(value, Tensor)][-2:]
    batch = math.prod(a.shape[:-2])
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    return Cost(OpKind.MATMUL, (batch, m, n, k), 2 * batch * m * n * k)


def _grouped_matmul(call: Call) -> Cost:
    """Count [rows, k] x [groups, k, n], or the gradient [k, rows] x [rows, n] of every group."""
    a, b, ends = call.args[:3]
    forward = b.dim() == 3  # noqa: PLR2004
    rows, k = a.shape if forward else reversed(a.shape)
    shape = (ends.numel(), rows, b.shape[-1], k)
    return Cost(OpKind.GROUPED_MATMUL, shape, 2 * rows * b.shape[-1] * k)


def _matvec(call: Call) -> Cost:
    a, b = [value for value in call.args if isinstance(value, Tensor)][-2:]
    m, k = (a.shape[0] if a.dim() > 1 else 1), b.shape[0]
    return Cost(OpKind.MATMUL, (1, m, 1, k), 2 * m * k)


def _attention(call: Call) -> Cost:
    """Count two matmuls over the scores; causal: half of them."""
    query, key, value = call.args[:3]
    at = 4 if "flash" in call.op else 6
    causal = bool(call.args[at]) if len(call.args) > at else False
    return _scores((query, key, value), call, matmuls=2, causal=causal)


def _attention_backward(call: Call) -> Cost:
    """Count five matmuls: scores again, then gradients of values, scores, queries, keys."""
    at = 7 if "for_cpu" in call.op else 11
    causal = bool(call.args[at]) if len(call.args) > at else False
    return _scores(call.args[1:4], call, matmuls=5, causal=causal)


def _window_attention(call: Call) -> Cost:
    """Count as `_attention`, but only the scores of the last `window` keys of each query, causally."""
    matmuls = 5 if "backward" in call.op else 2
    query, key, value, window = call.args
    cost = _scores((query, key, value), call, matmuls=matmuls, causal=True)
    seq = query.shape[2]
    return replace(cost, flops=cost.flops * (2 * seq * window - window**2) // seq**2)


def _scores(qkv: Sequence[Tensor], call: Call, *, matmuls: int, causal: bool) -> Cost:
    query, key, value = qkv
    batch, heads, seq_q, head_dim = query.shape
    kv_heads, seq_kv = key.shape[1], key.shape[2]
    of_values = matmuls // 2  # the others go over the features of queries and keys
    features = (matmuls - of_values) * head_dim + of_values * value.shape[-1]
    flops = 2 * batch * heads * seq_q * seq_kv * features
    moved = sum(touched_bytes(t) for t in (*call.reads, *call.writes) if t.dtype.is_floating_point)
    shape = (batch, heads, kv_heads, seq_q, seq_kv, head_dim)
    return Cost(OpKind.ATTENTION, shape, flops // 2 if causal else flops, moved, causal)


def _norm(call: Call) -> Cost:
    tensor = call.reads[0]
    hidden = tensor.shape[-1] if tensor.dim() else 1
    return Cost(
        OpKind.NORM, (tensor.numel() // max(hidden, 1), hidden), _PER_ELEMENT[call.op] * tensor.numel()
    )


def _softmax(call: Call) -> Cost:
    x = call.args[0]
    columns = x.shape[call.args[2 if call.op.endswith("backward_data") else 1]] if x.dim() else 1
    return Cost(OpKind.SOFTMAX, (x.numel() // max(columns, 1), columns), _PER_ELEMENT[call.op] * x.numel())


def _nll_loss(call: Call) -> Cost:
    x, target = call.args[:2]
    moved = target.numel() * (target.element_size() + x.element_size())
    moved += sum(map(touched_bytes, call.writes))
    return Cost(OpKind.CROSS_ENTROPY, (target.numel(), x.shape[-1]), target.numel(), moved)


def _nll_loss_backward(call: Call) -> Cost:
    """Count zeros everywhere, then one value per row."""
    x, target = call.args[1:3]
    moved = target.numel() * (target.element_size() + x.element_size()) + x.numel() * x.element_size()
    return Cost(OpKind.CROSS_ENTROPY, (target.numel(), x.shape[-1]), target.numel(), moved)


def _fused_cross_entropy(call: Call) -> Cost:
    x, target = call.args[:2]
    return Cost(OpKind.CROSS_ENTROPY, (target.numel(), x.shape[-1]), _PER_ELEMENT[call.op] * x.numel())


def _embedding(call: Call) -> Cost:
    output, indices = call.writes[0], call.args[1]
    moved = touched_bytes(indices) + 2 * touched_bytes(output)
    return Cost(OpKind.EMBEDDING, (indices.numel(), output.shape[-1]), 0, moved)


def _embedding_backward(call: Call) -> Cost:
    """Clear the whole table, then add each row's gradient to its entry."""
    grad, _, entries, *_ = call.args
    shape = (grad.numel() // grad.shape[-1], grad.shape[-1], entries)
    return Cost(OpKind.EMBEDDING, shape, grad.numel())


def _gather(call: Call) -> Cost:
    """Count only the rows that are taken."""
    output = call.writes[0]
    moved = 2 * touched_bytes(output) + sum(
        touched_bytes(t) for t in call.reads if not t.dtype.is_floating_point
    )
    return Cost(OpKind.COPY, (output.numel(),), 0, moved)


def _copy(call: Call) -> Cost:
    return Cost(OpKind.COPY, (call.writes[0].numel(),), 0)


def _fill(call: Call) -> Cost:
    moved = sum(map(touched_bytes, call.writes))
    return Cost(OpKind.COPY, (call.writes[0].numel(),), 0, moved)


def _overwrite(call: Call) -> Cost:
    """Count what `a.copy_(b)` does: read b, write a."""
    source = call.args[1]
    return Cost(
        OpKind.COPY, (source.numel(),), 0, touched_bytes(source) + sum(map(touched_bytes, call.writes))
    )


def _reduction(call: Call) -> Cost:
    elements = max(tensor.numel() for tensor in call.reads)
    return Cost(OpKind.REDUCTION, (elements,), elements)


def _elementwise(call: Call) -> Cost:
    from torch.utils.flop_counter import flop_registry

    heavy = call.op.startswith(_HEAVY) or any(getattr(p, "__name__", "") == call.op for p in flop_registry)
    if heavy:
        raise ModelError(
            where=call.where, field="operator", value=call.name, rule="has no cost rule yet",
            fix="use matmuls (nn.Linear) and F.scaled_dot_product_attention",
        )  # fmt: skip
    elements = max(tensor.numel() for tensor in (*call.writes, *call.reads))
    return Cost(OpKind.ELEMENTWISE, (elements,), elements)


_HEAVY = ("linalg_", "_linalg_", "_fft", "_trilinear", "_cdist", "_pdist", "cholesky", "addbmm",
          "convolution", "_ctc_loss", "grid_sampler", "im2col", "col2im")  # fmt: skip
"""Beginnings of operators that compute more than a number per element and have no rule."""

_PER_ELEMENT = {
    "_fused_rms_norm": 4,  # square, add; times 1/rms; times weight
    "_fused_rms_norm_backward": 9,  # g*w, x/rms, product, sum, times mean, subtract, /rms; g*x/rms, sum
    "native_layer_norm": 7,  # sum; subtract, square, sum; times 1/std; times weight, plus bias
    "native_layer_norm_backward": 12,  # as RMS norm, and the mean, its subtraction, and the bias gradient
    "native_group_norm": 7,
    "native_group_norm_backward": 12,
    "_softmax": 5,  # max, subtract, exp, sum, divide
    "_safe_softmax": 5,
    "masked_softmax": 6,  # times the scale first
    "masked_softmax_backward_data": 5,
    "cross_entropy": 8,  # log-softmax, then its gradient: exp, divide, subtract
    "_log_softmax": 5,
    "_softmax_backward_data": 4,  # product, sum, subtract, product
    "_log_softmax_backward_data": 4,
}

COSTS: dict[str, Callable[[Call], Cost]] = {
    "mm": _matmul,
    "addmm": _matmul,
    "bmm": _matmul,
    "baddbmm": _matmul,
    "mv": _matvec,
    "addmv": _matvec,
    "dot": _matvec,
    "_grouped_mm": _grouped_matmul,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "window_attention": _window_attention,
    "window_attention_backward": _window_attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_fused_rms_norm": _norm,
    "_fused_rms_norm_backward": _norm,
    "native_layer_norm": _norm,
    "native_layer_norm_backward": _norm,
    "native_group_norm": _norm,
    "native_group_norm_backward": _norm,
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "masked_softmax": _softmax,
    "masked_softmax_backward_data": _softmax,
    "cross_entropy": _fused_cross_entropy,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax,
    "_log_softmax_backward_data": _softmax,
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "index_select": _gather,
    "gather": _gather,
    "index": _gather,
    **dict.fromkeys(("gather_features", "split_features"), _copy),
    **dict.fromkeys(("clone", "_to_copy", "cat", "stack", "slice_backward", "select_backward", "repeat",
                     "constant_pad_nd", "roll", "flip"), _copy),
    "copy_": _overwrite,
    **dict.fromkeys(("zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros",
                     "new_ones", "new_full", "zero_", "fill_", "scalar_tensor"), _fill),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "var", "std",
                     "var_mean", "any", "all", "norm", "linalg_vector_norm", "logsumexp"), _reduction),
}  # fmt: skip

ALLOCATIONS = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
)
"""Operators that launch no kernel."""

MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_grouped_mm"})
"""Operators whose backward is one matmul for the inputs (dgrad) and one for the weights (wgrad)."""

MATH_ATTENTION = "_safe_softmax"
"""Only the unfused path of `F.scaled_dot_product_attention` calls it."""
