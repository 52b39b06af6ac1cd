"""Parts of the runtime that need no second process."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cost_models.errors import InternalError
from piper.errors import ModelError, RunFailedError
from piper.runtime.devices.cpu import CpuDevice
from piper.runtime.dropout import DropoutKeys, KeyedDropout, keyed_dropout
from piper.runtime.init import batch_of_step, initial_value, samples_of
from piper.runtime.ledger import Ledger
from piper.runtime.optimizer import ShardState, clip_scale, sum_of_squares
from piper.runtime.pool import Pool
from piper.runtime.reductions import sum_in_order
from piper.runtime.routes import Routes, counted_ranges, offsets, owned_buckets
from piper.runtime.settings import default_optimizer
from piper.runtime.step import StepState
from piper.runtime.verify import relative_error
from simulator.plan import MemoryClass
from tests.piper.runtime.jobs import plan_of


@settings(deadline=None, max_examples=20)
@given(cuts=st.lists(st.integers(1, 99), max_size=4), name=st.sampled_from(["adamw", "sgd", "momentum"]))
def test_shards_are_updated_bit_by_bit_as_torch_updates_the_whole(cuts: list[int], name: str) -> None:
    start = torch.randn(100, generator=torch.Generator().manual_seed(1))
    whole = start.clone()
    facts = default_optimizer(name)
    options = {"lr": facts.learning_rate, "weight_decay": facts.weight_decay, "foreach": False}
    if name == "momentum":
        options["momentum"] = facts.momentum
    reference = (torch.optim.AdamW if name == "adamw" else torch.optim.SGD)([whole], **options)
    bounds = sorted({0, 100, *cuts})
    shards = [start[a:b].clone() for a, b in pairwise(bounds)]
    states = [ShardState.new(default_optimizer(name), shard) for shard in shards]
    for step in range(4):
        gradient = torch.randn(100, generator=torch.Generator().manual_seed(2 + step))
        whole.grad = gradient.clone()
        reference.step()
        for state, (a, b) in zip(states, pairwise(bounds), strict=True):
            state.step(gradient[a:b])
    assert torch.equal(torch.cat(shards), whole)


def test_clipping_is_that_of_torch() -> None:
    gradient = torch.arange(10.0)
    parameter = nn.Parameter(torch.zeros(10))
    parameter.grad = gradient.clone()
    expected = nn.utils.clip_grad_norm_([parameter], 3.0)
    norm, factor = clip_scale(float(sum_of_squares(gradient, ((0, 4), (4, 10)))), 3.0)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(gradient * factor, parameter.grad, rtol=1e-6)
    assert clip_scale(1.0, 3.0) == (1.0, 1.0)


def test_ordered_sums_add_first_to_last() -> None:
    parts = torch.tensor([[1.0], [1e8], [-1e8]])
    assert sum_in_order(parts).item() == 0.0
    assert sum_in_order(parts.flip(0)).item() == 1.0


@pytest.mark.parametrize("text", ["pp=2,dp=2", "pp=2,dp=2,zero=1", "dp=3,zero=1", "pp=3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_logical_element_counts_once_in_the_norm(text: str, tied: bool) -> None:
    plan = plan_of(text, tied=tied, global_batch=6)
    counts = {p.name: torch.zeros(p.numel, dtype=torch.int64) for p in plan.parameters}
    for rank in range(plan.num_ranks):
        home = plan.pipeline_rank_of(rank)
        for bucket in owned_buckets(plan, home):
            for start, end in counted_ranges(plan, rank, bucket):
                for name, (low, high) in offsets(plan, home, bucket).items():
                    counts[name][max(start - low, 0) : max(min(end, high) - low, 0)] += 1
    assert all((count == 1).all() for count in counts.values())


def test_initial_values_depend_on_seed_and_name_only() -> None:
    first = initial_value("a.weight", (4, 4), seed=0)
    assert torch.equal(first, initial_value("a.weight", (4, 4), seed=0))
    assert not torch.equal(first, initial_value("b.weight", (4, 4), seed=0))
    assert not torch.equal(first, initial_value("a.weight", (4, 4), seed=1))
    assert initial_value("large.weight", (300, 300), seed=0).std() == pytest.approx(0.02, rel=0.02)
    assert torch.equal(initial_value("norm.weight", (3,), seed=0), torch.ones(3))
    assert torch.equal(initial_value("x.bias", (3,), seed=0), torch.zeros(3))


def test_every_sample_is_taken_once_by_any_layout() -> None:
    plan = plan_of("pp=2,dp=2,micro_batch=3", micro_batch=3)
    taken = [
        sample
        for replica in range(2)
        for microbatch in range(plan.training.num_microbatches)
        for sample in samples_of(plan, replica=replica, microbatch=microbatch)
    ]
    assert taken == list(range(8))
    batch = batch_of_step(plan, seed=0, step=0)
    assert batch.shape == (8, plan.training.seq_len + 1)
    assert int(batch.min()) >= 0
    assert int(batch.max()) < plan.model.vocabulary
    assert not torch.equal(batch, batch_of_step(plan, seed=0, step=1))


def test_dropout_masks_belong_to_samples() -> None:
    x = torch.ones(4, 50)
    whole = keyed_dropout(x, 0.5, keys=DropoutKeys(seed=0, step=0, samples=range(4)), operation=1)
    part = keyed_dropout(x[2:], 0.5, keys=DropoutKeys(seed=0, step=0, samples=(2, 3)), operation=1)
    assert torch.equal(whole[2:], part)
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    other = keyed_dropout(x, 0.5, keys=DropoutKeys(seed=0, step=1, samples=range(4)), operation=1)
    assert not torch.equal(whole, other)


def test_an_ordinary_module_drops_what_segments_drop() -> None:
    x = torch.ones(2, 50)
    keys = DropoutKeys(seed=3, step=1, samples=(5, 6))
    module = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0), nn.Dropout(0.2))
    with KeyedDropout(keys):
        found = module(x)
        untouched = module.eval()(x)
    once = keyed_dropout(x, 0.5, keys=keys, operation=0)
    assert torch.equal(found, keyed_dropout(once, 0.2, keys=keys, operation=1))
    assert torch.equal(untouched, x)


def test_dropout_needs_the_samples_first() -> None:
    with pytest.raises(ModelError) as caught:
        keyed_dropout(torch.ones(3, 2), 0.5, keys=DropoutKeys(seed=0, step=0, samples=(0, 1)), operation=0)
    assert caught.value.field == "shape"
    assert "batch dimension first" in caught.value.fix


def test_the_ledger_counts_shared_storage_once() -> None:
    ledger = Ledger()
    tensor = torch.zeros(10)
    keys = [ledger.hold(tensor, MemoryClass.ACTIVATIONS), ledger.hold(tensor[:5], MemoryClass.ACTIVATIONS)]
    ledger.mark()
    ledger.release(keys[0])
    ledger.mark()
    ledger.release(keys[1])
    ledger.mark()
    assert [totals[MemoryClass.ACTIVATIONS] for _, totals in ledger.log] == [40, 0]
    assert ledger.peak_bytes == 40


def test_a_saved_tensor_that_is_overwritten_is_noticed() -> None:
    x = torch.ones(3, requires_grad=True)
    with Ledger().saved():
        y = x * 2
        z = (y * y).sum()
    y.detach().add_(1)
    with pytest.raises(RunFailedError, match="overwritten in place"):
        z.backward()


def _step_state() -> StepState:
    routes = Routes(plan=plan_of("pp=2"), pipeline_rank=1)
    return StepState.new(
        routes,
        number=0,
        batch=torch.zeros(8, 13),
        ledger=Ledger(),
        pool=Pool(CpuDevice()),
        device=CpuDevice(),
    )


def test_reading_a_tensor_that_is_not_there_blames_the_plan() -> None:
    with pytest.raises(InternalError, match="read before made"):
        _step_state().read(0, (2, 0))


def test_a_tensor_that_nobody_reads_is_noticed_at_the_end() -> None:
    state = _step_state()
    state.put(0, (2, 0), torch.zeros(1))
    with pytest.raises(InternalError, match="left over after step 0"):
        state.check_empty()


def test_gradients_of_several_consumers_are_summed_last_consumer_first() -> None:
    state = _step_state()
    for order, value in (((1, 3), 1.0), ((1, 5), 1e8), ((1, 4), -1e8)):
        state.add_gradient(0, (2, 0), (order, torch.tensor(value)))
    total = state.take_gradient(0, (2, 0))
    assert total is not None
    assert total.item() == 1.0
    assert state.take_gradient(0, (2, 0)) is None


def test_gradients_are_taken_by_stage() -> None:
    state = _step_state()
    state.add_gradient(0, (2, 0), ((1, 3), torch.tensor(1.0)))
    state.add_gradient(0, (2, 0), ((2, 6), torch.tensor(2.0)))
    taken = [state.take_gradient(0, (2, 0), stage=stage) for stage in (2, 2, 1)]
    assert [None if t is None else t.item() for t in taken] == [2.0, None, 1.0]


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [(1.1, 1.0, 0.1), (0.5, 0.0, 0.5), (float("nan"), 1.0, float("inf")), (2.0, 2.0, 0.0)],
)
def test_relative_error(found: float, expected: float, error: float) -> None:
    a, b = torch.tensor([found]).double(), torch.tensor([expected]).double()
    assert relative_error(a, b, scale=b) == pytest.approx(error)


def test_relative_error_is_measured_against_the_whole_tensor() -> None:
    whole: Tensor = torch.tensor([100.0, 1.0])
    assert relative_error(torch.tensor([2.0]), whole[1:], scale=whole) == pytest.approx(0.01)
