"""A backward cut in two: gradients of inputs first, gradients of parameters later."""

from collections import Counter

import modules
import pytest
import torch
from torch import nn

from cost_models.ops import OpKind
from piper import annotate
from piper.capture import capture
from piper.models import find_model

SIZES = {"micro_batch": 2, "seq_len": 8, "dtype": "fp32"}
UNIT = 2 * 8 * modules.HIDDEN * 4
"""Bytes of one hidden tensor."""


def counts(*passes):
    found = Counter()
    for cost in passes:
        for op in cost.operations:
            found[op.without_count] += op.count
    return found


def flops(cost, kind=OpKind.MATMUL):
    return sum(op.flops * op.count for op in cost.operations if op.kind is kind)


MODULES = [
    modules.Chain(),
    modules.Skip(),
    modules.Anchored(),
    modules.Pairs(),
    modules.Chain(modules.NestedBlock),
    modules.OneSegment(),
    modules.SharedBlock(),
    modules.HalfUsed(),
    modules.Tied(),
    modules.Chunked(),
    modules.InPlace(),
]


@pytest.mark.parametrize("dedupe", [True, False])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_both_halves_are_the_backward_and_keep_no_more_than_it(module, dedupe):
    for segment in capture(module, dedupe=dedupe, **SIZES).segments:
        early, late = segment.backward_inputs, segment.backward_weights
        assert counts(early, late) == counts(segment.backward)
        assert 0 <= segment.saved_for_weights_bytes <= segment.saved_bytes
        assert segment.gradients_for_weights_bytes >= 0
        assert early.workspace_bytes >= 0
        assert late.workspace_bytes >= 0
        for kept, saved in (
            (segment.inputs_saved_for_weights, segment.inputs_saved),
            (segment.outputs_saved_for_weights, segment.outputs_saved),
        ):
            assert len(kept) == len(saved)
            assert all(is_saved or not is_kept for is_kept, is_saved in zip(kept, saved, strict=True))
        assert len(segment.output_gradients_for_weights) == len(segment.outputs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_halves_of_llama_are_its_backward(dtype, tmp_path):
    sizes = SIZES | {"dtype": dtype, "cache_dir": tmp_path}
    for segment in capture(find_model("tiny-llama"), **sizes).segments:
        assert counts(segment.backward_inputs, segment.backward_weights) == counts(segment.backward)
        if any(spec.requires_grad for spec in segment.outputs):
            assert flops(segment.backward_weights) == flops(segment.forward)


def test_linear_layers_need_one_matmul_for_inputs_and_one_for_weights():
    block = capture(modules.Chain(), **SIZES).segments[1]
    assert flops(block.backward_inputs) == flops(block.backward_weights) == flops(block.forward) > 0
    assert {op.direction for op in block.backward_inputs.operations} == {"dgrad", "bwd"}
    assert {op.direction for op in block.backward_weights.operations} == {"wgrad"}


def test_the_weights_wait_for_the_inputs_of_linear_layers_and_the_gradients_of_their_outputs():
    """A block x + down(relu(up(x))): relu's result is saved inside, x is the segment's input."""
    block = capture(modules.Chain(), **SIZES).segments[1]
    assert block.saved_for_weights_bytes == block.saved_bytes == 2 * UNIT
    assert block.gradients_for_weights_bytes == 2 * UNIT  # of up's result; that of down's comes from outside
    assert block.inputs_saved_for_weights == (True,)
    assert block.outputs_saved_for_weights == (False,)
    assert block.output_gradients_for_weights == (True,)
    weight = 2 * modules.HIDDEN * modules.HIDDEN * 4
    # BW: relu's result dies with the gradient of down, before that of up is made.
    assert block.backward_weights.workspace_bytes == max(weight, 2 * weight - 2 * UNIT)
    # BI: the gradients of relu's and of up's result are there at once (4 units); at its end the latter (2) is
    # kept and that of x (1) goes out, so that 1 more than these was needed.
    assert block.backward_inputs.workspace_bytes == UNIT


def test_a_segment_whose_inputs_need_no_gradient_does_everything_later():
    embed = capture(modules.Chain(), **SIZES).segments[0]
    assert embed.backward_inputs.operations == ()
    assert embed.backward_weights.operations == embed.backward.operations != ()
    assert embed.backward_weights.workspace_bytes == embed.backward.workspace_bytes
    assert embed.saved_for_weights_bytes == embed.saved_bytes
    assert embed.inputs_saved_for_weights == embed.inputs_saved == (True,)
    assert embed.gradients_for_weights_bytes == 0


def test_frozen_layers_have_nothing_to_do_later():
    module = modules.Chain()
    module.blocks.requires_grad_(False)
    block = capture(module, **SIZES).segments[1]
    assert block.backward_weights.operations == ()
    assert block.backward_inputs.operations == block.backward.operations
    assert (block.saved_for_weights_bytes, block.gradients_for_weights_bytes) == (0, 0)
    assert not any((*block.inputs_saved_for_weights, *block.output_gradients_for_weights))


def test_behind_a_frozen_embedding_the_first_block_has_no_gradient_to_pass_on():
    module = modules.Chain()
    module.embed.requires_grad_(False)
    _, first, second, *_ = capture(module, **SIZES).segments
    assert first.backward_inputs.operations == ()
    assert counts(first.backward_weights) == counts(first.backward)
    assert flops(second.backward_inputs) == flops(second.forward)


class Normed(modules.Chain):
    def __init__(self):
        super().__init__(blocks=0)
        self.norm = nn.LayerNorm(modules.HIDDEN)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        with annotate("PP"):
            x = self.norm(x)
        return self.loss(x, labels)


def test_a_norm_that_makes_both_gradients_in_one_kernel_is_not_put_off():
    norm = capture(Normed(), **SIZES).segments[1]
    assert [op.kind for op in norm.backward_inputs.operations] == [OpKind.NORM]
    assert norm.backward_weights.operations == ()


class Biased(modules.Chain):
    """Adds a parameter: the input's gradient is the output's, so there is nothing to compute for it."""

    def __init__(self):
        super().__init__(blocks=0)
        self.bias = nn.Parameter(torch.zeros(modules.HIDDEN))

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        with annotate("PP"):
            x = x + self.bias
        return self.loss(x, labels)


def test_a_gradient_that_only_passes_through_costs_nothing_and_the_sum_over_rows_waits():
    biased = capture(Biased(), **SIZES).segments[1]
    assert biased.backward_inputs.operations == ()
    assert [op.kind for op in biased.backward_weights.operations] == [OpKind.REDUCTION]
    assert biased.output_gradients_for_weights == (True,)
    assert biased.saved_for_weights_bytes == 0


class Parallel(modules.Chain):
    """Two layers side by side: their outputs have one gradient."""

    def __init__(self):
        super().__init__(blocks=0)
        self.left = nn.Linear(modules.HIDDEN, modules.HIDDEN, bias=False)
        self.right = nn.Linear(modules.HIDDEN, modules.HIDDEN, bias=False)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        with annotate("PP"):
            left = self.left(x)
        with annotate("PP"):
            right = self.right(x)
        with annotate("PP"):
            x = x + left + right
        return self.loss(x, labels)


def test_outputs_that_are_summed_share_the_gradient_that_waits():
    embed, left, right, *rest = capture(Parallel(), **SIZES).segments
    assert left.output_gradients_for_weights == right.output_gradients_for_weights == (True,)
    assert left.shared_gradients == right.shared_gradients == (0,)
    assert embed.output_gradients_for_weights == (True,)  # a sum of its own
    assert all(segment.shared_gradients == () for segment in (embed, *rest))


class Shifted(modules.Chain):
    """A parameter is added to what another layer made: its gradient and that layer's is one tensor."""

    def __init__(self):
        super().__init__(blocks=1)
        self.shift = nn.Parameter(torch.zeros(modules.HIDDEN))

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        with annotate("PP"):
            x = self.blocks[0](x)
        with annotate("PP"):
            x = x + self.shift
            x = x + torch.tanh(x)
        return self.loss(x, labels)


def test_a_gradient_that_goes_on_and_waits_as_well_is_one_tensor():
    _, block, shifted, *_ = capture(Shifted(), **SIZES).segments
    assert shifted.input_gradients_for_weights == (True,)
    assert shifted.gradients_for_weights_bytes == 0
    assert block.output_gradients_for_weights == (True,)
    assert block.input_gradients_for_weights == (False,)


def test_the_gradient_of_a_parameter_that_the_first_half_makes_waits_for_the_second():
    norm = capture(Normed(), **SIZES).segments[1]
    assert norm.gradients_for_weights_bytes == 2 * modules.HIDDEN * 4  # weight and bias


def test_gradients_of_outputs_are_known_by_the_tensor_and_not_by_their_shape():
    block = capture(find_model("tiny-llama"), **SIZES).segments[5]  # residual sum and its norm, of one shape
    assert [spec.shape for spec in block.outputs] == [(2, 8, 64), (2, 8, 64)]
    assert block.output_gradients_for_weights[0] is False


def test_the_loss_starts_with_the_gradient_of_its_input():
    head = capture(modules.Chain(), **SIZES).segments[-1]
    assert [op.direction for op in head.backward_weights.operations] == ["wgrad"]
    assert head.inputs_saved_for_weights == (True, False)  # hidden states yes, labels no
    assert head.output_gradients_for_weights == (False,)
    assert head.gradients_for_weights_bytes == 2 * 8 * modules.VOCABULARY * 4
