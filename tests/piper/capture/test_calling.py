"""How modules are called: positions or keywords, loss inside or outside, tensors or named outputs."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import modules
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from piper import annotate
from piper.capture import capture
from piper.capture.calling import loss_of
from piper.errors import ModelError
from piper.runtime.program import build_program

SIZES = {"micro_batch": 2, "seq_len": 8, "dtype": "fp32"}


def summed(scores, labels):
    return F.cross_entropy(scores.float().flatten(0, 1), labels.flatten(), reduction="sum")


class Scores(modules.Chain):
    """Returns scores; whoever calls it computes the loss."""

    def forward(self, tokens):
        with annotate("PP"):
            x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        with annotate("PP"):
            return self.head(x)


class NamedScores(Scores):
    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=super().forward(input_ids))


class Keywords(Scores):
    """Keyword inputs, and a mapping with the loss out."""

    def forward(self, *, input_ids, labels):
        scores = super().forward(input_ids)
        with annotate("PP"):
            return {"logits": scores, "loss": summed(scores, labels)}


class Tuple(Keywords):
    def forward(self, *, input_ids, labels):
        output = super().forward(input_ids=input_ids, labels=labels)
        return output["loss"], output["logits"]


@dataclass
class Output:
    loss: torch.Tensor


class LikeTransformers(Scores):
    """Shifts labels itself and takes the mean, unless it is told otherwise."""

    def forward(self, input_ids, labels=None, use_cache=None, **options):
        assert use_cache is False
        scores = super().forward(input_ids)
        with annotate("PP"):
            labels = options.get("shift_labels", F.pad(labels, (0, 1), value=-100)[..., 1:])
            loss = F.cross_entropy(scores.float().flatten(0, 1), labels.flatten(), reduction="sum")
            return Output(loss / options.get("num_items_in_batch", labels.numel()))


@pytest.mark.parametrize("kind", [Scores, NamedScores, Keywords, LikeTransformers])
def test_every_way_to_call_gives_the_summed_loss_of_each_token(kind):
    torch.manual_seed(0)
    module, (tokens, labels) = kind(blocks=1), torch.randint(modules.VOCABULARY, (2, 2, 8))
    scores = Scores.forward(module, tokens)
    torch.testing.assert_close(loss_of(module, tokens, labels), summed(scores, labels))


@pytest.mark.parametrize("kind", [Scores, NamedScores, Keywords, LikeTransformers])
def test_every_way_to_call_is_captured(kind):
    model = capture(kind(blocks=2), **SIZES)
    last = model.segments[-1]
    assert last.outputs[0].shape == ()
    assert (-1, 1) in last.inputs
    assert model.facts.vocabulary == modules.VOCABULARY


def test_a_loss_computed_outside_belongs_to_the_last_segment():
    outside, inside = capture(Scores(), **SIZES), capture(modules.Chain(), **SIZES)
    assert [s.tags for s in outside.segments] == [s.tags for s in inside.segments]
    assert outside.segments[-1].forward == inside.segments[-1].forward


@pytest.mark.parametrize("kind", [Scores, NamedScores, Keywords, LikeTransformers])
def test_the_program_of_the_runtime_has_the_same_segments(kind):
    program = build_program(lambda: kind(blocks=2), seq_len=8, micro_batch_sizes=(2,), dtype="fp32")
    model = capture(kind(blocks=2), **SIZES)
    assert [code.inputs for code in program.segments[2]] == [s.inputs for s in model.segments]
    assert [code.parameters for code in program.segments[2]] == [s.parameters for s in model.segments]


def test_of_a_tuple_the_only_number_is_the_loss():
    model = capture(Tuple(), **SIZES)
    assert model.segments == capture(Keywords(), **SIZES).segments


def test_a_tuple_of_two_numbers_is_refused_because_no_one_says_which_is_the_loss():
    class Two(Tuple):
        def forward(self, *, input_ids, labels):
            loss, _ = super().forward(input_ids=input_ids, labels=labels)
            return loss, loss

    with pytest.raises(ModelError) as caught:
        capture(Two(), **SIZES)
    assert (caught.value.field, caught.value.value) == ("forward", "tuple")


def test_other_operations_outside_of_scopes_are_still_refused():
    class Outside(Scores):
        def forward(self, tokens):
            return super().forward(tokens) * 2

    with pytest.raises(ModelError) as caught:
        capture(Outside(), **SIZES)
    assert (caught.value.field, caught.value.value) == ("unannotated operators", "aten.mul.Tensor")


def test_a_value_that_depends_on_shapes_alone_may_be_read():
    """As masks are skipped where positions rise: whole numbers are known without numbers of the model."""

    class Reads(modules.Chain):
        def forward(self, tokens, labels):
            with annotate("PP"):
                positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
                starts = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
                packed = not (starts[:, -1] == 0).all()
                x = self.embed(tokens) * (positions[0, 3].item() + int(packed))
            return self.loss(x, labels)

    model = capture(Reads(), **SIZES)
    assert len(model.segments) == 2
    assert build_program(Reads, seq_len=8, micro_batch_sizes=(2,), dtype="fp32").segments


@pytest.mark.parametrize("read", [lambda t, m: t.max() > 3, lambda t, m: m.embed.weight.sum() > 0])
def test_a_value_that_depends_on_tokens_or_parameters_may_not_be_read(read):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 8)

        def forward(self, tokens, labels):
            with annotate("PP"):
                return summed(self.embed(tokens), labels) if read(tokens, self) else None

    with pytest.raises(ModelError) as caught:
        capture(Reads(), **SIZES)
    assert caught.value.field == "forward"
    assert "read no tensor's content" in caught.value.fix
