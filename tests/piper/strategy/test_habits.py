"""A stack's `strategy` section is what holds where the strategy, the recipe and the settings say nothing."""

import pytest

from cost_models.errors import InputError
from piper.predict import Job, compile_job, predict
from piper.strategy import load_strategy
from simulator.plan import MemoryClass, StateDtypes, TaskKind

COST = "{launch_overhead: 1us, attention_kernel: flash2, source: x}"


@pytest.fixture
def stack(tmp_path):
    """Write a stack with a `strategy` section; returns its path."""

    def write(section):
        path = tmp_path / "stack.yaml"
        path.write_text(
            f"schema_version: 1\nname: mine\ndescription: x\nmodel: {{}}\nstrategy: {section}\ncost: {COST}\n"
        )
        return str(path)

    return write


def compiled(strategy="dp=2", *, gpus=2, stack="piper", settings=(), **options):
    job = Job(
        model="tiny-llama", strategy=load_strategy(strategy), gpus=gpus, seq_len=64, stack=stack,
        settings=tuple(settings), **options,
    )  # fmt: skip
    return compile_job(job)


def held(plan, memory_class):
    buffers = plan.device_plans[0].buffers
    return int(buffers.size_bytes[buffers.persistent & (buffers.memory_class == int(memory_class))].sum())


def moved(plan, kind):
    """Return the bytes of a step's collectives of a kind that move buckets."""
    table = plan.device_plans[0].tasks
    return int(table.size_bytes[(table.kind == int(kind)) & (table.bucket >= 0)].sum())


def numel(plan):
    return sum(bucket.padded_numel for bucket in plan.device_plans[0].buckets)


def test_a_stack_decides_what_the_strategy_leaves_open(stack):
    found = compiled(stack=stack("{zero: 1, recompute: full, sp: off, bucket_mb: 1}"))
    plan = found.plan
    assert plan.strategy == "pp=1,dp=2,zero=1,schedule=1f1b,recompute=full,micro_batch=1,bucket_mb=1"
    assert {name: found.defaults[name] for name in ("zero", "recompute")} == {"zero": 1, "recompute": "full"}
    assert len(plan.device_plans[0].buckets) > 1
    assert "sp" not in found.defaults  # nothing is cut over tp


def test_the_strategy_of_the_user_wins(stack):
    found = compiled("dp=2,zero=0,recompute=none", stack=stack("{zero: 1, recompute: full}"))
    assert "zero=0,schedule=1f1b,recompute=none" in found.plan.strategy
    assert not {"zero", "recompute"} & set(found.defaults)


def test_a_setting_wins_over_the_recipe_and_the_recipe_over_the_stack(stack, tmp_path):
    path = stack("{zero: 1, gradient_dtype: bf16, moment_dtype: bf16}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("schema_version: 1\nstrategy: {zero: 2, moment_dtype: fp32}\n")
    found = compiled(stack=path, recipe=str(recipe), settings=[("strategy.zero", "3")])
    assert "zero=3" in found.plan.strategy
    states = found.plan.training.states
    assert (states.gradient, states.reduce, states.moment) == ("bf16", "bf16", "fp32")
    assert found.defaults["gradient_dtype"] == "bf16"
    assert not {"zero", "moment_dtype"} & set(found.defaults)  # these the user chose


def test_zero_over_one_replica_is_not_assumed(stack):
    assert "zero=0" in compiled("dp=1", gpus=1, stack=stack("{zero: 1}")).plan.strategy


def test_stages_of_one_layer_where_layers_and_microbatches_divide(stack):
    one = stack("{vp: layers, schedule: 1f1b}")
    batches = {"gpus": 2, "stack": one, "micro_batch": 1}
    assert "vp=8" in compiled("pp=2", global_batch=4, **batches).plan.strategy  # of 16 layers
    assert "vp" not in compiled("pp=2", global_batch=3, **batches).plan.strategy
    assert "vp" not in compiled("pp=2,schedule=gpipe", global_batch=4, **batches).plan.strategy
    assert "vp" not in compiled("dp=2", global_batch=4, **batches).plan.strategy


@pytest.mark.parametrize(
    ("section", "field", "fix"),
    [
        ("{zeroo: 1}", "strategy.zeroo", "zero"),
        ("{micro_batch: 2}", "strategy.micro_batch", "known"),
        ("{gradient_dtype: fp8}", "strategy.gradient_dtype", "bf16"),
        ("{zero: 5}", "zero", "zero=1"),
        ("{overlap_param_gather: maybe}", "strategy.overlap_param_gather", "off"),
        ("{gradient_dtype: bf16, reduce_dtype: fp32}", "strategy.reduce_dtype", "bf16"),
    ],
)
def test_unknown_keys_and_values_are_refused_by_name(stack, section, field, fix):
    with pytest.raises(InputError) as caught:
        compiled(stack=stack(section))
    assert caught.value.field == field
    assert fix in caught.value.fix


def test_an_unknown_setting_is_refused():
    with pytest.raises(InputError) as caught:
        compiled(settings=[("strategy.gradient_dtyp", "bf16")])
    assert caught.value.field == "strategy.gradient_dtyp"
    assert "gradient_dtype" in caught.value.fix


def test_gradients_in_bf16_halve_buffers_and_messages():
    usual, short = compiled().plan, compiled(settings=[("strategy.gradient_dtype", "bf16")]).plan
    assert held(usual, MemoryClass.GRADIENTS) == 4 * numel(usual)
    assert held(short, MemoryClass.GRADIENTS) == 2 * numel(short)
    assert moved(usual, TaskKind.ALL_REDUCE) == 2 * moved(short, TaskKind.ALL_REDUCE)


def test_gradients_may_travel_shorter_than_they_are_summed():
    plan = compiled(settings=[("strategy.reduce_dtype", "bf16")]).plan
    assert held(plan, MemoryClass.GRADIENTS) == 4 * numel(plan)
    assert moved(plan, TaskKind.ALL_REDUCE) == 2 * numel(plan)


def test_parameters_may_travel_in_other_numbers():
    gathered = {
        dtype: moved(
            compiled("dp=2,zero=1", settings=[("strategy.gather_dtype", dtype)]).plan, TaskKind.ALL_GATHER
        )
        for dtype in ("bf16", "fp32")
    }
    assert gathered["fp32"] == 2 * gathered["bf16"]


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        ((), 12),
        ((("strategy.master_dtype", "none"),), 8),
        ((("strategy.moment_dtype", "bf16"),), 8),
        ((("strategy.master_dtype", "none"), ("strategy.moment_dtype", "bf16")), 4),
    ],
)
def test_masters_and_moments_decide_the_state_and_the_bytes_of_an_update(settings, state):
    plan = compiled(settings=settings).plan
    assert held(plan, MemoryClass.OPTIMIZER) == state * numel(plan)
    updates = [work for work in plan.works if work.label.startswith("UPDATE")]
    moved_bytes = sum(op.bytes for work in updates for op in work.operations if op.name == "adamw")
    master, moments = (4, state - 4) if ("strategy.master_dtype", "none") not in settings else (0, state)
    assert moved_bytes == numel(plan) * (4 + 2 * (master or 2) + 2 * moments + (2 if master else 0))


def test_cut_parameters_in_fp32_are_their_own_masters():
    usual = compiled("dp=2,zero=3").plan
    own = compiled("dp=2,zero=3", settings=[("strategy.shard_dtype", "fp32")]).plan
    shards = numel(own) // 2
    assert held(usual, MemoryClass.PARAMETERS) == 2 * shards
    assert held(own, MemoryClass.PARAMETERS) == 4 * shards
    assert held(own, MemoryClass.OPTIMIZER) == 8 * shards
    assert moved(usual, TaskKind.ALL_GATHER) == moved(own, TaskKind.ALL_GATHER)


def test_a_compute_dtype_of_fp32_needs_no_masters():
    plan = compiled(dtype="fp32").plan
    assert held(plan, MemoryClass.OPTIMIZER) == 8 * numel(plan)
    assert plan.training.states == StateDtypes.of("fp32")


def test_a_replicate_that_reduces_wider_than_it_sums_is_refused(tmp_path):
    file = tmp_path / "s.json"
    file.write_text(
        '[{"op": "mesh", "axes": {"dp": 2}}, '
        '{"op": "replicate", "filter": {"PP": "*"}, "reduce_dtype": "fp32"}]'
    )
    with pytest.raises(InputError) as caught:
        compiled(str(file), settings=[("strategy.gradient_dtype", "bf16")])
    assert caught.value.field == "replicate.reduce_dtype"


def step(*settings):
    job = Job(
        model="llama3-8b", strategy=load_strategy("dp=8,zero=1"), gpus=8, seq_len=2048, global_batch=16,
        settings=settings,
    )  # fmt: skip
    found = predict(job, steps=1)
    return found.result["breakdown_s"]["exposed_dp"], found.timeline.rows()


def test_buckets_let_reductions_overlap_with_the_last_backward():
    def first_reduction_and_last_backward(rows):
        starts = [start for _, _, task, start, _ in rows if "REDUCE_SCATTER" in task]
        return min(starts), max(end for _, _, task, _, end in rows if task.startswith("0B1"))

    whole_s, whole = step()
    in_buckets_s, in_buckets = step(("strategy.bucket_mb", "500"))
    first, last = first_reduction_and_last_backward(whole)
    assert first >= last
    first, last = first_reduction_and_last_backward(in_buckets)
    assert first < last
    assert in_buckets_s < whole_s / 2


def test_a_forward_begins_before_all_parameters_are_gathered_where_the_stack_overlaps_them():
    waiting_s, _ = step(("strategy.bucket_mb", "500"))
    overlapped_s, _ = step(("strategy.bucket_mb", "500"), ("strategy.overlap_param_gather", "on"))
    assert overlapped_s < 0.8 * waiting_s
