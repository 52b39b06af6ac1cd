"""Habits of frameworks that only some have: factors of activations, buffers, experts, optimizers."""

import pytest

from cost_models.errors import InputError
from piper.models import find_model
from piper.predict import Job, compile_job
from piper.strategy import load_strategy
from simulator.plan import MemoryClass


def held(strategy, *settings, memory_class, gpus=2, **options):
    job = Job(
        model="tiny-llama",
        strategy=load_strategy(strategy),
        gpus=gpus,
        seq_len=64,
        settings=settings,
        **options,
    )
    buffers = compile_job(job).plan.device_plans[0].buffers
    return int(buffers.size_bytes[buffers.memory_class == int(memory_class)].sum())


def test_a_framework_may_keep_more_where_there_is_a_pipeline():
    settings = (("strategy.pipeline_activation_factor", "2"),)
    for strategy, factor in (("pp=2", 2), ("dp=2", 1)):
        plain, more = (held(strategy, *s, memory_class=MemoryClass.ACTIVATIONS) for s in ((), settings))
        assert more == pytest.approx(factor * plain, rel=1e-3)


def test_buffers_of_a_framework_are_held_on_every_device():
    plain, more = (
        held("dp=2", *settings, memory_class=MemoryClass.WORKSPACE)
        for settings in ((), (("strategy.framework_mb", "100"),))
    )
    assert more - plain == 100 * 2**20


@pytest.mark.parametrize(
    ("optimizer", "state"), [("adamw", 12), ("adamw8bit", 6), ("momentum", 8), ("sgd", 4)]
)
def test_an_optimizer_keeps_its_moments_and_a_master(optimizer, state):
    parameters = held("dp=2", memory_class=MemoryClass.PARAMETERS, optimizer=optimizer)
    assert held("dp=2", memory_class=MemoryClass.OPTIMIZER, optimizer=optimizer) == state * parameters // 2


def test_moments_that_the_user_chose_win_over_those_of_the_optimizer():
    chosen = ("strategy.moment_dtype", "fp32")
    eight, whole = (
        held("dp=2", *settings, memory_class=MemoryClass.OPTIMIZER, optimizer="adamw8bit")
        for settings in ((), (chosen,))
    )
    assert whole == 2 * eight


def test_gradients_may_be_summed_as_the_job_computes():
    settings = (("strategy.gradient_dtype", "compute"),)
    sizes = [
        held("dp=2", *settings, memory_class=MemoryClass.GRADIENTS, dtype=dtype) for dtype in ("bf16", "fp32")
    ]
    assert sizes[1] == 2 * sizes[0]


def test_experts_are_cut_as_the_rest_where_the_stack_says_so():
    def plan(*settings):
        job = Job(
            model="tiny-moe", strategy=load_strategy("tp=2,dp=2,ep=2"), gpus=4, seq_len=64, settings=settings
        )
        return compile_job(job).plan.strategy

    assert "etp" not in plan()
    assert "ep=2,etp=2" in plan(("strategy.etp", "tp"))


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("activation_factor", "0.5", "1.2"),
        ("pipeline_activation_factor", "much", "1.2"),
        ("framework_mb", "-1", "1024"),
        ("etp", "2", "tp"),
        ("selective", "some", "ops"),
    ],
)
def test_values_out_of_range_are_refused_by_name(key, value, fix):
    with pytest.raises(InputError) as caught:
        held("dp=2", (f"strategy.{key}", value), memory_class=MemoryClass.WORKSPACE)
    assert caught.value.field == f"strategy.{key}"
    assert fix in caught.value.fix


def test_gradients_are_held_once_more_where_there_is_no_pipeline():
    settings = (("strategy.gradient_copy", "fp32"), ("strategy.gradient_dtype", "bf16"))
    for strategy, factor in (("dp=2", 6), ("pp=2", 2)):
        parameters = held(strategy, *settings, memory_class=MemoryClass.PARAMETERS)
        assert held(strategy, *settings, memory_class=MemoryClass.GRADIENTS) == factor * parameters // 2


def test_products_add_the_gradients_of_weights_themselves_where_the_stack_says_so():
    def summed(*settings):
        job = Job(model="tiny-moe", strategy=load_strategy("dp=2"), gpus=2, seq_len=64, settings=settings)
        plan = compile_job(job).plan
        operations = [op for work in plan.works for op in work.operations if op.name == "accumulate_gradient"]
        return sum(op.shape[0] * op.count for op in operations)

    source = find_model("tiny-moe")
    table = source.shape.vocabulary * source.shape.hidden
    norms = (2 * len(source.shape.layers) + 1) * source.shape.hidden
    assert summed() == source.n_parameters
    assert summed(("strategy.gradient_sum", "product")) == table + norms
