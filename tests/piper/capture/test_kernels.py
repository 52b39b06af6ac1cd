"""Kernels of a device and of a framework: what each keeps and computes, against real runs and formulas."""

import math

import modules
import pytest
import torch
import torch.nn.functional as F
from test_costs import flops, only, really_saved, saved_in_all
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cost_models.ops import OpKind
from piper import annotate
from piper.capture import KernelChoice, capture
from piper.capture.fresh import capture_fresh
from piper.errors import ModelError
from piper.models import MODELS, build_module, find_model
from piper.models.find import from_config
from tests.tiny_configs import TINY

CUDA, CPU = KernelChoice(), KernelChoice(device="cpu")
SIZES = {"micro_batch": 2, "seq_len": 32, "dtype": "fp32"}


def family(name):
    return from_config(TINY[name], name=name, kind="config", where=name)


def once(source, *, kernels=CUDA, dtype="fp32"):
    """Capture at one size, without the cache."""
    sizes = SIZES | {"dtype": dtype}
    return capture_fresh(source, name="t", sizes=sizes, kernels=kernels, dedupe=True)


def data(vocabulary=256, *, length=32):
    drawn = torch.randint(0, vocabulary, (2, length + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_capture_for_the_cpu_keeps_what_a_real_run_on_the_cpu_keeps(name, dtype):
    source = family(name)
    model = once(source, kernels=CPU, dtype=dtype)
    inputs = data(model.facts.vocabulary)
    assert saved_in_all(model) == really_saved(build_module(source, dtype=dtype), *inputs)


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.1}, {"hidden_dropout": 0.1}])
def test_dropout_on_the_cpu_keeps_what_it_really_keeps_there(changes):
    source = from_config({**find_model("tiny-llama").config, **changes}, name="t", kind="config", where="t")
    model = once(source, kernels=CPU)
    assert saved_in_all(model) == really_saved(build_module(source, dtype="fp32"), *data())


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"mask": True}, {"dropout_p": 0.1}, {"kv_heads": 2, "enable_gqa": True}],
    ids=str,
)
def test_the_cpus_choice_between_flash_and_the_unfused_path_is_torchs(options):
    module = modules.Attention(**options)
    model = capture(module, kernels=CPU, micro_batch=2, seq_len=8, dtype="fp32")
    tokens, labels = data(modules.VOCABULARY, length=8)
    assert saved_in_all(model) == really_saved(module, tokens, labels)
    assert bool(only(model, OpKind.ATTENTION)) == ("dropout_p" not in options)


@pytest.mark.parametrize("name", MODELS)
def test_all_products_of_unfused_attention_are_those_of_torchs_counter(name):
    """The counter does not know the CPU's flash kernel, so both sides take the unfused path."""
    source = family(name)
    model = once(source, kernels=KernelChoice(attention="math"))
    module, inputs = build_module(source, dtype="fp32"), data(model.facts.vocabulary)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = module(*inputs)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    assert flops(model, "forward", OpKind.MATMUL) == forward.get_total_flops()
    assert flops(model, "backward", OpKind.MATMUL) == backward.get_total_flops()


def test_every_saved_tensor_names_the_operator_that_needs_it_and_the_one_that_made_it():
    class Named(modules.Chain):
        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.embed(tokens)
            with annotate("PP"):
                x = F.linear(F.silu(x) * x.exp(), self.head.weight.t()[:, :16].t()[:, :16])
            return self.loss(x[..., :16], labels)

    middle = capture(Named(blocks=0), micro_batch=2, seq_len=8, dtype="fp32").segments[1]
    rows = [(t.saved_by.split(".")[1], t.made_by.split(".")[-2:-1], t.border) for t in middle.saved_tensors]
    assert rows == [
        ("silu", [], "input"),
        ("exp", ["exp"], ""),
        ("mul", ["silu"], ""),
        ("mm", ["mul"], ""),
    ]
    assert [tensor.for_weights for tensor in middle.saved_tensors] == [False, False, False, True]


def test_saved_tensors_inside_sum_to_the_saved_bytes():
    for name in ("llama", "gpt_neox", "deepseek_v3"):
        for segment in once(family(name)).segments:
            inside = [tensor for tensor in segment.saved_tensors if not tensor.border]
            assert sum(tensor.bytes for tensor in inside) == segment.saved_bytes
            late = sum(tensor.bytes for tensor in inside if tensor.for_weights)
            assert late == segment.saved_for_weights_bytes


def attention_kept(seq_len, **choice):
    module = modules.Attention(is_causal=True, dropout_p=0.1)
    model = capture(module, kernels=KernelChoice(**choice), micro_batch=2, seq_len=seq_len, dtype="bf16")
    return model.segments[0].saved_bytes


@pytest.mark.parametrize(
    ("attention", "bytes_per_score"), [("flash", 0), ("fused_softmax", 5), ("eager", 7), ("math", 9)]
)
def test_an_unfused_attention_keeps_its_scores(attention, bytes_per_score):
    """5 a s^2 b of Korthikanti et al.; torch's own path works in fp32: softmax 4, its mask 1, dropout 4.

    Operator by operator: the softmax in fp32 4, dropout's mask 1 and result 2.
    """
    one, two = (attention_kept(seq_len, attention=attention) for seq_len in (64, 128))
    batch, heads = 2, 4
    linear = 2 * one - two  # what grows with the tokens cancels; the scores leave -2 times themselves
    scores = batch * heads * 64 * 64
    # The causal mask of torch's path is added in place and not kept.
    assert -linear // 2 == pytest.approx(bytes_per_score * scores, abs=64)


def test_eager_attention_is_scale_mask_softmax_and_cast_between_two_products():
    module = modules.Attention(is_causal=True)
    model = capture(module, kernels=KernelChoice(attention="eager"), micro_batch=2, seq_len=8, dtype="bf16")
    scores = 2 * 4 * 8 * 8
    found = {op.name.split(".")[1]: op.bytes / scores for op in of_scores(model, scores)}
    assert found["mul"] == 4
    assert found["add"] == pytest.approx(4, abs=0.5)  # and one mask for all heads
    assert found["_softmax"] == found["_to_copy"] == 6


def of_scores(model, scores):
    """Return the operations of F that write or read every score."""
    operations = [op for segment in model.segments for op in segment.forward.operations]
    kinds = {OpKind.ELEMENTWISE, OpKind.SOFTMAX, OpKind.COPY}
    return [op for op in operations if op.kind in kinds and math.prod(op.shape) == scores]


def test_fused_softmax_is_one_kernel_between_two_products():
    module = modules.Attention(is_causal=True)
    model = capture(
        module, kernels=KernelChoice(attention="fused_softmax"), micro_batch=2, seq_len=8, dtype="bf16"
    )
    products = [op for op in only(model, OpKind.MATMUL) if op.shape[0] == 2 * 4]
    assert [op.shape for op in products] == [(8, 8, 8, 4), (8, 8, 4, 8)]
    (softmax,) = [op for op in only(model, OpKind.SOFTMAX) if "masked" in op.name]
    assert (softmax.shape, softmax.bytes) == ((2 * 4 * 8, 8), 2 * 2 * 2 * 4 * 8 * 8)


class SwiGLU(modules.Chain):
    def __init__(self, *, activation=F.silu):
        super().__init__(blocks=0)
        self.activation = activation
        self.gate, self.up = (nn.Linear(modules.HIDDEN, 32, bias=False) for _ in range(2))
        self.down = nn.Linear(32, modules.HIDDEN, bias=False)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        with annotate("PP"):
            x = self.down(self.activation(self.gate(x)) * self.up(x))
        return self.loss(x, labels)


@pytest.mark.parametrize("activation", [F.silu, F.gelu])
def test_a_fused_gate_keeps_one_tensor_less_and_is_one_kernel(activation):
    plain, fused = (
        capture(
            SwiGLU(activation=activation), kernels=KernelChoice(activation=choice),
            micro_batch=2, seq_len=8, dtype="bf16",
        ).segments[1]
        for choice in ("unfused", "fused")
    )  # fmt: skip
    one = 2 * 8 * 32 * 2
    assert (plain.saved_bytes, fused.saved_bytes) == (4 * one, 3 * one)
    names = [op.name for op in fused.forward.operations if op.kind is OpKind.ELEMENTWISE]
    assert names == ["fused.gated_activation.default"]
    assert fused.forward.workspace_bytes < plain.forward.workspace_bytes + one
    products = [op for op in fused.backward.operations if op.kind is OpKind.MATMUL]
    assert sum(op.count for op in products) == 6


def test_an_activation_that_no_product_follows_stays_as_it_is():
    plain, fused = (
        capture(
            modules.Chain(blocks=2),
            kernels=KernelChoice(activation=choice),
            micro_batch=2,
            seq_len=8,
            dtype="fp32",
        )
        for choice in ("unfused", "fused")
    )
    assert plain.segments[1].saved_tensors == fused.segments[1].saved_tensors
    assert plain.segments[1].forward.operations == fused.segments[1].forward.operations


def products(cost):
    return sum(op.flops * op.count for op in cost.operations if op.kind is OpKind.MATMUL)


LOGITS = 2 * 8 * modules.VOCABULARY


def head(choice, **changes):
    module = modules.Chain(blocks=1)
    sizes = {"micro_batch": 2, "seq_len": 8, "dtype": "bf16"} | changes
    return capture(module, kernels=KernelChoice(cross_entropy=choice), **sizes).segments[-1]


def test_an_unfused_loss_keeps_its_log_softmax_in_fp32():
    assert head("unfused").saved_bytes - 4 == 4 * LOGITS  # and the count of its rows, one fp32 number


def test_a_fused_loss_keeps_the_gradient_in_place_of_the_logits():
    segment = head("fused")
    assert segment.saved_bytes == 2 * LOGITS
    assert [op.name for op in segment.forward.operations] == [
        "aten.mm.default",
        "fused.cross_entropy.default",
    ]
    assert segment.forward.operations[-1].bytes == 2 * 2 * LOGITS + 8 * 2 * 8 + 4


def test_a_chunked_loss_keeps_no_logits_and_does_all_three_products_in_forward():
    segment, plain = head("chunked"), head("unfused")
    hidden = 2 * 8 * modules.HIDDEN * 2
    weights = modules.VOCABULARY * modules.HIDDEN * 2
    assert segment.saved_bytes == hidden + weights
    both = [
        [op for op in s.forward.operations + s.backward.operations if op.kind is OpKind.MATMUL]
        for s in (segment, plain)
    ]
    total, expected = (sum(op.flops * op.count for op in ops) for ops in both)
    assert total == expected
    assert not [op for op in segment.backward.operations if op.kind is OpKind.MATMUL]
    without = [op for op in segment.forward_no_grad.operations if op.kind is OpKind.MATMUL]
    assert 3 * sum(op.flops * op.count for op in without) == total


def test_chunks_of_the_loss_make_the_peak_of_the_head_smaller():
    class Wide(modules.Chain):
        def __init__(self):
            super().__init__(blocks=0)
            self.head = nn.Linear(modules.HIDDEN, 1024, bias=False)

    peak = {
        choice: capture(
            Wide(), kernels=KernelChoice(cross_entropy=choice), micro_batch=2, seq_len=512, dtype="bf16"
        ).segments[-1]
        for choice in ("unfused", "fused", "chunked")
    }
    sizes = [peak[choice].saved_bytes + peak[choice].forward.workspace_bytes for choice in peak]
    logits = 2 * 512 * 1024
    assert sizes[0] >= (4 + 4) * logits
    assert sizes[1] == pytest.approx(2 * logits, rel=0.05)
    assert sizes[2] < logits / 2


def test_a_chunked_loss_that_is_not_straight_from_a_linear_layer_is_refused_by_name():
    class Capped(modules.Chain):
        def loss(self, x, labels):
            with annotate("PP"):
                logits = torch.tanh(self.head(x))
                return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")

    with pytest.raises(ModelError) as caught:
        capture(
            Capped(), kernels=KernelChoice(cross_entropy="chunked"), micro_batch=1, seq_len=8, dtype="fp32"
        )
    assert (caught.value.field, caught.value.value) == ("cross_entropy", "chunked")


def test_a_mean_loss_is_refused_whatever_kernel_computes_it():
    class Mean(modules.Chain):
        def loss(self, x, labels):
            with annotate("PP"):
                return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())

    for choice in ("unfused", "fused", "chunked"):
        with pytest.raises(ModelError, match="sum of token losses"):
            capture(
                Mean(), kernels=KernelChoice(cross_entropy=choice), micro_batch=1, seq_len=8, dtype="fp32"
            )


def test_unfused_rms_norm_falls_apart_into_its_operators():
    source = find_model("tiny-llama")
    fused, apart = (
        once(source, kernels=KernelChoice(norm=norm)).segments[1] for norm in ("fused", "unfused")
    )
    assert len(fused.forward.operations) == 1 < len(apart.forward.operations)
    assert apart.saved_bytes > fused.saved_bytes


@pytest.mark.parametrize(
    "choice",
    [{"attention": "math"}, {"attention": "fused_softmax"}, {"attention": "eager"}, {"activation": "fused"},
     {"norm": "unfused"}, {"cross_entropy": "fused"}, {"cross_entropy": "chunked"}, {"device": "cpu"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_repeated_block_is_the_same_captured_once_or_each_time(name, choice):
    source = family(name)
    replayed, each = (
        capture_fresh(source, name="t", sizes=SIZES, kernels=KernelChoice(**choice), dedupe=dedupe)
        for dedupe in (True, False)
    )
    assert replayed == each


@pytest.mark.parametrize(
    ("options", "field"), [({"attention": "flahs"}, "attention"), ({"atention": "flash"}, "kernels")]
)
def test_an_unknown_kernel_gets_the_nearest_known_one(options, field):
    with pytest.raises(ModelError) as caught:
        KernelChoice().changed(options, where="recipe.yaml")
    assert (caught.value.where, caught.value.field) == ("recipe.yaml", field)
    assert "did you mean" in caught.value.fix.lower()


def named(cost):
    return [op.name for op in cost.operations for _ in range(op.count)]


def test_a_fused_rotation_is_one_kernel_each_way_for_queries_and_one_for_keys():
    plain, fused = (
        once(family("llama"), kernels=KernelChoice(rotary=choice)) for choice in ("unfused", "fused")
    )
    layer = next(i for i, s in enumerate(fused.segments) if "fused.rotary.default" in named(s.forward))
    before, after = plain.segments[layer], fused.segments[layer]
    assert named(after.forward).count("fused.rotary.default") == 2
    assert named(after.backward).count("fused.rotary_backward.default") == 2
    assert products(after.forward) == products(before.forward)
    assert after.saved_bytes <= before.saved_bytes
    moved = [sum(op.bytes * op.count for op in s.forward.operations) for s in (before, after)]
    assert moved[1] < moved[0]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_fused_projections_are_fewer_and_larger_products_of_the_same_model(name):
    apart = family(name)
    choice = KernelChoice(projections="fused", activation="fused")
    fused = apart.written_for(choice)
    plain, joined = once(apart, kernels=KernelChoice(activation="fused")), once(fused, kernels=choice)
    assert sum(p.numel for p in joined.parameters) == sum(p.numel for p in plain.parameters)
    assert fused.n_parameters == apart.n_parameters
    for way in ("forward", "backward"):
        before, after = (
            [op for s in model.segments for op in getattr(s, way).operations] for model in (plain, joined)
        )
        linear = {OpKind.MATMUL, OpKind.GROUPED_MATMUL}
        counts = [sum(op.count for op in ops if op.kind in linear) for ops in (before, after)]
        flops_of = [sum(op.flops * op.count for op in ops if op.kind in linear) for ops in (before, after)]
        assert counts[1] < counts[0]
        assert flops_of[0] == flops_of[1]


def test_a_fused_gate_over_halves_of_one_projection_writes_the_gradient_of_the_whole():
    choice = KernelChoice(projections="fused", activation="fused")
    model = once(family("llama").written_for(choice), kernels=choice)
    layer = next(s for s in model.segments if "fused.gated_activation.default" in named(s.forward))
    gate = next(
        op for op in layer.backward.operations if op.name == "fused.gated_activation_backward.default"
    )
    whole = gate.shape[0]
    (half,) = {op.shape[0] for op in layer.forward.operations if op.name == "fused.gated_activation.default"}
    assert whole == half  # elements of the largest tensor it reads: gate and up together
    catenated = [op.shape[0] for op in layer.backward.operations if op.name == "aten.cat.default"]
    assert whole not in catenated
