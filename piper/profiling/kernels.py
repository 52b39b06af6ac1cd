"""A case -> the call that is timed: the kernels that training calls, in the layouts in which it calls them.

To measure another kernel: write a function from case and device to a call, and add one line to `KERNELS`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from piper.profiling.cases import Case

Call = Callable[[], object]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def call_of(case: Case, *, device: str) -> Call:
    """Return what to time; its inputs are made here."""
    return KERNELS[case.op](case, device)


def _random(case: Case, device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=DTYPES[case.dtype])


def _matmul(case: Case, device: str) -> Call:
    """Multiply as a linear layer does: inputs by transposed weights; gradients by weights; transposed."""
    batch, m, n, k = case.shape
    if case.kernel == "bmm":
        left, right = _random(case, device, batch, m, k), _random(case, device, batch, k, n)
        return lambda: torch.bmm(left, right)
    left, right = {
        "fwd": lambda: (_random(case, device, m, k), _random(case, device, n, k).t()),
        "dgrad": lambda: (_random(case, device, m, k), _random(case, device, k, n)),
        "wgrad": lambda: (_random(case, device, k, m).t(), _random(case, device, k, n)),
    }[case.direction]()
    return lambda: torch.mm(left, right)


def _attention(case: Case, device: str) -> Call:
    batch, heads, kv_heads, seq_q, seq_kv, size = case.shape
    query = _random(case, device, batch, heads, seq_q, size)
    key, value = (_random(case, device, batch, kv_heads, seq_kv, size) for _ in range(2))

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=heads != kv_heads
        )

    return forward if case.direction == "fwd" else _backward(forward, [query, key, value])


def _norm(case: Case, device: str) -> Call:
    x, weight, bias = _random(case, device, *case.shape), *_pair(case, device)

    def forward() -> Tensor:
        return functional.layer_norm(x, (case.shape[1],), weight, bias)

    return forward if case.direction == "fwd" else _backward(forward, [x, weight, bias])


def _softmax(case: Case, device: str) -> Call:
    x = _random(case, device, *case.shape)

    def forward() -> Tensor:
        return torch.log_softmax(x, dim=-1)

    return forward if case.direction == "fwd" else _backward(forward, [x])


def _cross_entropy(case: Case, device: str) -> Call:
    x = _random(case, device, *case.shape)
    labels = torch.randint(case.shape[1], (case.shape[0],), device=device)
    return lambda: functional.cross_entropy(x, labels)


def _embedding(case: Case, device: str) -> Call:
    rows, hidden = case.shape
    table = _random(case, device, rows, hidden)
    tokens = torch.randint(rows, (rows,), device=device)
    return lambda: functional.embedding(tokens, table)


def _elementwise(case: Case, device: str) -> Call:
    a, b = _random(case, device, *case.shape), _random(case, device, *case.shape)
    calls: dict[str, Call] = {
        "add": lambda: a + b,
        "mul": lambda: a * b,
        "silu": lambda: functional.silu(a),
        "scale": lambda: a * 0.5,
    }
    return calls[case.kernel]


def _reduction(case: Case, device: str) -> Call:
    x = _random(case, device, *case.shape)
    return lambda: x.double().square().sum()


def _copy(case: Case, device: str) -> Call:
    x = _random(case, device, *case.shape)
    if case.kernel == "clone":
        return x.clone
    halves = x[: len(x) // 2].clone(), x[len(x) // 2 :].clone()
    return lambda: torch.cat(halves)


def _optimizer(case: Case, device: str) -> Call:
    """Step as the runtime does on a CPU, kernel by kernel; on a GPU by the fused kernel of torch."""
    if device == "cuda":
        parameter = _random(case, device, *case.shape).requires_grad_()
        parameter.grad = _random(case, device, *case.shape)
        return torch.optim.AdamW([parameter], fused=True).step
    master, gradient, mean = (_random(case, device, *case.shape) for _ in range(3))
    square = mean.abs()

    def step() -> None:
        master.mul_(1 - 1e-5)
        mean.lerp_(gradient, 0.1)
        square.mul_(0.999).addcmul_(gradient, gradient, value=1e-3)
        master.addcdiv_(mean, (square.sqrt() / 0.9).add_(1e-8), value=-1e-3)

    return step


def _pair(case: Case, device: str) -> tuple[Tensor, Tensor]:
    return _random(case, device, case.shape[1]), _random(case, device, case.shape[1])


def _backward(forward: Callable[[], Tensor], inputs: list[Tensor]) -> Call:
    """Return the backward of a forward that is called once."""
    for tensor in inputs:
        tensor.requires_grad_()
    result = forward()
    seed = torch.randn_like(result)
    return lambda: torch.autograd.grad(result, inputs, seed, retain_graph=True)


KERNELS: dict[str, Callable[[Case, str], Call]] = {
    "matmul": _matmul,
    "attention": _attention,
    "norm": _norm,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "elementwise": _elementwise,
    "reduction": _reduction,
    "copy": _copy,
    "optimizer": _optimizer,
}
