"""What frameworks keep besides: logits of their losses, results that checkpointing keeps, copies."""

import pytest

from piper.predict import Job, compile_job, predict
from piper.strategy import load_strategy
from simulator.plan import MemoryClass, TaskKind

SEQ, VOCABULARY = 8192, 128256
LOGITS = SEQ * VOCABULARY


def job(strategy, *settings, gpus=1, model="llama3-8b", seq_len=SEQ):
    return Job(
        model=model, strategy=load_strategy(strategy), gpus=gpus, seq_len=seq_len, global_batch=1,
        settings=settings,
    )  # fmt: skip


def kept_of_loss(loss, tp=1):
    """Bytes per logit that the last segment keeps on one rank, and of its backward at the highest moment."""
    segment = compile_job(job("dp=1", ("model.cross_entropy", loss))).model.segments[-1]
    whole = segment.saved_whole_bytes
    kept = segment.saved_bytes - segment.saved_gathers_bytes if tp == 1 else whole
    kept += 0 if tp == 1 else (segment.saved_bytes - whole) / tp
    return kept / LOGITS, segment.backward.workspace_bytes / LOGITS


@pytest.mark.parametrize(
    ("loss", "tp", "kept", "at_the_peak"),
    [
        ("unfused", 1, 4, 12),  # fp32 log-softmax; its gradient and that of the loss
        ("held", 1, 6, 14),  # and the logits themselves
        ("gathered", 1, 8, 16),  # fp32 logits too
        ("gathered", 8, 12, 20),  # twice gathered logits, on every rank in full
        ("vocabulary_parallel", 8, 4 / 8, 6 / 8),  # fp32 softmax in place, then the 2-byte gradient
        ("fused", 1, 2, 3),
    ],
)
def test_a_loss_keeps_so_many_bytes_per_logit(loss, tp, kept, at_the_peak):
    found, extra = kept_of_loss(loss, tp)
    assert found == pytest.approx(kept, abs=0.01)
    whole = extra if loss == "gathered" else extra / tp
    assert found + whole == pytest.approx(at_the_peak, abs=0.2)


def peak(strategy, *settings, gpus):
    return predict(job(strategy, *settings, gpus=gpus)).result


def test_gathered_logits_are_whole_on_every_rank_of_tp():
    """20 bytes per logit less those of a cut loss, which are 12 / 8; what else is alive moves the peak."""
    cut = peak("tp=8,sp=off", gpus=8)["peak_memory_bytes"]
    whole = peak("tp=8,sp=off", ("model.cross_entropy", "gathered"), gpus=8)["peak_memory_bytes"]
    assert (whole - cut) / LOGITS == pytest.approx(20 - 12 / 8, rel=0.15)


def test_gathering_logits_is_a_collective_of_their_bytes():
    plan = compile_job(job("tp=8,sp=off", ("model.cross_entropy", "gathered"), gpus=8)).plan
    table = plan.device_plans[0].tasks
    sizes = table.size_bytes[table.kind == int(TaskKind.ALL_GATHER)]
    assert sizes.max() == 2 * LOGITS


def test_one_rank_gathers_nothing():
    plan = compile_job(job("dp=1", ("model.cross_entropy", "gathered"))).plan
    names = {operation.name for work in plan.works for operation in work.operations}
    assert "fused.gather_features.default" not in names


def activations(strategy, *settings):
    plan = compile_job(job(strategy, *settings)).plan
    buffers = plan.device_plans[0].buffers
    chosen = buffers.memory_class == int(MemoryClass.ACTIVATIONS)
    return {
        label: int(buffers.size_bytes[chosen & (buffers.owner == i)].sum())
        for i, label in enumerate(buffers.labels)
    }


def of_label(found, text):
    return sum(size for label, size in found.items() if label.endswith(text))


def test_recomputing_by_operator_keeps_attention_and_every_second_linear_layer():
    """Of q, k, v, o, gate, up, down: q, v, gate, down; and attention with a number per row and head."""
    full, ops = (of_label(activations(f"recompute={mode}"), "activations") for mode in ("full", "ops"))
    hidden, layers, heads, ffn, key_value = 4096, 32, 32, 14336, 1024
    results = 2 * (hidden + key_value + ffn + hidden) + 2 * hidden + 4 * heads
    assert ops - full == pytest.approx(SEQ * layers * results, rel=0.01)


def test_results_of_fp8_products_are_kept_in_two_bytes():
    settings = (("model.cross_entropy", "held"),)
    kept = []
    for dtype in ("bf16", "fp8"):
        asked = Job(
            model="llama3-8b", strategy=load_strategy("recompute=ops"), gpus=1, seq_len=SEQ, global_batch=1,
            dtype=dtype, settings=settings,
        )  # fmt: skip
        kept.append(predict(asked).result["ranks"][0]["memory_by_class_bytes"]["activations"])
    assert kept[1] == pytest.approx(kept[0], rel=0.02)


def test_a_rank_makes_gradients_of_its_own_experts_only():
    """Qwen3 30B-A3B: 128 experts of 3 x 2048 x 768 in each layer; of a layer's gradients a rank has 1/ep."""
    whole, eighth = (
        predict(
            Job(
                model="qwen3-30b-a3b", strategy=load_strategy(f"dp=8,ep={ep},zero=1"), gpus=8, seq_len=512,
                global_batch=8,
            )
        ).result["ranks"][0]["memory_by_class_bytes"]["workspace"]
        for ep in (1, 8)
    )  # fmt: skip
    layer = 2 * 128 * 3 * 2048 * 768
    assert whole > layer
    assert eighth < 0.6 * layer


def test_recomputing_by_operator_takes_less_time_than_in_full():
    full, ops, none = (predict(job(f"recompute={mode}")).result for mode in ("full", "ops", "none"))
    assert none["step_time_s"] < ops["step_time_s"] < full["step_time_s"]
    assert full["peak_memory_bytes"] < ops["peak_memory_bytes"] < none["peak_memory_bytes"]
    assert ops["breakdown_s"]["recompute"] < 0.7 * full["breakdown_s"]["recompute"]


def test_selective_means_what_the_stack_says():
    by_stack = compile_job(job("recompute=selective", ("strategy.selective", "ops"))).plan
    by_name = compile_job(job("recompute=ops")).plan
    assert by_stack.device_plans[0].buffers.static_bytes == by_name.device_plans[0].buffers.static_bytes
    assert activations("recompute=selective", ("strategy.selective", "ops")) == activations("recompute=ops")


def test_a_framework_that_keeps_copies_needs_more_activations_and_nothing_else():
    plain, more = peak("dp=1", gpus=1), peak("dp=1", ("strategy.activation_factor", "1.2"), gpus=1)
    kinds = [found["ranks"][0]["memory_by_class_bytes"] for found in (plain, more)]
    assert kinds[1]["activations"] == pytest.approx(1.2 * kinds[0]["activations"], rel=0.01)
    assert kinds[1]["parameters"] == kinds[0]["parameters"]
    assert more["step_time_s"] == pytest.approx(plain["step_time_s"], rel=1e-3)
    assert more["defaults"].get("activation_factor") is None  # the user said so
