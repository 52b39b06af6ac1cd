"""Our shape rules give what torch's meta kernels give: shapes, dtypes and strides."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piper.capture.shapes import RULES, result_of

aten = torch.ops.aten


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape):
    return meta(*shape, dtype=torch.int64)


X, WIDE = meta(2, 6, 4, 8), meta(2, 6, 4, 16)
HALF = WIDE.chunk(2, dim=-1)[0]
TRANSPOSED = X.transpose(1, 2)
MASK = meta(2, 6, 4, 8, dtype=torch.bool)
QKV = [meta(2, 6, heads, 8).transpose(1, 2) for heads in (4, 2, 2)]
FLASH = (*QKV, 0.0, True)
OUT, LSE, SEED = (
    meta(2, 6, 4, 8).transpose(1, 2),
    meta(2, 4, 6, dtype=torch.float32),
    meta(2, dtype=torch.uint64),
)

CALLS = {
    "mm": (aten.mm.default, (meta(3, 5), meta(7, 5).t())),
    "addmm": (aten.addmm.default, (meta(7), meta(3, 5), meta(5, 7))),
    "bmm": (aten.bmm.default, (meta(2, 3, 5), meta(2, 5, 7))),
    "baddbmm": (aten.baddbmm.default, (meta(2, 3, 7), meta(2, 3, 5), meta(2, 5, 7))),
    "cat": (aten.cat.default, ([X, X, WIDE], -1)),
    "cat of transposes": (aten.cat.default, ([TRANSPOSED, TRANSPOSED], -1)),
    "cat of images": (aten.cat.default, ([X.permute(0, 3, 1, 2), X.permute(0, 3, 1, 2)], 1)),
    "cat of halves of images": (aten.cat.default, (2 * [HALF.permute(0, 3, 1, 2)], 2)),
    "cat of an image and another": (aten.cat.default, ([X.permute(0, 3, 1, 2), meta(2, 8, 6, 4)], 1)),
    "cat of films": (aten.cat.default, (2 * [meta(2, 3, 4, 5, 6).permute(0, 4, 1, 2, 3)], 0)),
    "cat of single sequences": (aten.cat.default, (2 * [meta(1, 6, 4, 8).transpose(1, 2)], -1)),
    "cat of one channel": (aten.cat.default, (2 * [meta(2, 4, 8, 1).permute(0, 3, 1, 2)], 0)),
    "cat of one pixel": (aten.cat.default, (2 * [meta(2, 8, 1, 1)], 0)),
    "cat of halves": (aten.cat.default, ([HALF, HALF], -1)),
    "cat of halves and wholes": (aten.cat.default, ([HALF.flatten(0, 1), X.flatten(0, 1)], 0)),
    "cat first dimension": (aten.cat.default, ([X, X],)),
    "embedding": (aten.embedding.default, (meta(9, 4), indices(2, 3))),
    "embedding backward": (
        aten.embedding_dense_backward.default,
        (meta(2, 3, 4), indices(2, 3), 9, -1, False),
    ),
    "softmax": (aten._softmax.default, (X, -1, False)),
    "log softmax": (aten._log_softmax.default, (X, 1, False)),
    "log softmax of a transpose": (aten._log_softmax.default, (TRANSPOSED, 1, False)),
    "softmax backward": (aten._softmax_backward_data.default, (X, X, -1, torch.bfloat16)),
    "log softmax backward": (aten._log_softmax_backward_data.default, (X, X, -1, torch.bfloat16)),
    "nll": (aten.nll_loss_forward.default, (meta(5, 9), indices(5), None, 2, -100)),
    "nll unreduced": (aten.nll_loss_forward.default, (meta(5, 9), indices(5), None, 0, -100)),
    "nll backward": (aten.nll_loss_backward.default, (meta(), meta(5, 9), indices(5), None, 2, -100, meta())),
    "slice backward": (aten.slice_backward.default, (HALF, [2, 6, 4, 16], 3, 0, 8, 1)),
    "select backward": (aten.select_backward.default, (meta(2, 6), [2, 3, 6], 1, 0)),
    "mean": (aten.mean.dim, (X, [-1], True)),
    "mean of a transpose": (aten.mean.dim, (TRANSPOSED, [1])),
    "comparison that broadcasts": (aten.le.Tensor, (indices(5, 1), indices(8))),
    "comparison with a number": (aten.gt.Scalar, (indices(5, 2), 3)),
    "sum": (aten.sum.dim_IntList, (X, [-1], True)),
    "sum of a transpose": (aten.sum.dim_IntList, (TRANSPOSED, [2], True)),
    "sum of a transpose without the dimension": (aten.sum.dim_IntList, (TRANSPOSED, [1])),
    "sum of an expansion": (aten.sum.dim_IntList, (meta(2, 1, 8).expand(2, 5, 8), [0, 1])),
    "sum of truths": (aten.sum.dim_IntList, (MASK, [0, 2])),
    "divide whole numbers": (aten.floor_divide.default, (indices(4, 2).t(), 2)),
    "multiply what is expanded": (aten.mul.Tensor, (meta(5, 1, 8).expand(5, 3, 8), meta(5, 3, 8))),
    "multiply what is expanded first": (aten.mul.Tensor, (meta(1, 6, 4, 8).expand(2, -1, -1, -1), X)),
    "multiply what is expanded by a column": (
        aten.mul.Tensor,
        (meta(5, 1, 8).expand(5, 3, 8), meta(5, 3, 1)),
    ),
    "gather": (aten.gather.default, (meta(5, 8), -1, indices(5, 2))),
    "gather from a transpose": (aten.gather.default, (meta(8, 5).t(), 1, indices(5, 2))),
    "add to what is gathered": (aten.scatter_add.default, (meta(5, 8), -1, indices(5, 2), meta(5, 2))),
    "places in order": (aten.searchsorted.Tensor, (meta(8, dtype=torch.int32), indices(7, 2))),
    "layer norm": (aten.native_layer_norm.default, (X, [8], meta(8), meta(8), 1e-5)),
    "layer norm over two": (aten.native_layer_norm.default, (X.float(), [4, 8], None, None, 1e-5)),
    "layer norm backward": (
        aten.native_layer_norm_backward.default,
        (X, X, [8], *2 * [meta(2, 6, 4, 1, dtype=torch.float32)], meta(8), meta(8), [True] * 3),
    ),
    "layer norm backward without a bias": (
        aten.native_layer_norm_backward.default,
        (X, X, [8], *2 * [meta(2, 6, 4, 1, dtype=torch.float32)], meta(8), None, [True, True, False]),
    ),
    "truths in place": (aten.logical_and_.default, (MASK.clone(), MASK)),
    "truths or others": (aten.bitwise_or.Tensor, (MASK, meta(4, 8, dtype=torch.bool))),
    "whole numbers": (aten.sub.Tensor, (indices(5, 1), indices(5))),
    "whole numbers and a number": (aten.add.Tensor, (indices(5, 2), 3)),
    "minus whole numbers": (aten.neg.default, (indices(5, 2),)),
    "columns times rows": (aten.mul.Tensor, (meta(2, 6, 1), meta(2, 1, 8))),
    "a row times all": (aten.mul.Tensor, (meta(8), X)),
    "sort": (aten.sort.default, (indices(7),)),
    "rows by number": (aten.index_select.default, (X, 1, indices(3))),
    "rows of a transpose by number": (aten.index_select.default, (TRANSPOSED, -1, indices(3))),
    "add to rows": (aten.index_add.default, (X, 1, indices(3), meta(2, 3, 4, 8))),
    "scatter": (aten.scatter.src, (X, -1, indices(2, 6, 4, 2), meta(2, 6, 4, 2))),
    "largest few": (aten.topk.default, (meta(5, 8), 2)),
    "largest few along another dimension": (aten.topk.default, (X, 3, 1)),
    "largest few of a transpose": (aten.topk.default, (TRANSPOSED, 2)),
    "dropout": (aten.native_dropout.default, (TRANSPOSED, 0.1, True)),
    "clone": (aten.clone.default, (TRANSPOSED,)),
    "clone of half": (aten.clone.default, (HALF,)),
    "empty like": (aten.empty_like.default, (HALF,)),
    "zeros like": (aten.zeros_like.default, (TRANSPOSED,)),
    "ones like": (aten.ones_like.default, (X,)),
    "flash": (aten._scaled_dot_product_flash_attention.default, FLASH),
    "flash backward": (
        aten._scaled_dot_product_flash_attention_backward.default,
        (OUT, *QKV, OUT, LSE, None, None, 6, 6, 0.0, True, SEED, meta(dtype=torch.uint64)),
    ),
    "add": (aten.add.Tensor, (X, X)),
    "add a row": (aten.mul.Tensor, (X, meta(8))),
    "add a column": (aten.mul.Tensor, (X, meta(4, 1))),
    "multiply by a number": (aten.mul.Tensor, (HALF, 2.0)),
    "multiply by a scalar tensor": (aten.mul.Tensor, (X, meta(dtype=torch.float32))),
    "multiply half": (aten.mul.Tensor, (HALF, meta(6, 1, 8))),
    "multiply a transpose": (aten.mul.Tensor, (TRANSPOSED, TRANSPOSED)),
    "transpose and contiguous": (aten.add.Tensor, (TRANSPOSED, meta(2, 4, 6, 8))),
    "one wide": (aten.add.Tensor, (meta(1, 1, 8).transpose(0, 1), meta(1, 1, 8))),
    "addcmul": (aten.addcmul.default, (HALF, HALF, meta(6, 1, 8))),
    "silu": (aten.silu.default, (X,)),
    "silu backward": (aten.silu_backward.default, (X, TRANSPOSED.transpose(1, 2))),
    "relu backward": (aten.threshold_backward.default, (X, X, 0)),
    "gelu": (aten.gelu.default, (HALF,)),
    "rsqrt": (aten.rsqrt.default, (meta(2, 1, 1),)),
    "power": (aten.pow.Tensor_Scalar, (X, 2)),
    "compare": (aten.gt.Scalar, (X, 0)),
    "compare tensors": (aten.eq.Tensor, (X, X)),
    "where": (aten.where.self, (MASK, X, X)),
    "masked fill": (aten.masked_fill.Scalar, (X, MASK, 0.0)),
}
KEYWORDS = {
    "clone contiguous": (aten.clone.default, (TRANSPOSED,), {"memory_format": torch.contiguous_format}),
    "empty like in fp32": (aten.empty_like.default, (TRANSPOSED,), {"dtype": torch.float32}),
    "flash scaled": (aten._scaled_dot_product_flash_attention.default, FLASH, {"scale": 0.5}),
    "sum to whole numbers": (aten.sum.dim_IntList, (MASK, [0]), {"dtype": torch.int32}),
    "numbers": (aten.arange.default, (5,), {"device": torch.device("meta")}),
    "numbers of 32 bits": (aten.arange.default, (5,), {"device": "meta", "dtype": torch.int32}),
    "places to the right": (
        aten.searchsorted.Tensor,
        (indices(8), indices(7)),
        {"right": True, "out_int32": True},
    ),
    "stable sort": (aten.sort.stable, (indices(7, 3),), {"stable": True, "dim": 0}),
    "subtract": (aten.addcmul.default, (X, X, X), {"value": -1}),
}


def layouts(result):
    parts = result if isinstance(result, tuple | list) else (result,)
    return [
        (tuple(part.shape), part.stride(), part.dtype) if isinstance(part, torch.Tensor) else part
        for part in parts
    ]


@pytest.mark.parametrize("name", [*CALLS, *KEYWORDS])
def test_a_rule_agrees_with_torch(name):
    func, args, kwargs = KEYWORDS[name] if name in KEYWORDS else (*CALLS[name], {})
    ours = result_of(func, args, kwargs)
    assert ours is not None
    assert layouts(ours) == layouts(func(*args, **kwargs))


def test_every_rule_is_compared_with_torch():
    tested = {func._opname for func, *_ in (*CALLS.values(), *KEYWORDS.values())}
    assert set(RULES) <= tested


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.add.Tensor, (meta(8), TRANSPOSED), {}),
        (aten.add.Tensor, (indices(3), 0.5), {}),
        (aten.mul.Tensor, (MASK, 2), {}),
        (aten.add.Tensor, (indices(3), meta(3, dtype=torch.int32)), {}),
        (aten.searchsorted.Scalar, (indices(3), 2), {}),
        (aten.native_layer_norm.default, (TRANSPOSED, [8], meta(8), meta(8), 1e-5), {}),
        (aten.add.Tensor, (X, meta(2, 6, 4, 8, dtype=torch.float32)), {}),
        (aten.mul.Tensor, (meta(1, 6, 4, 8).expand(2, -1, -1, -1), meta(2, 4, 6, 8).transpose(1, 2)), {}),
        (aten.mul.Tensor, (meta(1, 6, 4).transpose(1, 2).expand(2, -1, -1), meta(2, 4, 6)), {}),
        (aten.sum.default, (X,), {}),
        (aten.sum.dim_IntList, (meta(), [0]), {}),
        (aten.floor_divide.default, (X, 2), {}),
        (aten.arange.default, (5,), {}),
        (aten.arange.default, (5.0,), {"device": "meta"}),
        (aten.arange.start, (1, 5), {"device": "meta"}),
        (aten.div.Tensor, (indices(3), indices(3)), {}),
        (aten.add_.Tensor, (X, X), {}),
        (aten.mean.dim, (X, [-1]), {"dtype": torch.float32}),
        (aten.native_dropout.default, (X, 0.1, False), {}),
        (aten.empty_like.default, (X.expand(2, 6, 4, 8),), {"memory_format": torch.channels_last}),
    ],
)
def test_a_case_that_no_rule_knows_is_left_to_torch(func, args, kwargs):
    assert result_of(func, args, kwargs) is None


def test_rules_run_no_kernel_of_torchs_python_kind():
    """What the rules call must be cheap: allocations and sums, seen by a mode."""
    seen = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func._opname)
            return func(*args, **(kwargs or {}))

    with Seen():
        for func, args in CALLS.values():
            result_of(func, args, {})
    assert seen <= {"new_empty", "empty_strided", "sum"}
