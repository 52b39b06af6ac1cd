"""Cutting a kernel over devices: one dimension of its shape, FLOPs and bytes with it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.errors import CostModelError
from cost_models.ops import Operation, OpKind, cut, merge_equal


def matmul(batch, m, n, k, *, extra=0):
    return Operation(
        kind=OpKind.MATMUL,
        name="mm",
        shape=(batch, m, n, k),
        dtype="bf16",
        flops=2 * batch * m * n * k,
        bytes=2 * batch * (m * k + k * n + m * n) + extra,
    )


def attention(*, heads=32, kv_heads=8, seq=128, direction="fwd"):
    batch, head_dim, element = 2, 64, 2
    queries, keys = batch * heads * seq * head_dim * element, batch * kv_heads * seq * head_dim * element
    times = 2 if direction == "fwd" else 4
    return Operation(
        kind=OpKind.ATTENTION,
        name="flash",
        shape=(batch, heads, kv_heads, seq, seq, head_dim),
        dtype="bf16",
        flops=4 * batch * heads * seq * seq * head_dim,
        bytes=times * (queries + keys) + 4 * batch * heads * seq,
        direction=direction,
    )


def elementwise(elements):
    return Operation(
        kind=OpKind.ELEMENTWISE,
        name="add",
        shape=(elements,),
        dtype="bf16",
        flops=elements,
        bytes=6 * elements,
    )


@given(
    sizes=st.tuples(*[st.integers(1, 64)] * 4),
    position=st.integers(0, 3),
    parts=st.integers(1, 16),
)
def test_a_cut_matmul_costs_what_a_matmul_of_the_smaller_shape_does(sizes, position, parts):
    smaller = list(sizes)
    smaller[position] = -(-sizes[position] // parts)
    assert cut(matmul(*sizes), position, parts) == matmul(*smaller)


def test_the_bias_of_a_matmul_is_cut_in_proportion():
    assert cut(matmul(1, 8, 64, 32, extra=128), 2, 4) == matmul(1, 8, 16, 32, extra=32)


def grouped(rows, n, k, *, groups=8):
    return Operation(
        kind=OpKind.GROUPED_MATMUL, name="grouped", shape=(groups, rows, n, k), dtype="bf16",
        flops=2 * rows * n * k, bytes=2 * (rows * k + groups * k * n + rows * n),
    )  # fmt: skip


def test_a_grouped_matmul_keeps_the_weights_of_all_its_groups_when_rows_are_cut():
    assert cut(grouped(1024, 64, 32), 1, 4) == grouped(256, 64, 32)
    assert cut(grouped(1024, 64, 32), 2, 4) == grouped(1024, 16, 32)


def test_fewer_groups_of_a_grouped_matmul_read_fewer_weights_for_the_same_rows_and_flops():
    assert cut(grouped(1024, 64, 32), 0, 4) == grouped(1024, 64, 32, groups=2)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_query_heads_take_their_key_heads_along_down_to_one(direction):
    assert cut(attention(direction=direction), 1, 4) == attention(heads=8, kv_heads=2, direction=direction)
    assert cut(attention(direction=direction), 1, 16) == attention(heads=2, kv_heads=1, direction=direction)


def test_fewer_queries_still_read_all_keys():
    whole = attention()
    part = cut(whole, 3, 2)
    keys = 2 * 2 * (2 * 8 * 128 * 64)
    assert part.shape == (2, 32, 8, 64, 128, 64)
    assert part.flops == whole.flops // 2
    assert part.bytes == (whole.bytes - keys) // 2 + keys


def test_fewer_rows_still_clear_the_whole_table():
    rows, hidden, entries = 64, 16, 1000
    gradient = Operation(
        kind=OpKind.EMBEDDING, name="embedding_backward", shape=(rows, hidden, entries), dtype="fp32",
        flops=rows * hidden, bytes=4 * hidden * (rows + entries) + 8 * rows, direction="wgrad",
    )  # fmt: skip
    assert cut(gradient, 0, 2).bytes == 4 * hidden * (rows // 2 + entries) + 8 * rows // 2
    assert cut(gradient, 2, 10).bytes == 4 * hidden * (rows + entries // 10) + 8 * rows


def test_an_uneven_cut_gives_the_largest_share():
    assert cut(elementwise(10), 0, 3) == elementwise(4)


def test_no_position_or_one_part_leaves_a_kernel_as_it_is():
    assert cut(elementwise(10), -1, 4) == elementwise(10)
    assert cut(attention(), 1, 1) == attention()


def test_bytes_that_the_shape_does_not_explain_are_cut_in_proportion():
    """A product of a matrix with itself reads it once."""
    squared = Operation(
        kind=OpKind.MATMUL, name="mm", shape=(1, 8, 8, 4), dtype="bf16", flops=512, bytes=2 * (8 * 4 + 8 * 8)
    )
    assert cut(squared, 1, 2).bytes == squared.bytes // 2


@pytest.mark.parametrize("position", [-2, 4])
def test_a_position_outside_of_the_shape_is_refused(position):
    with pytest.raises(CostModelError) as caught:
        cut(matmul(1, 2, 3, 4), position, 2)
    assert (caught.value.field, caught.value.value) == ("position", position)
    assert "tensor_dim" in caught.value.fix


@pytest.mark.parametrize("parts", [0, -1, True, 1.5])
def test_a_number_of_parts_that_cannot_be_is_refused(parts):
    with pytest.raises(CostModelError) as caught:
        cut(matmul(1, 2, 3, 4), 1, parts)
    assert caught.value.field == "parts"


def test_kernels_that_are_cut_in_different_dimensions_are_not_joined():
    plain = elementwise(8)
    other = replace(plain, tensor_dim=0)
    assert merge_equal([plain, other, plain]) == (replace(plain, count=2), other)
    assert merge_equal([plain, replace(plain, token_dim=0)]) == (plain, replace(plain, token_dim=0))
