"""Operations on devices: formulas, laws, and measured kernels."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import Operation, OpKind, Provenance, cluster_cost_model, load_gpu
from cost_models.errors import CostModelError
from cost_models.models.roofline import Roofline

DATA = Path(__file__).parent / "data"
H100 = Roofline(load_gpu("h100"))
BANDWIDTH_KINDS = [
    OpKind.NORM,
    OpKind.SOFTMAX,
    OpKind.CROSS_ENTROPY,
    OpKind.EMBEDDING,
    OpKind.ELEMENTWISE,
    OpKind.REDUCTION,
    OpKind.COPY,
    OpKind.OPTIMIZER,
]


def matmul(m, n, k, *, dtype="bf16", direction="fwd", count=1):
    return Operation(
        kind=OpKind.MATMUL,
        name="aten.mm",
        shape=(1, m, n, k),
        dtype=dtype,
        flops=2 * m * n * k,
        bytes=2 * (m * k + k * n + m * n),
        count=count,
        direction=direction,
    )


def attention(*, batch=1, heads=32, seq=8192, head_dim=128, direction="fwd", dtype="bf16"):
    forward = 2 * batch * heads * seq * seq * head_dim  # two products, causal half
    return Operation(
        kind=OpKind.ATTENTION,
        name="flash",
        shape=(batch, heads, heads, seq, seq, head_dim),
        dtype=dtype,
        flops=forward if direction == "fwd" else forward * 5 // 2,
        bytes=8 * batch * heads * seq * head_dim,
        causal=True,
        direction=direction,
    )


def moving(kind, size_bytes):
    return Operation(kind=kind, name="op", shape=(1, 1), dtype="bf16", flops=0, bytes=size_bytes)


def test_a_large_matmul_runs_at_the_fitted_share_of_the_peak():
    operation = matmul(8192, 14336, 4096)
    price = H100.operation(operation)
    # 962 GFLOP at .73 of 989.4 TFLOP/s, plus 3.7 us
    assert price.seconds == pytest.approx(1.3357e-3, rel=1e-4)
    assert price.provenance is Provenance.FITTED
    assert operation.flops / price.seconds == pytest.approx(0.728 * 989.4e12, rel=1e-3)


def test_a_thin_matmul_is_bound_by_memory():
    operation = matmul(1, 8192, 8192)
    assert H100.operation(operation).seconds == pytest.approx(operation.bytes / (0.7 * 3.35e12) + 3.7e-6)


def test_the_count_of_an_operation_does_not_change_the_price_of_one():
    assert H100.operation(matmul(64, 64, 64, count=9)) == H100.operation(matmul(64, 64, 64))


def test_fp32_multiplies_without_tensor_cores_and_is_no_fit():
    price = H100.operation(matmul(8192, 8192, 8192, dtype="fp32"))
    assert price.provenance is Provenance.DATASHEET
    ratio = price.seconds / H100.operation(matmul(8192, 8192, 8192, dtype="tf32")).seconds
    assert ratio == pytest.approx(494.7 / 67, rel=0.01)


def test_weight_gradients_are_slower_by_the_measured_ratio():
    forward = H100.operation(matmul(8192, 8192, 8192)).seconds
    assert H100.operation(matmul(8192, 8192, 8192, direction="dgrad")).seconds == forward
    wgrad = H100.operation(matmul(8192, 8192, 8192, direction="wgrad")).seconds
    assert wgrad / forward == pytest.approx(1.05, rel=1e-3)


def matmul_s(operation, gpu="h100"):
    """Return the time without latency."""
    device = load_gpu(gpu)
    return Roofline(device).operation(operation).seconds - device.matmul.latency_s


def test_an_unpadded_vocabulary_slows_the_logits_and_both_their_gradients():
    def logits(vocabulary):
        sizes = {
            "fwd": (8192, vocabulary, 4096),
            "dgrad": (8192, 4096, vocabulary),
            "wgrad": (vocabulary, 4096, 8192),
        }
        return [matmul_s(matmul(*shape, direction=way)) for way, shape in sizes.items()]

    for odd, padded in zip(logits(50257), logits(50264), strict=True):
        assert odd / padded == pytest.approx(3.0 * 50257 / 50264)


def test_an_odd_number_of_tokens_slows_nothing():
    assert matmul_s(matmul(8191, 8192, 8192)) < matmul_s(matmul(8192, 8192, 8192))
    assert matmul_s(matmul(8192, 8192, 8191, direction="wgrad")) < matmul_s(
        matmul(8192, 8192, 8192, direction="wgrad")
    )


def batched(batch, m, n, k):
    return replace(matmul(m, n, k), shape=(batch, m, n, k), flops=2 * batch * m * n * k, bytes=0)


def test_products_of_attention_run_less_well_than_those_of_layers():
    scores = batched(64, 2048, 2048, 128)
    assert scores.flops / matmul_s(scores) == pytest.approx(0.44 * 989.4e12)
    large = batched(8, 4096, 4096, 4096)
    assert large.flops / matmul_s(large) == pytest.approx(0.73 * 989.4e12)


@given(inner=st.integers(1, 512), more=st.integers(1, 64))
def test_a_batched_matmul_with_larger_heads_never_costs_less(inner, more):
    less, larger = (H100.operation(batched(64, 2048, 2048, 8 * k)).seconds for k in (inner, inner + more))
    assert larger >= less


def test_unfused_attention_of_a_22b_model_takes_what_its_measured_layer_leaves_for_it():
    """Korthikanti 2022, table 4: 7.7 ms of a forward layer, of which products and TP leave 1.4 to 1.9."""
    a100, scores = Roofline(load_gpu("a100")), 4 * 8 * 2048 * 2048
    products = [batched(32, 2048, 2048, 96), batched(32, 2048, 96, 2048)]
    products = [replace(product, bytes=2 * scores) for product in products]
    softmax, dropout = moving(OpKind.SOFTMAX, 4 * scores), moving(OpKind.ELEMENTWISE, 5 * scores)
    assert 1.2e-3 < sum(a100.operation(each).seconds for each in (*products, softmax, dropout)) < 1.9e-3


@pytest.mark.parametrize(
    ("gpu", "dtype", "ratio"), [("h100", "fp8", 1.77), ("b200", "mxfp8", 1.8), ("b200", "nvfp4", 3)]
)
def test_a_low_precision_multiplies_faster_by_the_ratio_of_the_gpu(gpu, dtype, ratio):
    wide, narrow = matmul(8192, 8192, 8192), matmul(8192, 8192, 8192, dtype=dtype)
    assert matmul_s(wide, gpu) / matmul_s(narrow, gpu) == pytest.approx(ratio)
    assert Roofline(load_gpu(gpu)).operation(narrow).provenance is Provenance.FITTED


def test_attention_backward_lasts_a_measured_multiple_of_forward():
    forward = H100.operation(attention()).seconds - 15e-6
    backward = H100.operation(attention(direction="bwd")).seconds - 15e-6
    assert backward / forward == pytest.approx(2.9)


def test_short_sequences_and_small_heads_lower_the_efficiency_of_attention():
    def flops_per_s(**shape):
        operation = replace(attention(**shape), bytes=0)
        return operation.flops / (H100.operation(operation).seconds - 15e-6)

    assert flops_per_s(seq=301) == pytest.approx(0.56 * 989.4e12 / 2, rel=1e-6)
    assert flops_per_s(head_dim=64) / flops_per_s(head_dim=128) == pytest.approx(0.7)
    assert flops_per_s(head_dim=256) == pytest.approx(flops_per_s(head_dim=128))


def attention_s(gpu, kernel, **shape):
    """Return the time of fused attention without its latency."""
    return Roofline(load_gpu(gpu), attention_kernel=kernel).operation(attention(**shape)).seconds - 15e-6


def test_each_class_of_attention_kernels_has_its_own_speed_on_hopper():
    times = [attention_s("h100", kernel) for kernel in ("flash1", "flash2", "flash3")]
    assert times[0] / times[1] == pytest.approx(0.345 / 0.19)
    assert times[1] / times[2] == pytest.approx(0.56 * (8192 + 350) / (0.345 * (8192 + 301)))


def test_flash2_on_hopper_is_as_fast_as_the_azure_benchmarking_guide_measured():
    operation = attention(batch=2, heads=16, seq=8192)
    assert operation.flops / attention_s("h100", "flash2", batch=2, heads=16) == pytest.approx(
        327.9e12, rel=0.02
    )


@pytest.mark.parametrize(
    ("gpu", "absent", "instead"), [("a100", "flash3", "flash2"), ("b200", "flash3", "cudnn")]
)
def test_a_class_that_a_gpu_cannot_run_has_the_time_of_the_one_that_runs_instead(gpu, absent, instead):
    assert attention_s(gpu, absent) == attention_s(gpu, instead)


def test_fitted_is_the_best_class_of_the_gpu():
    assert attention_s("b200", "fitted") == attention_s("b200", "cudnn")


def test_a_partly_filled_last_wave_costs_attention_on_b200():
    b200 = Roofline(load_gpu("b200"))
    full = b200.operation(attention(heads=37, seq=4 * 128)).seconds - 15e-6  # 148 blocks, 148 processors
    spill = b200.operation(attention(heads=38, seq=4 * 128)).seconds - 15e-6
    assert spill / full == pytest.approx(38 / 37 * (1 + 2 * (2 / (152 / 148) - 1)))


def grouped(rows, *, groups=8, direction="fwd", size_bytes=0):
    """Return a grouped multiplication of `rows` rows over all groups."""
    return Operation(
        kind=OpKind.GROUPED_MATMUL,
        name="grouped",
        shape=(groups, rows, 14336, 4096),
        dtype="bf16",
        flops=2 * rows * 4096 * 14336,
        bytes=size_bytes,
        direction=direction,
    )


@pytest.mark.parametrize(
    ("rows", "efficiency"), [(100, 0.24), (128, 0.24), (256, 0.31), (512, 0.38), (2048, 0.48), (5000, 0.48)]
)
def test_grouped_matmuls_run_better_with_more_rows_per_group(rows, efficiency):
    operation = grouped(8 * rows)
    reached = operation.flops / (H100.operation(operation).seconds - 3.7e-6)
    assert reached == pytest.approx(efficiency * 989.4e12)


gpus = st.sampled_from(["a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm"])
directions = st.sampled_from(["fwd", "dgrad", "wgrad"])


@given(
    gpu=gpus, rows=st.integers(1, 2**17), more=st.integers(0, 2**12), groups=st.integers(1, 256),
    direction=directions,
)  # fmt: skip
def test_more_rows_in_the_same_groups_never_cost_less(gpu, rows, more, groups, direction):
    device = Roofline(load_gpu(gpu))
    less = device.operation(grouped(rows, groups=groups, direction=direction)).seconds
    assert device.operation(grouped(rows + more, groups=groups, direction=direction)).seconds >= less


@given(gpu=gpus, rows=st.integers(1, 2**17), groups=st.integers(1, 256), direction=directions)
def test_the_same_rows_in_more_groups_never_cost_less_and_never_beat_the_peak(gpu, rows, groups, direction):
    device = Roofline(load_gpu(gpu))
    operation = grouped(rows, groups=groups, direction=direction)
    seconds = device.operation(operation).seconds
    assert seconds > operation.flops / device.gpu.peak("bf16")
    assert device.operation(grouped(rows, groups=groups + 1, direction=direction)).seconds >= seconds


def test_a_few_rows_per_expert_are_bound_by_reading_the_weights():
    weights = 2 * 64 * 4096 * 14336
    seconds = H100.operation(grouped(64, groups=64, size_bytes=weights)).seconds
    assert seconds == pytest.approx(weights / (0.7 * 3.35e12) + 3.7e-6)


@given(gpu=gpus, m=st.integers(1, 2**14), n=st.integers(1, 2**11), parts=st.sampled_from([2, 4, 8]),
       cut=st.sampled_from("nk"))  # fmt: skip
def test_a_device_that_has_one_part_of_a_matmul_is_never_faster_than_its_share(gpu, m, n, parts, cut):
    """Columns or rows cut over devices: at best, the parts together take as long as the whole."""
    device, n = Roofline(load_gpu(gpu)), 8 * n
    whole = device.operation(matmul(m, n * parts, 8192) if cut == "n" else matmul(m, 8192, n * parts)).seconds
    part = device.operation(matmul(m, n, 8192) if cut == "n" else matmul(m, 8192, n)).seconds
    latency_s = device.gpu.matmul.latency_s
    assert part <= whole
    assert parts * (part - latency_s) >= (whole - latency_s) * (1 - 1e-12)


@pytest.mark.parametrize("kind", BANDWIDTH_KINDS)
def test_other_kernels_move_bytes_at_a_share_of_the_bandwidth(kind):
    gpu = load_gpu("h100")
    rate = 2**30 / (H100.operation(moving(kind, 2**30)).seconds - 3e-6)
    assert rate == pytest.approx(gpu.bandwidth_bound.fraction[kind] * gpu.memory_bytes_per_s)
    assert 0.1 < rate / gpu.memory_bytes_per_s < 1


def test_an_embedding_gradient_clears_its_table_at_the_speed_of_a_copy():
    rows, hidden, vocabulary = 8192, 4096, 128256
    gradient = Operation(
        kind=OpKind.EMBEDDING,
        name="aten.embedding_dense_backward",
        shape=(rows, hidden, vocabulary),
        dtype="bf16",
        flops=0,
        bytes=2 * (rows * hidden + vocabulary * hidden),
        direction="wgrad",
    )
    scattered, bandwidth = 3 * 2 * rows * hidden, 3.35e12
    seconds = scattered / (0.165 * bandwidth) + (gradient.bytes - scattered) / (0.87 * bandwidth)
    assert H100.operation(gradient).seconds - 3e-6 == pytest.approx(seconds)


def test_an_embedding_gradient_of_many_rows_is_all_scatter():
    rows = replace(moving(OpKind.EMBEDDING, 2**30), shape=(2**16, 4096, 8), direction="wgrad")
    assert H100.operation(rows) == H100.operation(moving(OpKind.EMBEDDING, 2**30))


def test_an_operation_known_only_by_name_is_refused():
    operation = Operation(kind=OpKind.FIXED, name="F", shape=(), dtype="bf16", flops=0, bytes=0)
    with pytest.raises(CostModelError) as caught:
        H100.operation(operation)
    assert caught.value.field == "kind"
    assert "UnitCostModel" in caught.value.fix


def test_a_dtype_without_peak_lists_those_of_the_device():
    with pytest.raises(CostModelError) as caught:
        Roofline(load_gpu("a100")).operation(matmul(64, 64, 64, dtype="fp8"))
    assert (caught.value.where, caught.value.field, caught.value.value) == ("a100-sxm-80gb", "dtype", "fp8")
    assert "known: fp32, tf32, bf16, fp16" in caught.value.fix


@pytest.mark.parametrize("shape", [(64, 64, 64), (1, 64, 64, 0), ()])
def test_a_shape_of_another_kind_is_refused(shape):
    operation = Operation(kind=OpKind.MATMUL, name="mm", shape=shape, dtype="bf16", flops=1, bytes=1)
    with pytest.raises(CostModelError) as caught:
        H100.operation(operation)
    assert caught.value.field == "shape"


sizes = st.integers(1, 2**15)


@given(m=sizes, n=sizes, k=sizes, more=st.integers(0, 2**12))
def test_a_larger_matmul_never_costs_less(m, n, k, more):
    assert H100.operation(matmul(m + more, n, k)).seconds >= H100.operation(matmul(m, n, k)).seconds


@given(m=sizes, n=sizes, k=sizes)
def test_nothing_beats_the_peak_or_the_memory(m, n, k):
    gpu = load_gpu("h100")
    operation = matmul(m, n, k)
    bound_s = max(operation.flops / gpu.peak("bf16"), operation.bytes / gpu.memory_bytes_per_s)
    assert H100.operation(operation).seconds > bound_s


@given(kind=st.sampled_from(BANDWIDTH_KINDS), size=st.integers(0, 2**40), more=st.integers(0, 2**40))
def test_moving_more_bytes_never_costs_less(kind, size, more):
    assert H100.operation(moving(kind, size + more)).seconds >= H100.operation(moving(kind, size)).seconds


def measured_kernels():
    with (DATA / "kernels.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def priced(row):
    gpu = load_gpu("a100-sxm-80gb" if row["gpu"].startswith("A100") else row["gpu"])  # PCIe: the same peak
    direction = {"fwd": "fwd", "bwd": "bwd", "bwd_wgrad": "wgrad"}[row["pass"]]
    if row["op"] == "gemm":
        m, n, k = (int(row[name]) for name in "mnk")
        return Roofline(gpu).operation(matmul(m, n, k, dtype=row["dtype"], direction=direction))
    return Roofline(gpu).operation(
        attention(batch=int(row["batch"]), heads=int(row["heads"]), seq=int(row["seq"]), direction=direction)
    )


@pytest.mark.accuracy
@pytest.mark.parametrize("op", ["gemm", "attention"])
def test_measured_kernels_of_training_size_are_predicted(op):
    """Rows of `data/kernels.csv`, taken evenly by size: half lie within 12 %, all within 40 %."""
    errors = sorted(
        abs(priced(row).seconds / (float(row["time_us"]) * 1e-6) - 1)
        for row in measured_kernels()
        if row["op"] == op and float(row["time_us"]) >= 100
    )
    assert len(errors) >= 15
    assert errors[len(errors) // 2] < 0.12
    assert errors[-1] < 0.40


@pytest.mark.accuracy
def test_the_band_holds_most_measured_kernels():
    rows = measured_kernels()
    inside = [priced(row).low_s <= float(row["time_us"]) * 1e-6 <= priced(row).high_s for row in rows]
    assert sum(inside) >= 0.85 * len(rows)


def test_the_stack_chooses_the_attention_kernel():
    model = cluster_cost_model("dgx-h100", stack="piper")
    assert model.stack.attention_kernel == "flash2"
    in_training = Roofline(model.cluster.gpu, attention_kernel="flash2")
    assert model.operation(attention()) == in_training.operation(attention())


def test_a_communicator_of_one_rank_takes_no_memory():
    model = cluster_cost_model("dgx-h100")
    assert model.communicator_bytes(1) == 0
    assert model.communicator_bytes(2) == 342 * 2**20
    assert model.communicator_bytes(64) == 392 * 2**20


def test_a_large_matmul_is_bound_by_processors_and_a_thin_one_by_memory():
    """See the formulas of `MatmulSpec`; the latency scales with neither."""
    large, thin = matmul(8192, 8192, 8192, direction="wgrad"), matmul(16, 4096, 4096)
    use = H100.operation_use(large)
    assert (use.memory_s, use.memory_bytes) == (0, 0)
    assert use.processor_s == pytest.approx(1.05 * large.flops / (0.73 * 989.4e12))
    use = H100.operation_use(thin)
    assert (use.processor_s, use.memory_bytes) == (0, thin.bytes)
    assert use.memory_s == pytest.approx(thin.bytes / (0.7 * 3.35e12))


def test_attention_over_a_long_sequence_is_bound_by_processors():
    use = H100.operation_use(attention())
    assert use.processor_s > 0
    assert use.memory_s == 0


@pytest.mark.parametrize("kind", BANDWIDTH_KINDS)
def test_kernels_that_only_move_memory_are_bound_by_it(kind):
    use = H100.operation_use(moving(kind, 2**30))
    assert (use.processor_s, use.memory_bytes) == (0, 2**30)
    assert use.memory_s == pytest.approx(2**30 / (H100.gpu.bandwidth_bound.fraction[kind] * 3.35e12))


@given(
    kernel=st.one_of(
        st.builds(matmul, *[st.integers(1, 2**15)] * 3, direction=st.sampled_from(["fwd", "wgrad"])),
        st.builds(attention, seq=st.integers(1, 2**15), direction=st.sampled_from(["fwd", "bwd"])),
        st.builds(
            grouped, st.integers(1, 2**15), groups=st.integers(1, 64), size_bytes=st.integers(0, 2**36)
        ),
        st.builds(moving, st.sampled_from(BANDWIDTH_KINDS), st.integers(0, 2**36)),
    )
)
def test_what_bounds_a_kernel_and_its_latency_are_its_price(kernel):
    use, price = H100.operation_use(kernel), H100.operation(kernel)
    latency_s = price.seconds - use.processor_s - use.memory_s
    assert min(use.processor_s, use.memory_s) == 0
    assert 0 < latency_s <= 15e-6 * (1 + 1e-6) + 1e-9 * price.seconds
    assert use.memory_bytes <= use.memory_s * H100.gpu.memory_bytes_per_s


def test_the_use_of_a_kernel_is_that_of_one_of_its_count():
    model = cluster_cost_model("dgx-h100")
    one, many = matmul(64, 64, 64), matmul(64, 64, 64, count=7)
    assert model.operation_use(one) == model.operation_use(many)
