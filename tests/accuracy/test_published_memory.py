"""Peak memory of published runs, from what their frameworks keep: stacks as settings, no figure per run.

Units are those of the sources: decimal GB for Zero Bubble and bigscience, GiB for SimuMax and torchtitan.
"""

import json

import pytest

from piper.predict import Job, predict
from piper.strategy import load_strategy

pytestmark = pytest.mark.accuracy

GB, GIB = 1e9, 2**30
MEGATRON = (("model.attention", "fused_softmax"), ("model.cross_entropy", "vocabulary_parallel"))
ZERO_BUBBLE = (*MEGATRON, ("strategy.gradient_dtype", "fp16"))
TRANSFORMER_ENGINE = (("model.activation", "fused"), ("model.cross_entropy", "fused"))
TORCHTITAN = (
    ("model.cross_entropy", "held"), ("strategy.shard_dtype", "fp32"), ("strategy.selective", "ops"),
)  # fmt: skip
ALEPH_ALPHA = (
    ("model.cross_entropy", "gathered"), ("strategy.gradient_dtype", "bf16"),
    ("strategy.activation_factor", "1.15"),
)  # fmt: skip
BIGSCIENCE = (
    *MEGATRON, ("strategy.gradient_dtype", "compute"), ("strategy.framework_mb", "1500"),
    ("strategy.gradient_copy", "fp32"),
)  # fmt: skip


def predicted(model, strategy, *, settings, microbatches=None, micro_batch, **options):
    """Predict a run; microbatches beyond the depth of its pipeline do not change the peak."""
    stated = load_strategy(strategy).stated
    number = microbatches or 2 * (stated.pp or 1) + 2
    job = Job(
        model=model, strategy=load_strategy(strategy), settings=tuple(settings), micro_batch=micro_batch,
        global_batch=micro_batch * number * (stated.dp or 1), **options,
    )  # fmt: skip
    return predict(job, steps=1).result


@pytest.mark.parametrize(
    ("model", "schedule", "micro_batch", "microbatches", "printed_gb"),
    [
        ("gpt-1.5b", "1f1b", 6, 32, 30),
        ("gpt-1.5b", "zb_1p", 6, 32, 32),
        ("gpt-1.5b", "zb_2p", 6, 32, 59),
        ("gpt-1.5b", "interleaved_1f1b,vp=3", 6, 32, 40),
        ("gpt-1.5b", "1f1b", 6, 4, 18),
        ("gpt-6.2b", "1f1b", 3, 32, 39),
        ("gpt-6.2b", "zb_1p", 3, 32, 42),
        ("gpt-6.2b", "1f1b", 6, 32, 66),
        ("gpt-6.2b", "1f1b", 3, 2, 21),
    ],
)
def test_schedules_of_zero_bubble_need_what_was_printed(
    model, schedule, micro_batch, microbatches, printed_gb
):
    """Qi et al. 2024 (arXiv 2401.10241), tables 4 and 5: 8 stages, sequences of 1024, masks of dropout."""
    found = predicted(
        model, f"pp=8,schedule={schedule}", settings=ZERO_BUBBLE, cluster="zero-bubble-a100", gpus=8,
        seq_len=1024, micro_batch=micro_batch, microbatches=microbatches, dtype="fp16",
    )  # fmt: skip
    assert found["peak_reserved_bytes"] / GB == pytest.approx(printed_gb, rel=0.08)


@pytest.mark.parametrize(
    ("base", "layers", "strategy", "printed_gib"),
    [
        ("llama3-70b", 12, "pp=2,dp=4", 66.55),
        ("llama3-70b", 12, "tp=2,dp=4", 60.68),
        ("llama3-70b", 12, "tp=8", 28.29),
        ("llama3.1-405b", 4, "tp=4,dp=2", 52.89),
        ("llama3.1-405b", 4, "pp=2,dp=4", 87.08),
        ("llama3.1-405b", 4, "tp=8", 38.57),
    ],
)
def test_shortened_models_on_b200_allocate_what_torch_counted(tmp_path, base, layers, strategy, printed_gib):
    """MooreThreads/SimuMax v1.2, docs/b200: max_memory_allocated of Megatron-LM with Transformer Engine."""
    from piper.models import find_model

    file = tmp_path / "short.json"
    file.write_text(json.dumps({**find_model(base).config, "num_hidden_layers": layers}))
    found = predicted(
        str(file), f"{strategy},zero=1", settings=TRANSFORMER_ENGINE, cluster="b200-8gpu", gpus=8,
        seq_len=4096, micro_batch=1,
    )  # fmt: skip
    assert found["peak_memory_bytes"] / GIB == pytest.approx(printed_gib, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "gpus", "seq_len", "micro_batch", "dtype", "printed_gib"),
    [
        ("dp=8,zero=3,recompute=selective", 8, 8192, 2, "bf16", 77.0),
        ("dp=8,zero=3,recompute=selective", 8, 8192, 2, "fp8", 76.8),
        ("dp=128,zero=3,recompute=selective", 128, 8192, 2, "bf16", 62.0),
        ("dp=8,zero=3,recompute=full", 8, 32768, 1, "fp8", 83.9),
        ("dp=2,cp=4,zero=3,recompute=full", 8, 131072, 1, "fp8", 84.0),
    ],
)
def test_compiled_fsdp_needs_what_torchtitan_printed(
    strategy, gpus, seq_len, micro_batch, dtype, printed_gib
):
    """pytorch/torchtitan, benchmarks of December 2024: Llama 3.1 8B on H100 with 96 GB."""
    found = predicted(
        "llama3.1-8b", strategy, settings=TORCHTITAN, cluster="torchtitan-h100-96gb", gpus=gpus,
        seq_len=seq_len, micro_batch=micro_batch, microbatches=1, dtype=dtype,
    )  # fmt: skip
    assert found["peak_memory_bytes"] / GIB == pytest.approx(printed_gib, rel=0.04)


@pytest.mark.parametrize(
    ("strategy", "micro_batch", "printed_gb"),
    [
        ("dp=8,zero=1,recompute=full", 1, 16),
        ("dp=8,zero=1,recompute=full", 8, 25),
        ("dp=8,zero=1,recompute=none", 1, 27),
        ("pp=2,dp=4,zero=1,recompute=full", 1, 10),
        ("pp=4,dp=2,zero=1,recompute=none", 2, 30),
        ("pp=8,zero=1,recompute=full", 1, 9),
    ],
)
def test_the_first_gpu_of_megatron_deepspeed_shows_what_nvidia_smi_did(strategy, micro_batch, printed_gb):
    """bigscience, tr3m-1B3 on 8 V100 of 32 GB, rounded: the first rank's tensors, context, communicators."""
    found = predicted(
        "gpt-1.3b-tr3m", strategy, settings=BIGSCIENCE, cluster="jean-zay-v100", gpus=8, seq_len=2048,
        micro_batch=micro_batch, dtype="fp16",
    )  # fmt: skip
    held = found["ranks"][0]["peak_memory_bytes"] + found["context_bytes"] + found["communicator_bytes"]
    assert held / GB == pytest.approx(printed_gb, rel=0.08)


@pytest.mark.parametrize(
    ("model", "gpus", "seq_len", "strategy", "micro_batch", "norm", "fits"),
    [
        ("llama-13b-128k", 64, 2048, "dp=64,recompute=full", 4, "unfused", True),
        ("llama-13b-128k", 64, 2048, "tp=2,sp=off,dp=32", 2, "unfused", True),
        ("llama-13b-128k", 128, 8192, "tp=2,sp=off,pp=4,dp=16", 1, "unfused", True),
        ("llama-30b-128k", 64, 2048, "pp=4,dp=16", 1, "fused", True),
        ("llama-13b-128k", 64, 2048, "tp=2,sp=off,pp=2,dp=16", 4, "unfused", False),
        ("llama-13b-128k", 64, 2048, "tp=2,sp=off,dp=32,recompute=full", 8, "unfused", False),
        ("llama-13b-128k", 128, 8192, "tp=2,sp=off,pp=2,dp=32", 1, "unfused", False),
        ("llama-30b-128k", 256, 2048, "tp=2,sp=off,pp=4,dp=32", 2, "unfused", False),
    ],
)
def test_a_layout_runs_out_of_memory_where_it_did(model, gpus, seq_len, strategy, micro_batch, norm, fits):
    """Hagemann et al. 2023 (arXiv 2311.05610): verdicts nearest to the boundary.

    A full device gives cached blocks back before it gives up, so that tensors, context and communicators
    count, not what the allocator would hold.
    """
    found = predicted(
        model, f"{strategy},zero=1", settings=(*ALEPH_ALPHA, ("model.norm", norm)),
        cluster="aleph-alpha-a100", gpus=gpus, seq_len=seq_len, micro_batch=micro_batch,
    )  # fmt: skip
    held = found["peak_memory_bytes"] + found["context_bytes"] + found["communicator_bytes"]
    assert (held <= found["device_memory_bytes"]) is fits
