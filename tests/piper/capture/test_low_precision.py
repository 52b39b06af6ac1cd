"""`--dtype fp8`: which products of a model run in it, and what a job says of itself."""

import pytest

from cost_models.errors import CostModelError
from cost_models.ops import OpKind
from piper.capture import capture
from piper.capture.low_precision import in_low_precision
from piper.models import find_model
from piper.predict import Job, predict

HIDDEN = 64


@pytest.fixture(scope="module")
def model():
    return capture(find_model("tiny-llama"), micro_batch=1, seq_len=64, dtype="bf16")


@pytest.fixture(scope="module")
def narrow(model):
    return in_low_precision(model, "fp8")


def products(model, name="forward"):
    operations = [o for segment in model.segments for o in getattr(segment, name).operations]
    return [o for o in operations if o.kind is OpKind.MATMUL]


@pytest.mark.parametrize(
    "name", ["forward", "forward_no_grad", "backward", "backward_inputs", "backward_weights"]
)
def test_every_linear_layer_but_the_head_is_in_fp8(model, narrow, name):
    wide = [o for o in products(narrow, name) if o.dtype != "fp8"]
    assert len(wide) == (2 if name == "backward" else 1)
    assert all(sorted(o.shape) == sorted((1, 64, HIDDEN, model.facts.vocabulary)) for o in wide)
    assert sum(o.count for o in products(narrow, name)) == sum(o.count for o in products(model, name))


def test_each_product_quantises_two_operands(narrow):
    for segment in narrow.segments:
        done = [o for o in segment.backward.operations if o.kind is OpKind.QUANTISATION]
        fp8 = [o for o in segment.backward.operations if o.dtype == "fp8"]
        assert sum(o.count for o in done) == 2 * sum(o.count for o in fp8)


def test_flops_memory_and_parameters_are_those_of_bf16(model, narrow):
    assert narrow.parameters == model.parameters
    assert narrow.dtype == "bf16"
    for wide, low in zip(model.segments, narrow.segments, strict=True):
        assert wide.saved_bytes == low.saved_bytes
        assert wide.forward.workspace_bytes == low.forward.workspace_bytes


def job(**options):
    return Job(model="llama2-7b", cluster="dgx-h100", gpus=8, global_batch=8, seq_len=4096, **options)


def test_fp8_is_faster_uses_as_much_memory_and_counts_its_own_peak():
    wide, low = predict(job()).result, predict(job(dtype="fp8")).result
    assert low["step_time_s"] < wide["step_time_s"]
    assert low["peak_memory_bytes"] == wide["peak_memory_bytes"]
    assert low["mfu"] * low["step_time_s"] == pytest.approx(
        wide["mfu"] * wide["step_time_s"] * 989.4 / 1978.9
    )


def test_a_gpu_without_fp8_says_so_by_name():
    with pytest.raises(CostModelError) as caught:
        predict(Job(model="tiny-llama", cluster="dgx-a100", gpus=1, global_batch=1, dtype="fp8"))
    assert (caught.value.where, caught.value.value) == ("a100-sxm-80gb", "fp8")
