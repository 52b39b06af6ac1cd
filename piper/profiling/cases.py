"""What is measured, as data: kernels by shape, sizes of messages, numbers of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel to time: columns of the table, see `cost_models.calibration.table`."""

    op: str
    kernel: str
    dtype: str
    shape: tuple[int, ...]
    direction: str = "fwd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the kernels of a device are that tell its figures apart.

    Args:
        dtypes: of matmuls and attention.
        matmuls: [m, n, k]; every one forward, for inputs and for weights.
        batched: [batch, m, n, k].
        attentions: [batch, heads, kv_heads, seq, head_dim], causal.
        rows: [rows, columns] of norms, softmax, cross entropy and embedding.
        elements: of elementwise kernels and copies.
        parameters: of the optimizer and the norm of gradients.
        messages: bytes.
    """

    dtypes: tuple[str, ...]
    matmuls: tuple[tuple[int, int, int], ...]
    batched: tuple[tuple[int, int, int, int], ...]
    attentions: tuple[tuple[int, int, int, int, int], ...]
    rows: tuple[tuple[int, int], ...]
    elements: tuple[int, ...]
    parameters: tuple[int, ...]
    messages: tuple[int, ...]


CPU = Sizes(
    dtypes=("fp32",),
    matmuls=(
        (16, 16, 16), (64, 64, 64), (64, 192, 64), (64, 64, 192), (64, 256, 64), (128, 128, 128),
        (256, 256, 256), (64, 512, 512), (512, 512, 512),
    ),
    batched=((8, 64, 64, 8), (8, 64, 64, 64), (4, 128, 128, 64)),
    attentions=(
        (1, 8, 4, 64, 8), (1, 4, 4, 16, 8), (1, 8, 8, 128, 64), (2, 4, 4, 128, 32), (1, 4, 4, 512, 64),
    ),
    rows=((64, 64), (64, 256), (512, 256), (512, 1024), (1024, 4096)),
    elements=(64, 4096, 12288, 65536, 2**20),
    parameters=(2**18, 2**20, 2**21),
    messages=(4, 4096, 16384, 65536, 2**18, 2**20, 2**22),
)  # fmt: skip

GPU = Sizes(
    dtypes=("bf16",),
    matmuls=tuple(product((512, 2048, 8192), (1024, 4096, 8192), (1024, 4096, 8192))),
    batched=((32, 512, 512, 128), (64, 1024, 128, 1024), (8, 2048, 2048, 512)),
    attentions=(
        (4, 32, 8, 512, 128), (2, 32, 8, 1024, 128), (1, 32, 8, 2048, 128), (1, 32, 8, 4096, 128),
        (1, 32, 8, 8192, 128), (1, 16, 16, 2048, 64), (2, 16, 16, 4096, 64), (8, 16, 16, 1024, 64),
    ),
    rows=((2048, 1024), (2048, 4096), (8192, 4096), (8192, 8192), (4096, 32768)),
    elements=(2**16, 2**20, 2**22, 2**24, 2**26),
    parameters=(2**20, 2**24, 2**26),
    messages=tuple(4**power for power in range(5, 16)),
)  # fmt: skip

SIZES = {"cpu": CPU, "cuda": GPU}
MATMULS = ("fwd", "dgrad", "wgrad")
_ELEMENTWISE = (
    ("elementwise", "add"), ("elementwise", "mul"), ("elementwise", "silu"), ("elementwise", "scale"),
    ("copy", "clone"), ("copy", "cat"),
)  # fmt: skip
_FULL_ROWS = 512
"""Below, a backward costs less than calling autograd for it."""

_QUICK = 2
"""A quick profile takes every second shape."""


def quick(sizes: Sizes) -> Sizes:
    """Return about half of the shapes: the first, and every second one after it."""
    return replace(
        sizes,
        **{name: getattr(sizes, name)[::_QUICK] for name in ("matmuls", "batched", "attentions", "messages")},
    )


def cases(sizes: Sizes) -> Iterator[Case]:
    """Yield every kernel to time."""
    yield from _products(sizes)
    yield from _rows(sizes)
    dtype = sizes.dtypes[0]
    for count in sizes.elements:
        for op, kernel in _ELEMENTWISE:
            yield Case(op=op, kernel=kernel, dtype=dtype, shape=(count,))
    for count in sizes.parameters:
        yield Case(op="reduction", kernel="sum_of_squares", dtype="fp32", shape=(count,))
        yield Case(op="optimizer", kernel="adamw", dtype="fp32", shape=(count,))


def _products(sizes: Sizes) -> Iterator[Case]:
    for dtype in sizes.dtypes:
        for (m, n, k), direction in product(sizes.matmuls, MATMULS):
            yield Case(op="matmul", kernel="mm", dtype=dtype, shape=(1, m, n, k), direction=direction)
        for shape in sizes.batched:
            yield Case(op="matmul", kernel="bmm", dtype=dtype, shape=shape)
        for (batch, heads, kv_heads, seq, size), direction in product(sizes.attentions, ("fwd", "bwd")):
            whole = (batch, heads, kv_heads, seq, seq, size)
            yield Case(op="attention", kernel="sdpa", dtype=dtype, shape=whole, direction=direction)


def _rows(sizes: Sizes) -> Iterator[Case]:
    dtype = sizes.dtypes[0]
    for shape in sizes.rows:
        for direction in ("fwd", "bwd") if shape[0] >= _FULL_ROWS else ("fwd",):
            yield Case(op="norm", kernel="layer_norm", dtype=dtype, shape=shape, direction=direction)
            yield Case(op="softmax", kernel="log_softmax", dtype=dtype, shape=shape, direction=direction)
        yield Case(op="cross_entropy", kernel="cross_entropy", dtype=dtype, shape=shape)
        yield Case(op="embedding", kernel="embedding", dtype=dtype, shape=shape)
