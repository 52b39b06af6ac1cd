"""Models and sizes that cannot be captured: one message with field and fix."""

import math

import modules
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from piper import annotate
from piper.capture import capture
from piper.errors import ModelError
from piper.models import find_model

SIZES = {"micro_batch": 2, "seq_len": 8, "dtype": "fp32"}


class WithForward(modules.Chain):
    """A chain without blocks whose forward is the test's."""

    def __init__(self, forward):
        super().__init__(blocks=0)
        self.of_test = forward

    def forward(self, tokens, labels):
        return self.of_test(self, tokens, labels)


def refused(forward, **changes):
    module = forward if isinstance(forward, nn.Module) else WithForward(forward)
    with pytest.raises(ModelError) as caught:
        capture(module, **(SIZES | changes))
    assert caught.value.where.startswith(type(module).__name__)
    assert caught.value.fix
    return caught.value


def test_more_tokens_than_any_microbatch_has_are_refused(tmp_path):
    with pytest.raises(ModelError) as caught:
        capture(find_model("tiny-llama"), micro_batch=2**30, seq_len=2**30, dtype="fp32", cache_dir=tmp_path)
    assert caught.value.field == "tokens of a microbatch"
    assert "--seq-len" in caught.value.fix


@pytest.mark.parametrize("field", ["micro_batch", "seq_len"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None, math.nan])
def test_a_size_that_is_no_positive_number_is_refused(field, value):
    assert refused(modules.Chain(), **{field: value}).field == field


@pytest.mark.parametrize("dtype", ["bf61", "int64", "fp8"])
def test_a_dtype_that_cannot_be_captured_is_refused(dtype, tmp_path):
    assert refused(modules.Chain(), dtype=dtype).field == "dtype"
    with pytest.raises(ModelError) as caught:
        capture(find_model("tiny-llama"), micro_batch=1, seq_len=8, dtype=dtype, cache_dir=tmp_path)
    assert caught.value.field == "dtype"


@pytest.mark.parametrize(
    "average",
    [
        lambda scores, labels: F.cross_entropy(scores, labels),
        lambda scores, labels: F.cross_entropy(scores, labels, reduction="none").mean(),
        lambda scores, labels: F.nll_loss(F.log_softmax(scores, dim=-1), labels, reduction="mean"),
    ],
    ids=["cross_entropy", "mean", "nll_loss"],
)
def test_a_mean_loss_is_refused(average):
    def forward(self, tokens, labels):
        with annotate("PP"):
            return average(self.head(self.embed(tokens)).float().flatten(0, 1), labels.flatten())

    error = refused(forward)
    assert error.field == "loss"
    assert 'reduction="sum"' in error.fix


def test_a_sum_that_uses_means_on_the_way_is_a_sum():
    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
            scores = self.head(x * x.mean()).float().flatten(0, 1)
            return F.cross_entropy(scores, labels.flatten(), reduction="mean") * labels.numel()

    assert capture(WithForward(forward), **SIZES).segments


def test_at_most_sixteen_unannotated_operators_are_named():
    names = ["abs", "neg", "exp", "log", "sin", "cos", "tan", "tanh", "sqrt", "rsqrt", "floor", "ceil", "erf",
             "sign", "sigmoid", "square", "log2", "exp2", "sinh", "cosh"]  # fmt: skip

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        for name in names:
            x = getattr(torch, name)(x)
        return self.loss(x, labels)

    error = refused(forward)
    assert error.field == "unannotated operators"
    assert len(str(error.value).split(", ")) == 16
    assert "20 calls" in error.rule


def test_a_model_without_any_scope_is_refused():
    def forward(self, tokens, labels):
        logits = self.head(self.embed(tokens))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")

    error = refused(forward)
    assert error.field == "unannotated operators"
    assert str(error.value).startswith("aten.embedding.default")


def test_views_outside_of_scopes_are_allowed():
    def forward(self, tokens, labels):
        flat = labels.flatten()
        with annotate("PP"):
            x = self.embed(tokens)
        x = x.flatten(0, 1)
        with annotate("PP"):
            return F.cross_entropy(self.head(x).float(), flat, reduction="sum")

    model = capture(WithForward(forward), **SIZES)
    assert model.segments[1].inputs == ((0, 0), (-1, 1))
    assert model.segments[0].outputs[0].shape == (16, modules.HIDDEN)


def test_a_view_between_scopes_belongs_to_the_segment_before():
    class Between(modules.Chain):
        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            flat, labels = x.flatten(0, 1), labels.flatten()
            with annotate("PP"):
                return F.cross_entropy(self.head(flat).float(), labels, reduction="sum")

    model = capture(Between(blocks=2), **SIZES)
    assert model.segments[2].inputs == ((1, 0), (-1, 1))
    assert [spec.shape for spec in model.segments[2].outputs] == [(16, modules.HIDDEN), (16,)]
    assert model.segments[3].inputs == ((2, 0), (2, 1))


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (lambda loss: None, "NoneType"),
        (lambda loss: (loss, loss), "tuple"),
        (lambda loss: loss.unsqueeze(0), "torch.float32 [1]"),
        (lambda loss: loss.to(torch.bfloat16), "torch.bfloat16 []"),
    ],
)
def test_a_loss_that_is_no_fp32_number_is_refused(result, shown):
    def forward(self, tokens, labels):
        with annotate("PP"):
            logits = self.head(self.embed(tokens)).float().flatten(0, 1)
            return result(F.cross_entropy(logits, labels.flatten(), reduction="sum"))

    error = refused(forward)
    assert (error.field, error.value) == ("forward", shown)


def test_a_loss_without_gradient_is_refused():
    def forward(self, tokens, labels):
        with annotate("PP"):
            return self.head(self.embed(tokens)).detach().float().sum()

    assert refused(forward).field == "loss"


def test_a_model_without_trained_parameters_is_refused():
    assert refused(modules.Chain().requires_grad_(False)).field == "loss"


def test_a_loss_before_the_last_scope_is_refused():
    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        loss = self.loss(x, labels)
        with annotate("PP"):
            x.exp()
        return loss

    error = refused(forward)
    assert (error.field, error.value) == ("loss", "segment 1")


def test_a_tensor_that_is_no_buffer_is_refused():
    class Constant(modules.Chain):
        def __init__(self):
            super().__init__(blocks=0)
            self.table = torch.ones(modules.HIDDEN, device="meta")

        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.embed(tokens) * self.table
            return self.loss(x, labels)

    error = refused(Constant())
    assert error.field == "constant tensor"
    assert "register_buffer" in error.fix


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, tokens, labels: self.loss(self.embed(tokens)[: int(tokens.max())], labels),
        lambda self, tokens, labels: self.no_such_layer(tokens),
        lambda self, tokens, labels: 1 / 0,
    ],
    ids=["content", "attribute", "division"],
)
def test_a_forward_that_fails_is_blamed_with_its_message(forward):
    error = refused(forward)
    assert error.field == "forward"
    assert "tokens, labels" in error.fix


def test_a_forward_that_takes_no_labels_and_returns_no_scores_is_blamed():
    class Unary(nn.Module):
        def forward(self, tokens):
            return tokens

    error = refused(Unary())
    assert error.field == "forward"
    assert "[microbatch, seq, classes]" in error.rule


def test_a_boundary_that_grows_in_two_dimensions_is_refused():
    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
            pairs = x.sum(1) @ x.sum(1).t()
        with annotate("PP"):
            x = x * pairs.sum()
        return self.loss(x, labels)

    error = refused(forward)
    assert (error.field, error.value) == ("boundary tensor", [2, 2])
    assert error.rule == "becomes [3, 3] with one sequence more"


def test_segments_that_depend_on_the_microbatch_are_refused():
    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        for _ in range(tokens.shape[0]):
            with annotate("PP"):
                x = x.exp()
        return self.loss(x, labels)

    assert refused(forward).field == "segments"


def test_an_unknown_dtype_at_a_boundary_is_named():
    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
            small = x.to(torch.int8)
        with annotate("PP"):
            x = x + small
        return self.loss(x, labels)

    error = refused(forward)
    assert (error.field, error.value) == ("dtype", "torch.int8")


def test_an_error_of_piper_inside_forward_keeps_its_words():
    def forward(self, tokens, labels):
        with annotate("PP", -1):
            return self.embed(tokens)

    with pytest.raises(ModelError) as caught:
        capture(WithForward(forward), **SIZES)
    assert (caught.value.where, caught.value.field) == ("piper.annotate", "index")


@pytest.mark.parametrize(
    "misfit",
    [
        lambda x: x + x.new_zeros(3, x.shape[-1]),
        lambda x: torch.where(x.new_zeros(3, 1, dtype=torch.bool), x, x),
        lambda x: x @ x.new_zeros(x.shape[-1] + 1, 4),
        lambda x: torch.bmm(x, x.new_zeros(x.shape[0] + 1, x.shape[-1], 4)),
        lambda x: F.linear(x, x.new_zeros(x.shape[-1], x.shape[-1]), x.new_zeros(x.shape[-1] - 1)),
        lambda x: torch.cat([x, x[..., :3]], 1),
        lambda x: F.layer_norm(x, (x.shape[-1] - 1,)),
        lambda x: F.rms_norm(x, x.shape[-1:], x.new_zeros(x.shape[-1] - 1)),
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None, :, :3], x[:, None])[:, 0],
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None, :5], x[:, None])[:, 0],
        lambda x: x.topk(x.shape[-1] + 5).values,
    ],
)
def test_operands_that_do_not_fit_are_refused_as_torch_would(misfit):
    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
            return self.loss(x + misfit(x).sum(), labels)

    assert refused(forward).field == "forward"
