"""Kernels of a job come from its stack, its recipe and --set, in this order, and from the device."""

import pytest

from cost_models.errors import InputError
from piper.capture import KernelChoice
from piper.predict import Job, load_hardware, predict
from piper.recipe import kernels_of, stack_of
from piper.strategy import load_strategy


def hardware(cluster="dgx-h100", stack="piper"):
    return load_hardware(cluster, stack)[1]


def test_the_stack_of_piper_runs_flash_attention_of_its_device():
    assert kernels_of(hardware()) == KernelChoice()
    assert kernels_of(hardware("local-cpu")) == KernelChoice(device="cpu")


def test_a_setting_wins_over_the_recipe_and_the_recipe_over_the_stack(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("schema_version: 1\nmodel: {attention: math, cross_entropy: chunked}\n")
    found = kernels_of(hardware(), recipe=str(recipe), settings=[("model.attention", "fused_softmax")])
    assert found == KernelChoice(attention="fused_softmax", cross_entropy="chunked")


@pytest.mark.parametrize(
    ("settings", "field", "fix"),
    [
        ([("model.atention", "math")], "model.atention", "attention"),
        ([("model.attention", "maths")], "attention", "math"),
        ([("modle.attention", "math")], "modle.attention", "model.attention"),
        ([("model.device", "cpu")], "model.device", ""),
        ([("cost.expandable_segment", "on")], "cost.expandable_segment", "expandable_segments"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_known_one(settings, field, fix):
    with pytest.raises(InputError) as caught:
        predict(Job(model="tiny-llama", settings=tuple(settings)))
    assert caught.value.field == field
    assert fix in caught.value.fix


@pytest.mark.parametrize("text", ["modell: {attention: math}\n", "model: [math]\n"])
def test_a_recipe_of_another_form_is_refused(tmp_path, text):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(InputError) as caught:
        kernels_of(hardware(), recipe=str(recipe))
    assert caught.value.where == str(recipe)


def test_segments_grow_where_the_stack_the_recipe_or_a_setting_says_so(tmp_path):
    recipe, stack = tmp_path / "recipe.yaml", tmp_path / "stack.yaml"
    recipe.write_text("schema_version: 1\nmodel: {attention: math}\ncost: {expandable_segments: true}\n")
    cost = "{launch_overhead: 1us, attention_kernel: flash2, expandable_segments: true, source: x}"
    stack.write_text(f"schema_version: 1\nextends: piper\nname: mine\ncost: {cost}\n")
    assert not stack_of("piper").expandable_segments
    assert stack_of(str(stack)).expandable_segments
    assert stack_of("piper", recipe=str(recipe)).expandable_segments
    assert stack_of("piper", settings=[("cost.expandable_segments", "on")]).expandable_segments
    last = [("cost.expandable_segments", "false")]
    assert not stack_of(str(stack), recipe=str(recipe), settings=last).expandable_segments


def test_a_switch_that_is_neither_on_nor_off_is_refused():
    with pytest.raises(InputError) as caught:
        stack_of("piper", settings=[("cost.expandable_segments", "maybe")])
    assert (caught.value.field, caught.value.rule) == ("cost.expandable_segments", "must be true or false")


def test_expandable_segments_change_what_is_reserved_and_nothing_else():
    def run(*settings):
        strategy = load_strategy("pp=2,dp=4,zero=1,recompute=full")
        found = predict(Job(model="llama3-8b", strategy=strategy, gpus=8, settings=settings)).result
        return {key: found[key] for key in ("step_time_s", "peak_memory_bytes")}, found

    (plain, whole), (grown, reserved) = run(), run(("cost.expandable_segments", "on"))
    assert plain == grown
    assert (whole["expandable_segments"], reserved["expandable_segments"]) == (False, True)
    assert reserved["peak_reserved_bytes"] != whole["peak_reserved_bytes"]
    assert reserved["peak_reserved_bytes"] >= reserved["peak_memory_bytes"]


def test_an_unfused_attention_needs_more_memory_and_time():
    def run(*settings):
        job = Job(
            model="tiny-llama", strategy=load_strategy("dp=1"), gpus=1, seq_len=256, global_batch=2,
            settings=settings,
        )  # fmt: skip
        return predict(job).result

    flash, unfused = run(), run(("model.attention", "math"))
    assert unfused["peak_memory_bytes"] > flash["peak_memory_bytes"]
    assert unfused["step_time_s"] > flash["step_time_s"]


def test_a_ring_over_the_sequence_needs_attention_of_one_kernel():
    job = Job(
        model="tiny-llama", strategy=load_strategy("cp=2,dp=1"), gpus=2, seq_len=64,
        settings=(("model.attention", "math"),),
    )  # fmt: skip
    with pytest.raises(InputError) as caught:
        predict(job)
    assert (caught.value.field, caught.value.value) == ("shard_sequence.method", "ring")
    assert "model.attention=flash" in caught.value.fix
