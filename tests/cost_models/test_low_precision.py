"""Products in fp8 and below: what is quantised, what is moved, and what is left in bf16."""

from dataclasses import replace

import pytest

from cost_models import Operation, OpKind
from cost_models.low_precision import quantised
from cost_models.ops import cut

X, W = 4096 * 1024, 2048 * 1024
"""Elements of the input [4096, 1024] and of the weights [2048, 1024]."""


def product(shape=(1, 4096, 2048, 1024), *, kind=OpKind.MATMUL, direction="fwd", tensor_dim=-1):
    outer, m, n, k = shape
    return Operation(
        kind=kind, name="aten.mm.default", shape=shape, dtype="bf16", flops=2 * m * n * k,
        bytes=2 * (m * k + m * n + outer * n * k), count=3, direction=direction, tensor_dim=tensor_dim,
        token_dim=1 if direction != "wgrad" else 3,
    )  # fmt: skip


def test_a_product_quantises_both_operands_and_writes_bf16():
    x, weights, multiplied = quantised(product(), "fp8")
    assert [each.kind for each in (x, weights)] == [OpKind.QUANTISATION] * 2
    assert (x.shape, weights.shape) == ((1, 4096, 1024), (1, 2048, 1024))
    assert (x.bytes, weights.bytes) == (5 * X, 5 * W)  # read twice in bf16, written once in fp8
    assert (multiplied.dtype, multiplied.bytes) == ("fp8", X + W + 2 * 4096 * 2048)
    assert {each.count for each in (x, weights, multiplied)} == {3}


@pytest.mark.parametrize(("dtype", "bytes_per_element"), [("mxfp8", 2 + 33 / 32), ("nvfp4", 4 + 9 / 16)])
def test_blocks_carry_their_scales(dtype, bytes_per_element):
    x, _, multiplied = quantised(product(), dtype)
    assert x.bytes == round(bytes_per_element * X)
    assert (
        multiplied.bytes == round((X + W) * (bytes_per_element % 2)) + 2 * 4096 * 2048
        if dtype == "mxfp8"
        else True
    )


def test_columns_cut_over_devices_cut_the_weights_and_rows_both():
    x, weights, _ = (cut(each, each.tensor_dim, 4) for each in quantised(product(tensor_dim=2), "fp8"))
    assert (x.bytes, weights.bytes) == (5 * X, 5 * W // 4)
    x, weights, _ = (cut(each, each.tensor_dim, 4) for each in quantised(product(tensor_dim=3), "fp8"))
    assert (x.bytes, weights.bytes) == (5 * X // 4, 5 * W // 4)


def test_fewer_tokens_leave_the_weights_whole():
    x, weights, multiplied = (cut(each, each.token_dim, 2) for each in quantised(product(), "fp8"))
    assert (x.bytes, weights.bytes) == (5 * X // 2, 5 * W)
    assert multiplied.bytes == X // 2 + W + 4096 * 2048


def test_a_cut_product_is_the_quantised_cut_product():
    for position in (1, 2, 3):
        assert (
            cut(quantised(product(), "fp8")[2], position, 4)
            == quantised(cut(product(), position, 4), "fp8")[2]
        )


def test_groups_quantise_all_their_weights_and_their_gradient_reads_two_row_tensors():
    groups = product((8, 4096, 2048, 1024), kind=OpKind.GROUPED_MATMUL)
    assert [each.shape for each in quantised(groups, "fp8")[:2]] == [(1, 4096, 1024), (8, 2048, 1024)]
    gradient = product((8, 4096, 2048, 1024), kind=OpKind.GROUPED_MATMUL, direction="wgrad")
    x, upper, multiplied = quantised(gradient, "fp8")
    assert [x.shape, upper.shape] == [(1, 4096, 1024), (1, 4096, 2048)]
    assert multiplied.bytes == X + 4096 * 2048 + 2 * 8 * W


@pytest.mark.parametrize(
    "kept",
    [
        product((1, 4096, 50257, 1024)),
        replace(product(), shape=(16, 256, 256, 64), name="aten.bmm.default"),
        Operation(kind=OpKind.NORM, name="norm", shape=(1, 16), dtype="bf16", flops=0, bytes=64),
    ],
    ids=["odd vocabulary", "attention", "norm"],
)
def test_what_tensor_cores_do_not_take_stays_as_it_is(kept):
    assert quantised(kept, "fp8") == (kept,)
