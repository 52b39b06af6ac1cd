"""Shapes of results on the meta device, for the operators that models use most.

[Note: own shape rules]
torch computes many meta results in Python and imports sympy (0.8 s) and torch._dynamo (1.9 s) on the
first such call, more than the whole capture takes. The rules here give the same shapes, dtypes and strides
without; `tests/piper/capture/test_shapes.py` compares every rule with torch. A rule that does not know a
case returns None, and torch is asked; so does one whose operands do not fit, and torch says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., Any]

TO_BOOL = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not",
                     "logical_xor", "isnan", "isinf", "isfinite"})  # fmt: skip

ARITHMETIC_OPTIONS = frozenset({"alpha", "beta", "value", "approximate", "rounding_mode"})
"""Keyword arguments that change numbers but no layout."""


OF_WHOLE_NUMBERS = frozenset({"add", "sub", "rsub", "mul", "neg", "bitwise_and", "bitwise_or", "bitwise_xor",
                              "bitwise_not"})  # fmt: skip
"""Operators that leave whole numbers (and truths, as far as they take them) in their dtype."""


def result_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, device: str = "cuda") -> Any:
    """Return what `func` returns on meta tensors, or None when no rule covers the call.

    Args:
        func, args, kwargs: the call.
        device: "cpu" or "cuda": of whose kernels the results have the dtypes.
    """
    rule = RULES.get(func._opname)
    if device == "cpu":
        rule = CPU_RULES.get(func._opname, rule)
    if rule is not None:
        return rule(*args, **kwargs)
    tensors = [value for value in args if isinstance(value, Tensor)]
    known = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
    if not known or not tensors or not kwargs.keys() <= ARITHMETIC_OPTIONS:
        return None
    if func._opname in OF_WHOLE_NUMBERS and not tensors[0].dtype.is_floating_point:
        return _of_whole_numbers(tensors, args)
    return _pointwise(func._opname, tensors)


def _pointwise(name: str, tensors: Sequence[Tensor]) -> Tensor | None:
    if name in TO_BOOL and all(tensor.is_contiguous() for tensor in tensors):
        truths = _broadcast([tensor.shape for tensor in tensors])
        return None if truths is None else tensors[0].new_empty(truths, dtype=torch.bool)
    leading, plain = tensors[0], _plain(tensors[0])
    both_expand = not all(_expands_to(tensor.shape, leading.shape) for tensor in tensors)
    known = all(tensor.is_contiguous() for tensor in tensors) if both_expand else plain
    shape = _broadcast([tensor.shape for tensor in tensors])
    if shape is None or not (known or (not both_expand and all(map(_in_order, tensors)))):
        return None
    ranked = [tensor for tensor in tensors if tensor.dim() > 0] or tensors
    floats = list(dict.fromkeys(tensor.dtype for tensor in ranked if tensor.dtype.is_floating_point))
    if len(floats) != 1:
        return None
    dtype = torch.bool if name in TO_BOOL else floats[0]
    if plain and not both_expand:
        return like(leading, dtype=dtype)
    # What is expanded has no say in the order of the result's dimensions.
    return leading.new_empty(shape, dtype=dtype)


def _of_whole_numbers(tensors: Sequence[Tensor], args: Sequence[Any]) -> Tensor | None:
    dtype = tensors[0].dtype
    scalars = [value for value in args if not isinstance(value, Tensor)]
    whole = all(type(value) is int for value in scalars) and not (scalars and dtype == torch.bool)
    if not whole or any(tensor.dtype != dtype or not tensor.is_contiguous() for tensor in tensors):
        return None
    shape = _broadcast([tensor.shape for tensor in tensors])
    return None if shape is None else tensors[0].new_empty(shape)


def like(tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a new tensor with the shape and order of dimensions of `tensor`, without gaps."""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
    strides, step, dense = [0] * tensor.dim(), 1, True
    for dim in order:
        strides[dim] = step
        dense = dense and (tensor.shape[dim] == 1 or tensor.stride(dim) == step)
        step *= tensor.shape[dim]
    layout = tensor.stride() if dense else strides
    return torch.empty_strided(tensor.shape, layout, dtype=dtype or tensor.dtype, device=tensor.device)


def _expands_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    if len(shape) > len(target):
        return False
    return all(size in (1, full) for size, full in zip(reversed(shape), reversed(target), strict=False))


def _in_order(tensor: Tensor) -> bool:
    """Whether the dimensions that are really stored lie in memory in their order."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    strides = [stride for stride, size in sizes if stride and size > 1]
    return strides == sorted(strides, reverse=True)


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the shape to which all of `shapes` expand, or None where they do not."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    sizes = [{*along} - {1} or {1} for along in zip(*padded, strict=True)]
    return None if any(len(along) > 1 for along in sizes) else [along.pop() for along in sizes]


def _plain(tensor: Tensor) -> bool:
    """Whether every dimension is really stored, so that the result takes over the order of strides."""
    return all(stride > 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _mm(a: Tensor, b: Tensor) -> Tensor | None:
    fit = a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2] and a.dtype == b.dtype
    return a.new_empty((*a.shape[:-1], b.shape[-1])) if fit else None


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Tensor | None:
    product = _mm(a, b)
    fit = product is not None and bias.dtype == a.dtype and _expands_to(bias.shape, product.shape)
    return product if fit else None


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if first.dim() == 0 or any(t.dtype != first.dtype or t.dim() != first.dim() for t in tensors):
        return None
    others = {(*t.shape[: dim % t.dim()], *t.shape[dim % t.dim() + 1 :]) for t in tensors}
    if len(others) > 1:
        return None
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    if not all(map(_is_image, tensors)):
        return first.new_empty(shape)
    order = (1, *range(len(shape) - 1, 1, -1), 0)
    strides, step = [0] * len(shape), 1
    for position in order:
        strides[position] = step
        step *= shape[position]
    return torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)


def _is_image(tensor: Tensor) -> bool:
    """Whether torch takes a tensor for images whose channels (dimension 1) lie innermost in memory.

    It keeps that order in what it joins. Gaps are allowed; what may as well have channels outermost is not
    taken so.
    """
    if tensor.dim() not in _IMAGE_DIMS or not tensor.stride(1) or not tensor.numel():
        return False
    inner = 0
    for position in (1, *range(tensor.dim() - 1, 1, -1)):
        if tensor.stride(position) < inner:
            return False
        inner = tensor.stride(position) * tensor.shape[position]
    return tensor.stride(0) >= inner and inner != tensor.stride(1)


_IMAGE_DIMS = (4, 5)


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _embedding_backward(grad: Tensor, indices: Tensor, num_weights: int, *_: Any) -> Tensor:
    return grad.new_empty((num_weights, grad.shape[-1]))


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32 if half_to_float else x.dtype)


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:  # noqa: PLR0917
    return grad.new_empty(grad.shape, dtype=input_dtype)


def _nll_loss(  # noqa: PLR0917
    x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    none = reduction == 0 and x.dim() > 1
    return x.new_empty(target.shape if none else ()), x.new_empty(())


def _nll_loss_backward(grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _empty_like(x: Tensor, *_: Any, **kwargs: Any) -> Tensor | None:
    if kwargs.get("memory_format") not in (None, torch.preserve_format) or not _plain(x):
        return None
    return like(x, dtype=kwargs.get("dtype"))


def _clone(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor | None:
    if memory_format == torch.contiguous_format:
        return x.new_empty(x.shape)
    return _empty_like(x, memory_format=memory_format)


def _slice_backward(grad: Tensor, sizes: Sequence[int], *_: Any) -> Tensor:
    return grad.new_empty(sizes)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor | None:
    if kwargs.get("dtype") is not None or not x.dtype.is_floating_point or x.dim() == 0:
        return None
    summed: Tensor = torch.ops.aten.sum.dim_IntList(x, dim, keepdim)
    return summed


def _sum(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    if x.dim() == 0 or not isinstance(dim, list | tuple) or not dim:
        return None
    summed = {position % x.dim() for position in dim}
    shape = [1 if i in summed else size for i, size in enumerate(x.shape) if keepdim or i not in summed]
    return x.new_empty(shape, dtype=dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))


def _floor_divide(x: Tensor, divisor: Any) -> Tensor | None:
    whole = isinstance(divisor, int) and not x.dtype.is_floating_point
    return like(x) if whole and x.dtype != torch.bool and _plain(x) else None


def _arange(end: Any, *more: Any, device: Any = None, dtype: Any = None, **_: Any) -> Tensor | None:
    whole = isinstance(end, int) and not more and dtype in {None, torch.int64, torch.int32}
    if not whole or device is None or torch.device(device).type != "meta":
        return None
    return torch.empty((end,), dtype=dtype or torch.int64, device=device)


def _sort(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor] | None:
    return (like(x), like(x, dtype=torch.int64)) if x.is_contiguous() else None


def _index_select(x: Tensor, dim: Any, index: Tensor) -> Tensor | None:
    if x.dim() == 0 or not isinstance(dim, int):
        return None
    shape = list(x.shape)
    shape[dim] = index.numel()
    return x.new_empty(shape)


def _gather(x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor | None:
    return x.new_empty(index.shape) if index.dim() == x.dim() else None


def _searchsorted(edges: Tensor, values: Any, *, out_int32: bool = False, **_: Any) -> Tensor | None:
    if not isinstance(values, Tensor):
        return None
    return values.new_empty(values.shape, dtype=torch.int32 if out_int32 else torch.int64)


def _itself(x: Tensor, *_: Any) -> Tensor:
    return x


def fits_norm(x: Tensor, normalized_shape: Sequence[int], *factors: Any) -> bool:
    """Whether a norm over the last dimensions has those of x, and its weight and bias too."""
    shape = tuple(normalized_shape)
    given = [tuple(factor.shape) for factor in factors if isinstance(factor, Tensor)]
    return tuple(x.shape[x.dim() - len(shape) :]) == shape and all(size == shape for size in given)


def _layer_norm(
    x: Tensor, normalized_shape: Sequence[int], *factors: Any
) -> tuple[Tensor, Tensor, Tensor] | None:
    if not x.is_contiguous() or not fits_norm(x, normalized_shape, *factors):
        return None
    dims = len(normalized_shape)
    rows = (*x.shape[: x.dim() - dims], *(1 for _ in range(dims)))
    low = x.dtype in {torch.bfloat16, torch.float16}
    mean, rstd = (x.new_empty(rows, dtype=torch.float32 if low else x.dtype) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _layer_norm_backward(  # noqa: PLR0917
    grad: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...] | None:
    if not (grad.is_contiguous() and x.is_contiguous()):
        return None
    parts = zip((x, weight, bias), mask, strict=True)
    return tuple(None if part is None or not wanted else part.new_empty(part.shape) for part, wanted in parts)


def _like_contiguous(x: Tensor, *_: Any, **__: Any) -> Tensor | None:
    return like(x) if x.is_contiguous() else None


def _topk(x: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> tuple[Tensor, Tensor] | None:
    if x.dim() == 0 or k > x.shape[dim]:
        return None
    shape = list(x.shape)
    shape[dim] = k
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor] | None:
    return (like(x), like(x, dtype=torch.bool)) if train and p else None


def _flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    seed, offset = query.new_empty((2,), dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    lengths = query.shape[2], key.shape[2]
    return like(query), lse, None, None, *lengths, seed, offset, query.new_empty((0,))


def _flash_backward(  # noqa: PLR0917
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Any, ...]:
    return like(query), like(key), like(value)


def _layer_norm_on_cpu(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, *factors: Any
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Mean and 1/deviation have the dtype of the weights, not fp32 as on CUDA."""
    if not fits_norm(x, normalized_shape, weight, *factors):
        return None
    dims = len(normalized_shape)
    rows = x.shape[: x.dim() - dims] + (1,) * dims
    dtype = x.dtype if weight is None else weight.dtype
    return x.new_empty(x.shape), x.new_empty(rows, dtype=dtype), x.new_empty(rows, dtype=dtype)


CPU_RULES: dict[str, Rule] = {"native_layer_norm": _layer_norm_on_cpu}
"""Where kernels of the CPU return other dtypes."""

RULES: dict[str, Rule] = {
    "mm": _mm,
    "addmm": _addmm,
    "bmm": _mm,
    "baddbmm": _addmm,
    "cat": _cat,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "clone": _clone,
    "empty_like": _empty_like,
    "zeros_like": _empty_like,
    "ones_like": _empty_like,
    "slice_backward": _slice_backward,
    "select_backward": _slice_backward,
    "mean": _mean,
    "sum": _sum,
    "floor_divide": _floor_divide,
    "topk": _topk,
    "arange": _arange,
    "sort": _sort,
    "index_select": _index_select,
    "gather": _gather,
    "scatter_add": _like_contiguous,
    "searchsorted": _searchsorted,
    "logical_and_": _itself,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "index_add": _like_contiguous,
    "scatter": _like_contiguous,
    "native_dropout": _native_dropout,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
