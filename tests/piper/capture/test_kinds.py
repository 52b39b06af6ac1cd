"""Kinds of things that users' modules do: each is captured as it costs, or refused by name with the fix."""

from __future__ import annotations

import modules
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cost_models.ops import OpKind
from piper import annotate
from piper.capture import capture
from piper.errors import ModelError
from piper.runtime.program import build_program

HIDDEN, SIZES = modules.HIDDEN, {"micro_batch": 2, "seq_len": 8, "dtype": "fp32"}
NUMBERS = 2 * 8 * HIDDEN
"""Elements of the tensor that goes into the part under test."""


class Middle(modules.Chain):
    """Embedding, the part under test in a scope of its own, head."""

    def __init__(self, call, part=None):
        super().__init__(blocks=0)
        self.part = part or nn.Identity()
        self.call = call

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        with annotate("PP"):
            x = self.call(self.part, x)
        return self.loss(x, labels)


def middle(call, part=None):
    return capture(Middle(call, part), **SIZES).segments[1]


def refused(call, part=None):
    with pytest.raises(ModelError) as caught:
        middle(call, part)
    return caught.value


def names(cost):
    return [op.name.split(".")[1] for op in cost.operations for _ in range(op.count)]


def matmul_flops(cost):
    return sum(op.flops * op.count for op in cost.operations if op.kind is OpKind.MATMUL)


def feed_forward():
    return nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.ReLU(), nn.Linear(2 * HIDDEN, HIDDEN))


def heads(x):
    return x.unflatten(-1, (2, HIDDEN // 2)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


# custom autograd functions


class SavedByContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        middle = x.exp()
        ctx.save_for_backward(middle)
        return middle * 3

    @staticmethod
    def backward(ctx, grad):
        (middle,) = ctx.saved_tensors
        return grad * middle * 3


class SavedByAttribute(SavedByContext):
    @staticmethod
    def forward(ctx, x):
        ctx.middle = x.exp()
        return ctx.middle * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.middle * 3


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class LargestAndWhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        value, where = x.max(-1, keepdim=True)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(where)
        ctx.shape = x.shape
        return value, where

    @staticmethod
    def backward(ctx, grad, _):
        (where,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(-1, where, grad)


@pytest.mark.parametrize("function", [SavedByContext, SavedByAttribute])
def test_what_a_custom_function_keeps_is_saved_whichever_way_it_keeps_it(function):
    segment = middle(lambda _, x: function.apply(x))
    assert names(segment.forward) == ["exp", "mul"]
    assert names(segment.backward) == ["mul", "mul"]
    assert segment.saved_bytes == 4 * NUMBERS
    assert segment.inputs_saved == (False,)


def test_a_custom_function_may_change_its_input():
    segment = middle(lambda _, x: InPlace.apply(x + 1))
    assert names(segment.forward) == ["add", "mul_"]
    assert names(segment.backward) == ["mul"]
    assert segment.saved_bytes == 0


def test_a_custom_function_may_return_numbers_without_gradient():
    class Where(Middle):
        def loss(self, x, labels):
            value, where = x
            with annotate("PP"):
                return (self.head.weight[0, 0] * value.sum() + where.sum()).float() + 0 * labels.sum()

    model = capture(Where(lambda _, x: LargestAndWhere.apply(x)), **SIZES)
    segment = model.segments[1]
    assert [(spec.dtype, spec.requires_grad) for spec in segment.outputs] == [
        ("fp32", True),
        ("int64", False),
    ]
    assert "scatter" in names(segment.backward)


# checkpoints


def test_a_checkpointed_part_keeps_its_input_and_runs_again_in_backward():
    plain = middle(lambda part, x: part(x), feed_forward())
    again = middle(lambda part, x: checkpoint(part, x, use_reentrant=False), feed_forward())
    assert plain.saved_bytes == 4 * 2 * NUMBERS
    assert again.saved_bytes == 0
    assert again.inputs_saved == (True,)
    assert again.forward.operations == plain.forward.operations
    assert matmul_flops(again.backward) == matmul_flops(plain.backward) + matmul_flops(plain.forward) / 2
    assert [op.direction for op in again.backward.operations][:2] == [
        "fwd",
        "fwd",
    ]  # up to what backward needs


def test_scopes_inside_of_a_checkpointed_part_are_opened_once():
    def scoped(part, x):
        with annotate("INNER"):
            return part(x)

    module = Middle(lambda part, x: checkpoint(scoped, part, x, use_reentrant=False) + 1, feed_forward())
    model = capture(module, **SIZES)
    assert [dict(s.tags).get("INNER") for s in model.segments] == [None, 0, None, None]
    assert {"fwd"} < {op.direction for op in model.segments[1].backward.operations}


def test_a_reentrant_checkpoint_is_refused_with_the_fix():
    error = refused(lambda part, x: checkpoint(part, x, use_reentrant=True), feed_forward())
    assert error.field == "backward"
    assert "use_reentrant=False" in error.fix


# buffers


def updated(part, x):
    with torch.no_grad():
        part.mean.lerp_(x.mean((0, 1)), 0.1)
    return x - part.mean


def replaced(part, x):
    part.mean = 0.9 * part.mean + 0.1 * x.detach().mean((0, 1))
    return x - part.mean


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))


@pytest.mark.parametrize(
    ("call", "part", "name"),
    [
        (updated, Mean(), "part.mean"),
        (
            lambda part, x: part(x.transpose(1, 2)).transpose(1, 2),
            nn.BatchNorm1d(HIDDEN),
            "part.running_mean",
        ),
    ],
)
def test_a_buffer_that_forward_changes_is_simulated_and_told(call, part, name):
    model = capture(Middle(call, part), **SIZES)
    assert model.segments[1].inputs == ((0, 0),)
    assert f"forward changes the buffer {name}" in model.notices[0]


def test_a_buffer_that_forward_replaces_is_put_back_and_mistaken_for_nothing_else():
    module = Middle(replaced, Mean())
    model = capture(module, **SIZES)
    assert model.segments[1].inputs == ((0, 0),)
    assert model.segments[2].inputs[0] == (1, 0)
    assert model == capture(module, **SIZES)
    assert not module.part.mean.is_meta


# attention


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_takes_the_fused_kernel_unless_it_must_show_its_weights(need_weights):
    part = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
    segment = middle(lambda part, x: part(x, x, x, need_weights=need_weights)[0], part)
    assert ("_scaled_dot_product_flash_attention" in names(segment.forward)) is not need_weights
    assert ("_softmax" in names(segment.forward)) is need_weights


def test_an_encoder_layer_of_torch_has_fused_attention_and_masks_of_its_dropouts():
    part = nn.TransformerEncoderLayer(HIDDEN, 2, 2 * HIDDEN, dropout=0.1, batch_first=True)
    found = names(middle(lambda part, x: part(x), part).forward)
    assert found.count("_scaled_dot_product_flash_attention") == 1
    assert found.count("native_dropout") == 3


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({"is_causal": True}, "_scaled_dot_product_flash_attention"),
        ({"dropout_p": 0.1}, "_scaled_dot_product_flash_attention"),
        ({"attn_mask": torch.zeros(8, 8, device="meta")}, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_scaled_dot_product_attention_is_one_kernel_each_way(options, kernel):
    def attend(part, x):
        mask = {} if "attn_mask" not in options else {"attn_mask": x.new_zeros(8, 8)}
        return merged(F.scaled_dot_product_attention(heads(x), heads(x), heads(x), **(options | mask)))

    segment = middle(attend)
    assert names(segment.forward).count(kernel) == 1
    assert names(segment.backward).count(f"{kernel}_backward") == 1


def test_flex_attention_is_refused_with_the_fix():
    error = refused(lambda _, x: merged(flex_attention(heads(x), heads(x), heads(x))))
    assert "FlexAttention" in str(error.value)
    assert "F.scaled_dot_product_attention" in error.fix


# dropout, no-grad, in place, autocast, compiled


@pytest.mark.parametrize(
    ("part", "kernels", "saved"),
    [
        (nn.Dropout(0.1), ["native_dropout"], NUMBERS),
        (nn.Dropout(0.1, inplace=True), ["native_dropout", "copy_"], NUMBERS),
        (nn.Dropout(0.0), [], 0),
        (nn.Dropout1d(0.1), ["bernoulli_", "div_", "mul"], 4 * 2 * 8),
        (nn.AlphaDropout(0.1), ["bernoulli_", "add", *["mul_", "add_"] * 2, "mul"], 4 * NUMBERS),
    ],
    ids=["plain", "in place", "zero", "channels", "alpha"],
)
def test_each_kind_of_dropout_keeps_what_its_backward_needs(part, kernels, saved):
    segment = middle(lambda part, x: part(x.exp().neg()), part)
    first, second, *found = names(segment.forward)
    assert [first, second] == ["exp", "neg"]
    assert sorted(found) == sorted(kernels)
    assert segment.saved_bytes == saved + 4 * NUMBERS  # and the result of exp


def test_a_part_without_gradients_has_no_backward_and_keeps_nothing():
    def frozen(part, x):
        with torch.no_grad():
            y = part(x)
        return x + y

    segment = middle(frozen, feed_forward())
    assert names(segment.forward) == ["addmm", "relu", "addmm", "add"]
    assert segment.backward.operations == ()
    assert (segment.saved_bytes, segment.inputs_saved) == (0, (False,))


def test_a_frozen_part_passes_gradients_on_but_has_none_of_its_own():
    segment = middle(lambda part, x: part(x), feed_forward().requires_grad_(False))
    assert {op.direction for op in segment.backward.operations if op.kind is OpKind.MATMUL} == {"dgrad"}
    assert len(segment.parameters) == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_in_forward_is_refused_and_switching_it_off_is_not(device):
    def cast(part, x):
        with torch.autocast(device, dtype=torch.bfloat16):
            return part(x).float()

    def uncast(part, x):
        with torch.autocast(device, enabled=False):
            return part(x)

    error = refused(cast, feed_forward())
    assert (error.field, error.value) == ("autocast", "torch.bfloat16")
    assert "--dtype" in error.fix
    assert middle(uncast, feed_forward()) == middle(lambda part, x: part(x), feed_forward())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # works again afterwards
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.slow
def test_a_compiled_part_is_captured_as_the_python_that_it_was():
    compiled = middle(lambda part, x: part(x), torch.compile(feed_forward()))
    assert compiled.forward == middle(lambda part, x: part(x), feed_forward()).forward


# layers beyond matmuls


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_their_steps_with_the_flops_of_a_real_run(layer):
    def call(part, x):
        return part(x)[0]

    module = Middle(call, layer(HIDDEN, HIDDEN, batch_first=True))
    segment = capture(module, **SIZES).segments[1]
    x = torch.randn(2, 8, HIDDEN, requires_grad=True, device="meta")
    with FlopCounterMode(display=False) as forward:
        made = call(module.part.to("meta"), x)
    with FlopCounterMode(display=False) as backward:
        made.sum().backward()
    assert matmul_flops(segment.forward) == forward.get_total_flops()
    assert matmul_flops(segment.backward) == backward.get_total_flops()


@pytest.mark.parametrize(
    ("call", "part", "operator"),
    [
        (
            lambda part, x: part(x.transpose(1, 2)).transpose(1, 2),
            nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1),
            "aten.convolution.default",
        ),
        (lambda part, x: part(x, x), nn.Bilinear(HIDDEN, HIDDEN, HIDDEN), "aten._trilinear.default"),
        (lambda _, x: torch.fft.fft(x).real, None, "aten._fft_r2c.default"),
    ],
)
def test_a_heavy_operator_without_a_cost_rule_is_refused_by_name(call, part, operator):
    error = refused(call, part)
    assert (error.field, error.value) == ("operator", operator)


def test_an_einsum_has_one_matmul_for_inputs_and_one_for_weights():
    segment = middle(lambda part, x: torch.einsum("bsh,oh->bso", x, part.weight), nn.Linear(HIDDEN, HIDDEN))
    assert sorted(op.direction for op in segment.backward.operations if op.kind is OpKind.MATMUL) == [
        "dgrad",
        "wgrad",
    ]


# branches and boundaries


def test_branches_that_meet_again_go_straight_from_where_they_part():
    class Branches(modules.Chain):
        def __init__(self):
            super().__init__(blocks=0)
            self.left, self.right = feed_forward(), feed_forward()

        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.embed(tokens)
            with annotate("PP"):
                left = self.left(x)
            with annotate("PP"):
                right = self.right(x)
            with annotate("PP"):
                x = left * right
            return self.loss(x, labels)

    model = capture(Branches(), **SIZES)
    assert [segment.inputs for segment in model.segments[:4]] == [
        ((-1, 0),),
        ((0, 0),),
        ((0, 0),),
        ((1, 0), (2, 0)),
    ]
    assert model.segments[3].inputs_saved == (True, True)


def _by_nonzero(rows, chosen, expert, out):
    mine = (chosen == expert).nonzero().flatten()
    out.index_add_(0, mine, rows[mine])


def _by_where(rows, chosen, expert, out):
    (mine,) = torch.where(chosen == expert)
    out[mine] += rows[mine]


def _by_mask(rows, chosen, expert, out):
    mask = chosen == expert
    out[mask] = rows[mask]


def _by_counts(rows, chosen, expert, out):
    ends = torch.bincount(chosen, minlength=4).cumsum(0).tolist()
    order = chosen.argsort()
    mine = order[ends[expert] - chosen.numel() // 4 : ends[expert]]
    out.index_add_(0, mine, rows[mine])


@pytest.mark.parametrize("take", [_by_nonzero, _by_where, _by_mask, _by_counts])
def test_however_tokens_are_routed_each_expert_gets_its_balanced_share(take):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(HIDDEN, 4)
            self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def route(part, x):
        rows = x.flatten(0, 1)
        chosen = part.router(rows).topk(1).indices.flatten()
        out = torch.zeros_like(rows)
        for number, expert in enumerate(part.experts):
            take(expert(rows) if take is _by_mask else rows, chosen, number, out)
        return (out + chosen.unique().sum()).view_as(x)

    model = capture(Middle(route, Routed()), **SIZES)
    moved = [op for op in model.segments[1].forward.operations if op.name.startswith("aten.index.")]
    assert {op.shape for op in moved} >= {(NUMBERS // 4,)}
    assert "every expert chosen alike" in model.notices[0]


@pytest.mark.parametrize("choose", [lambda x: x > 0, lambda x: x.sum(-1) > x.mean()])
def test_other_shapes_that_depend_on_numbers_are_refused(choose):
    error = refused(lambda _, x: x + x[choose(x)].sum())
    assert error.field == "forward"
    assert "F.grouped_mm" in error.fix


def test_a_program_that_is_to_run_assumes_no_routing():
    def read(_, x):
        return x * x[0].argmax(-1).max().item()

    assert capture(Middle(read), **SIZES).notices
    with pytest.raises(RuntimeError, match="meta"):
        build_program(lambda: Middle(read), seq_len=8, micro_batch_sizes=(2,), dtype="fp32")
