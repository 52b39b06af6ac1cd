"""What tensor parallelism cuts inside annotated regions, and what is proportional to the tokens."""

import modules
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cost_models.ops import OpKind, cut
from piper import annotate
from piper.capture import KernelChoice, capture

SIZES = {"micro_batch": 2, "seq_len": 8, "dtype": "fp32"}
HIDDEN, VOCABULARY = modules.HIDDEN, modules.VOCABULARY


class Pair(nn.Module):
    """A column-parallel and a row-parallel layer around an activation, with biases."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        with annotate("PP"), annotate("LAYER"):
            h = self.norm(x)
            with annotate("TP"):
                h = self.down(F.silu(self.gate(h)) * self.up(h))
            return x + h


def in_region(module, tag="TP"):
    model = capture(module, **SIZES)
    return [segment for segment in model.segments if tag in dict(segment.tags)]


def cuts(cost):
    return {(op.kind.value, op.direction, op.shape, op.tensor_dim) for op in cost.operations}


T, H = 16, HIDDEN


def test_columns_are_cut_then_rows_and_what_lies_between():
    region, *_ = in_region(modules.Chain(Pair))
    assert cuts(region.forward) == {
        ("matmul", "fwd", (1, T, 4 * H, H), 2),
        ("elementwise", "fwd", (T * 4 * H,), 0),
        ("matmul", "fwd", (1, T, H, 4 * H), 3),
    }
    assert dict(region.tensor_layout) == {
        "blocks.0.gate.weight": 0,
        "blocks.0.gate.bias": 0,
        "blocks.0.up.weight": 0,
        "blocks.0.down.weight": 1,
        "blocks.0.down.bias": -1,
    }
    assert region.tensor_refused == ()


def test_the_backward_is_cut_where_its_parameters_are():
    region, *_ = in_region(modules.Chain(Pair))
    assert cuts(region.backward_inputs) == {
        ("matmul", "dgrad", (1, T, 4 * H, H), 2),  # of down: its input features
        ("elementwise", "bwd", (T * 4 * H,), 0),
        ("matmul", "dgrad", (1, T, H, 4 * H), 3),  # of gate and up: a sum over output features
        ("elementwise", "bwd", (T * H,), -1),  # both sums, of the whole width
    }
    assert cuts(region.backward_weights) == {
        ("matmul", "wgrad", (1, H, 4 * H, T), 2),
        ("matmul", "wgrad", (1, 4 * H, H, T), 1),
        ("reduction", "bwd", (T * 4 * H,), 0),
        ("reduction", "bwd", (T * H,), -1),
    }


def test_sums_over_cut_features_are_the_workspace_that_stays_whole():
    class Parts(Pair):
        """Column-parallel and row-parallel layers in segments of their own."""

        def forward(self, x):
            with annotate("PP"):
                h = self.norm(x)
                with annotate("TP"):
                    gate, up = self.gate(h), self.up(h)
                    with annotate("ACT"):
                        h = F.silu(gate) * up
                    h = self.down(h)
                return x + h

    model = capture(modules.Chain(Parts, blocks=1), **SIZES)
    columns, middle, rows = (segment for segment in model.segments if "TP" in dict(segment.tags))
    narrow, weight = 4 * T * H, 4 * 4 * H * H
    assert (columns.forward.workspace_bytes, columns.forward.workspace_whole_bytes) == (0, 0)
    assert columns.backward_inputs.workspace_bytes == 2 * narrow
    assert columns.backward_inputs.workspace_whole_bytes == 2 * narrow
    assert columns.backward_weights.workspace_whole_bytes == 0
    assert rows.backward_weights.workspace_bytes == weight + 4 * H
    assert rows.backward_weights.workspace_whole_bytes == 4 * H  # the bias of a row-parallel layer
    assert middle.backward.workspace_whole_bytes == 0
    outside = [s for s in model.segments if "TP" not in dict(s.tags)]
    assert {s.backward.workspace_whole_bytes for s in outside} == {0}


def test_outside_of_regions_nothing_is_cut():
    outside = [s for s in capture(modules.Chain(Pair), **SIZES).segments if "TP" not in dict(s.tags)]
    assert len(outside) == 2 + 2 * 3
    for segment in outside:
        assert {op.tensor_dim for op in (*segment.forward.operations, *segment.backward.operations)} <= {-1}
        assert segment.tensor_layout == ()


@pytest.mark.parametrize("dedupe", [True, False])
def test_every_block_has_the_layout_under_its_own_names(dedupe):
    model = capture(modules.Chain(Pair), dedupe=dedupe, **SIZES)
    regions = [segment for segment in model.segments if "TP" in dict(segment.tags)]
    layouts = [{name.split(".", 2)[2]: dim for name, dim in s.tensor_layout} for s in regions]
    assert layouts == [layouts[0]] * 3
    assert [dict(s.tags)["TP"] for s in regions] == [0, 1, 2]
    assert [name for name, _ in regions[2].tensor_layout] == list(regions[2].parameters)


class Deep(nn.Module):
    """Three linear layers in a row inside one region."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(self, x):
        with annotate("PP"), annotate("TP"):
            for layer in self.layers:
                x = layer(x)
            return x


def test_a_third_matmul_in_a_row_is_named_as_one_that_no_rule_cuts():
    region, *_ = in_region(modules.Chain(Deep, blocks=1))
    assert dict(region.tensor_layout) == {
        "blocks.0.layers.0.weight": 0,
        "blocks.0.layers.1.weight": 1,
        "blocks.0.layers.2.weight": -1,
    }
    assert region.tensor_refused == ("blocks.0.layers.2.weight",)


class Stored(nn.Module):
    """Weights stored as [in, out], and cast before use."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(HIDDEN, 4 * HIDDEN))
        self.down = nn.Parameter(torch.zeros(4 * HIDDEN, HIDDEN))

    def forward(self, x):
        with annotate("PP"), annotate("TP"):
            h = F.relu(x.double() @ self.up.double())
            return (h @ self.down.double()).float()


def test_the_memory_order_of_a_weight_decides_which_of_its_dimensions_is_cut():
    region, *_ = in_region(modules.Chain(Stored, blocks=1))
    assert dict(region.tensor_layout) == {"blocks.0.up": 1, "blocks.0.down": 0}
    matmuls = {op.shape: op.tensor_dim for op in region.forward.operations if op.kind is OpKind.MATMUL}
    assert matmuls == {(1, T, 4 * H, H): 2, (1, T, H, 4 * H): 3}


class Attending(nn.Module):
    """Attention with fewer key heads, and a norm over each query head."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = nn.Linear(HIDDEN, HIDDEN // 2, bias=False)
        self.value = nn.Linear(HIDDEN, HIDDEN // 2, bias=False)
        self.norm = nn.RMSNorm(4)
        self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        with annotate("PP"), annotate("TP"):
            query, key, value = (
                part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value)
            )
            query = self.norm(query)
            with annotate("CP"):
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return self.output(mixed.transpose(1, 2).flatten(2))


def test_attention_is_cut_over_its_heads_through_a_nested_scope():
    before, inside, after = in_region(modules.Chain(Attending, blocks=1))
    (forward,) = inside.forward.operations
    assert (forward.kind, forward.tensor_dim, forward.token_dim) == (OpKind.ATTENTION, 1, 3)
    assert cut(forward, forward.tensor_dim, 2).shape == (2, 2, 1, 8, 8, 4)
    (backward,) = inside.backward.operations
    assert (backward.tensor_dim, backward.token_dim) == (1, 3)
    assert dict(before.tensor_layout) == {
        "blocks.0.query.weight": 0,
        "blocks.0.key.weight": 0,
        "blocks.0.value.weight": 0,
        "blocks.0.norm.weight": -1,
    }
    (norm,) = [op for op in before.forward.operations if op.kind is OpKind.NORM]
    assert (norm.shape, norm.tensor_dim) == ((T * 4, 4), 0)
    assert dict(after.tensor_layout) == {"blocks.0.output.weight": 1}
    assert {op.tensor_dim for op in before.backward_inputs.operations if op.kind is OpKind.MATMUL} == {3}


def test_a_norm_over_all_cut_features_cannot_be_cut():
    class Wide(Pair):
        def __init__(self):
            super().__init__()
            self.inner = nn.LayerNorm(4 * HIDDEN)

        def forward(self, x):
            with annotate("PP"), annotate("TP"):
                return self.down(self.inner(self.up(x)))

    region, *_ = in_region(modules.Chain(Wide, blocks=1))
    assert region.tensor_refused == ("blocks.0.inner.weight", "blocks.0.inner.bias")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_over_all_cut_features_cannot_be_cut_whatever_kernels_make_it(device, weighted):
    class Wide(Pair):
        def __init__(self):
            super().__init__()
            self.inner = nn.RMSNorm(4 * HIDDEN, elementwise_affine=weighted)

        def forward(self, x):
            with annotate("PP"), annotate("TP"):
                return self.down(self.inner(self.up(x)))

    model = capture(modules.Chain(Wide, blocks=1), **SIZES, kernels=KernelChoice(device=device))
    (region,) = [segment for segment in model.segments if "TP" in dict(segment.tags)]
    assert region.tensor_refused[0] == f"blocks.0.{'inner' if weighted else 'down'}.weight"


class Vocabulary(modules.Chain):
    """Embedding, head and loss as regions of their own."""

    def forward(self, tokens, labels):
        with annotate("PP"), annotate("TP"):
            x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        with annotate("PP"), annotate("TP"):
            return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_is_cut_in_the_table_and_in_the_loss(tied):
    module = Vocabulary()
    if tied:
        module.head.weight = module.embed.weight
    embed, head = in_region(module)
    assert embed.tensor_layout == (("embed.weight", 0),)
    assert [dim for _, dim in head.tensor_layout] == [0]
    (gradient,) = embed.backward.operations
    assert (gradient.shape, gradient.tensor_dim, gradient.token_dim) == ((T, H, VOCABULARY), 2, 0)
    assert cuts(head.forward) == {
        ("matmul", "fwd", (1, T, VOCABULARY, H), 2),
        ("softmax", "fwd", (T, VOCABULARY), 1),
        ("cross_entropy", "fwd", (T, VOCABULARY), 1),
    }
    assert ("softmax", "bwd", (T, VOCABULARY), 1) in cuts(head.backward_inputs)
    assert ("matmul", "dgrad", (1, T, H, VOCABULARY), 3) in cuts(head.backward_inputs)
    (weight,) = head.backward_weights.operations
    assert weight.shape[weight.tensor_dim] == VOCABULARY


def test_tokens_are_rows_of_a_forward_and_what_a_weight_gradient_sums_over():
    segments = capture(modules.Chain(Pair, blocks=1), **SIZES).segments
    for segment in segments:
        for op in (*segment.forward.operations, *segment.forward_no_grad.operations):
            assert op.token_dim == (1 if op.kind is OpKind.MATMUL else 0), op
        for op in segment.backward.operations:
            if op.kind is OpKind.MATMUL:
                assert op.token_dim == (3 if op.direction == "wgrad" else 1)
                assert op.shape[op.token_dim] == T


def test_work_on_weights_alone_has_no_tokens():
    class Scaled(modules.Chain):
        def loss(self, x, labels):
            with annotate("PP"):
                weight = self.head.weight * 2.0
                return F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="sum")

    head = capture(Scaled(), **SIZES).segments[-1]
    scaled = [op for op in head.forward.operations if op.name == "aten.mul.Tensor"]
    assert [op.token_dim for op in scaled] == [-1]


def test_a_block_called_inside_a_region_is_not_replayed_as_if_it_stood_alone():
    class Wrapped(modules.Chain):
        def __init__(self):
            super().__init__(blocks=0)
            self.blocks = nn.ModuleList(modules.Unscoped() for _ in range(2))

        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.embed(tokens)
            for block in self.blocks:
                with annotate("PP"), annotate("TP"):
                    x = block(x)
            return self.loss(x, labels)

    first, second = in_region(Wrapped())
    assert [dim for _, dim in first.tensor_layout] == [dim for _, dim in second.tensor_layout] == [0, 1]
