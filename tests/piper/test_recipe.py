"""Kernels of a job come from its stack, its recipe and --set, in this order, and from the device."""

import pytest

from cost_models.errors import InputError
from piper.capture import KernelChoice
from piper.predict import Job, load_hardware, predict
from piper.recipe import kernels_of
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
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_known_one(settings, field, fix):
    with pytest.raises(InputError) as caught:
        kernels_of(hardware(), settings=settings)
    assert caught.value.field == field
    assert fix in caught.value.fix


@pytest.mark.parametrize("text", ["modell: {attention: math}\n", "model: [math]\n"])
def test_a_recipe_of_another_form_is_refused(tmp_path, text):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(InputError) as caught:
        kernels_of(hardware(), recipe=str(recipe))
    assert caught.value.where == str(recipe)


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
