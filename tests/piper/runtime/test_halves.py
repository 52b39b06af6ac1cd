"""A backward cut in two makes the calls of the whole one, and BW the ones that no input's gradient needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piper.runtime.halves import Deferring, Halves, LateTensor, LateWork, Rehearsal
from piper.runtime.ledger import Ledger

ROWS, WIDTH = 6, 8
WEIGHT = WIDTH * WIDTH * 4
HIDDEN = ROWS * WIDTH * 4


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = {
        "x": torch.randn(ROWS, WIDTH, generator=generator),
        "w": torch.randn(WIDTH, WIDTH, generator=generator),
        "v": torch.randn(WIDTH, WIDTH, generator=generator),
        "b": torch.randn(WIDTH, generator=generator),
        "g": torch.randn(2, WIDTH, WIDTH, generator=generator),
    }
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def experts(t: dict[str, Tensor]) -> Tensor:
    ends = torch.tensor([2, ROWS], dtype=torch.int32)
    return torch._grouped_mm(t["x"].bfloat16(), t["g"].bfloat16(), offs=ends)


MODELS: dict[str, tuple[Callable[[dict[str, Tensor]], Tensor], tuple[str, ...]]] = {
    "linear": (lambda t: F.linear(t["x"], t["w"], t["b"]), ("w", "b")),
    "two linears": (lambda t: F.linear(F.silu(F.linear(t["x"], t["w"])), t["v"]), ("w", "v")),
    "one weight twice": (lambda t: F.linear(torch.tanh(F.linear(t["x"], t["w"])), t["w"]), ("w",)),
    "low rank": (lambda t: t["x"] @ (t["w"] @ t["v"]), ("w", "v")),
    "layer norm": (lambda t: F.linear(F.layer_norm(t["x"], (WIDTH,), t["b"]), t["w"]), ("b", "w")),
    "grouped": (experts, ("g",)),
    "scaled": (lambda t: (t["x"] * t["b"]).index_select(0, torch.tensor([0, 0, 3])), ("b",)),
    "parts": (lambda t: torch.cat((t["w"][:3], F.linear(t["x"], t["w"]).chunk(2)[1])), ("w",)),
    "unused": (lambda t: F.linear(t["x"], t["w"]), ("w", "v")),
}


def halves_of(model: str) -> Halves:
    compute, names = MODELS[model]
    tensors, rehearsal = values(), Rehearsal()
    with Ledger().saved():
        out = compute(tensors)
    seed = torch.ones_like(out)
    with rehearsal:
        wanted = [tensors["x"], *(tensors[name] for name in names)]
        found = torch.autograd.grad(out, wanted, seed, allow_unused=True)
        rehearsal.want(found[0])
    return rehearsal.halves()


def run_halves(model: str, ledger: Ledger) -> tuple[Tensor, LateWork]:
    compute, names = MODELS[model]
    tensors, work = values(), LateWork(ledger=ledger)
    with ledger.saved():
        out = compute(tensors)
    seed = torch.ones_like(out)
    with Deferring(halves_of(model), work) as deferring:
        wanted = [tensors["x"], *(tensors[name] for name in names)]
        found = torch.autograd.grad(out, wanted, seed, allow_unused=True)
    deferring.check_complete()
    work.keep(dict(zip(names, found[1:], strict=True)))
    return found[0], work


@pytest.mark.parametrize("model", MODELS)
def test_both_halves_give_the_bits_of_the_whole_backward(model: str) -> None:
    compute, _ = MODELS[model]
    whole, ledger = values(), Ledger()
    out = compute(whole)
    out.backward(torch.ones_like(out))
    inputs, work = run_halves(model, ledger)
    assert torch.equal(inputs, whole["x"].grad)
    for name, gradient in work.finish():
        assert not isinstance(gradient, LateTensor)
        expected = whole[name].grad
        assert (gradient is None) == (expected is None)
        assert expected is None or torch.equal(gradient, expected)
    assert not any(ledger.totals)


def late(model: str) -> list[str]:
    return [operator.function.__name__ for operator in halves_of(model) if operator.late]


def test_products_for_weights_and_sums_for_biases_wait() -> None:
    assert late("linear").count("mm.default") == 1
    assert "sum.dim_IntList" in late("linear")
    assert late("two linears").count("mm.default") == 2
    assert late("grouped").count("_grouped_mm.default") == 1


def test_a_kernel_that_makes_both_gradients_does_not_wait_and_its_gradient_does() -> None:
    assert "native_layer_norm_backward.default" not in late("layer norm")
    _, work = run_halves("layer norm", Ledger())
    assert type(work.gradients["b"]) is Tensor
    assert type(work.gradients["w"]) is LateTensor


def test_between_the_halves_live_the_inputs_of_linear_layers_and_gradients_of_their_outputs() -> None:
    ledger = Ledger()
    _, work = run_halves("two linears", ledger)
    # x, silu's result, and the gradients of both products
    assert sum(ledger.totals) == 4 * HIDDEN
    for _ in work.finish():
        pass
    assert sum(ledger.totals) == 0


def test_memory_goes_call_by_call_while_the_second_half_runs() -> None:
    ledger = Ledger()
    _, work = run_halves("two linears", ledger)
    totals = [sum(ledger.totals) for _ in work.finish()]
    assert totals[0] > totals[-1]


def test_what_a_kernel_of_the_first_half_overwrites_is_read_before() -> None:
    """BI would change `y` in place after BW's call of B read it, before BW really makes that call."""
    y, x = torch.ones(3), torch.zeros(3)
    rehearsal = Rehearsal()
    with rehearsal:
        y.mul(3)  # for a parameter
        y.mul_(2)
        rehearsal.want(x.add(y))
    assert [operator.late for operator in rehearsal.halves()] == [False, False, False]


def test_another_operator_than_rehearsed_is_an_error() -> None:
    with (
        pytest.raises(Exception, match="where the rehearsal had"),
        Deferring(halves_of("linear"), LateWork(ledger=Ledger())),
    ):
        torch.zeros(2).cosh()
