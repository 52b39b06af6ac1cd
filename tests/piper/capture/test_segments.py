"""Segments, boundary tensors, parameters: what the annotations of a module turn into."""

from itertools import groupby

import modules
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from piper import annotate
from piper.capture import capture
from piper.errors import ModelError
from piper.models import find_model
from simulator.plan import Parameter, TensorSpec


def captured(module, **changes):
    return capture(module, **({"micro_batch": 2, "seq_len": 8, "dtype": "bf16"} | changes))


def hidden(micro_batch=2, **changes):
    return TensorSpec(**({"shape": (micro_batch, 8, modules.HIDDEN), "dtype": "bf16"} | changes))


def test_a_chain_becomes_one_segment_per_scope():
    model = captured(modules.Chain(blocks=2))
    assert [segment.tags for segment in model.segments] == [
        (("PP", 0),),
        (("LAYER", 0), ("PP", 1)),
        (("LAYER", 1), ("PP", 2)),
        (("PP", 3),),
    ]
    assert [segment.name for segment in model.segments] == ["embed", "blocks.0", "blocks.1", "head"]
    assert [segment.inputs for segment in model.segments] == [
        ((-1, 0),),
        ((0, 0),),
        ((1, 0),),
        ((2, 0), (-1, 1)),
    ]
    assert [segment.outputs for segment in model.segments[:3]] == [(hidden(),)] * 3
    assert model.segments[3].outputs == (TensorSpec(shape=(), dtype="fp32", batch_dim=None),)
    assert model.segments[1].parameters == ("blocks.0.up.weight", "blocks.0.down.weight")
    assert model.segments[0].inputs_saved == (True,)
    assert model.segments[3].inputs_saved == (True, True)


def test_facts_and_parameters_of_a_plain_module_are_counted():
    module = modules.Chain(blocks=2)
    module.embed.weight.requires_grad_(False)
    model = captured(module)
    assert (model.facts.name, model.facts.layers) == ("Chain", 2)
    assert model.facts.n_parameters == sum(parameter.numel() for parameter in module.parameters())
    assert model.parameters[0] == Parameter(name="embed.weight", shape=(32, 16), trainable=False)
    assert [p.name for p in model.parameters] == [name for name, _ in module.named_parameters()]
    assert (model.micro_batch, model.seq_len, model.dtype, model.buffer_bytes) == (2, 8, "bf16", 0)


class Indexed(modules.Chain):
    """A chain that looks tokens, and numbers made from tokens, up in tables of different sizes."""

    def __init__(self, look_up):
        super().__init__(blocks=1)
        self.small = nn.Embedding(5, modules.HIDDEN)
        self.look_up = look_up

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.look_up(self, tokens)
        return self.loss(self.blocks[0](x), labels)


@pytest.mark.parametrize(
    ("look_up", "vocabulary"),
    [
        (lambda self, tokens: self.embed(tokens), 32),
        (lambda self, tokens: self.embed(tokens.T).transpose(0, 1), 32),
        (lambda self, tokens: self.embed(tokens) + self.small(torch.arange(5).repeat(2)[:8]), 32),
        (lambda self, tokens: self.embed(tokens) + self.small(tokens % 5), 32),
        (lambda self, tokens: self.small(tokens), 5),
        (lambda self, tokens: self.small.weight[tokens], 5),
        (lambda self, tokens: self.small.weight.index_select(0, tokens.flatten()).view(*tokens.shape, -1), 5),
    ],
    ids=["table", "transposed", "positions", "derived", "small", "index", "index_select"],
)
def test_the_vocabulary_of_a_plain_module_is_the_smallest_table_that_tokens_index(look_up, vocabulary):
    assert captured(Indexed(look_up)).facts.vocabulary == vocabulary


def test_labels_may_number_fewer_classes_than_there_are_tokens():
    class FewClasses(modules.Chain):
        def loss(self, x, labels):
            with annotate("PP"):
                scores = self.head(x).float()[..., :7]
                return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")

    assert captured(FewClasses()).facts.vocabulary == 7


def test_a_module_that_indexes_nothing_has_no_known_vocabulary():
    class Sums(modules.Chain):
        def forward(self, tokens, labels):
            with annotate("PP"):
                return (self.embed.weight.float() * tokens.sum() * labels.sum()).sum()

    assert captured(Sums()).facts.vocabulary == 0


def test_a_frozen_embedding_gives_an_output_without_gradient():
    module = modules.Chain(blocks=2)
    module.embed.weight.requires_grad_(False)
    model = captured(module)
    assert model.segments[0].outputs == (hidden(requires_grad=False),)
    assert model.segments[0].backward.operations == ()
    assert "dgrad" in {op.direction for op in model.segments[2].backward.operations}


def test_a_skip_goes_straight_from_producer_to_consumer():
    model = captured(modules.Skip(blocks=2))
    product = model.segments[3]
    assert product.inputs == ((2, 0), (0, 0))
    assert product.inputs_saved == (True, True)
    assert [segment.inputs for segment in model.segments[1:3]] == [((0, 0),), ((1, 0),)]
    assert len(model.segments[0].outputs) == 1


def test_two_tensors_cross_one_boundary_in_order_of_production():
    model = captured(modules.Pairs(blocks=1))
    embed, opens, closes, adds, head = model.segments
    assert embed.outputs == (hidden(), hidden())
    assert opens.inputs == ((0, 0), (0, 1))
    assert [spec.shape[-1] for spec in opens.outputs] == [32, 16]
    assert closes.inputs == ((1, 0), (1, 1))
    assert closes.outputs == (hidden(),)
    assert adds.inputs == ((2, 0), (1, 1))
    assert head.inputs == ((3, 0), (-1, 1))


def test_views_of_one_tensor_are_outputs_of_their_own():
    embed, first, second, _ = captured(modules.Chunked()).segments
    half = hidden(shape=(2, 8, modules.HIDDEN // 2))
    assert embed.outputs == (half, half)
    assert first.inputs == ((0, 0),)
    assert second.inputs == ((0, 1), (1, 0))  # the concatenation runs first


def test_a_tensor_changed_in_place_comes_from_the_segment_that_changed_it():
    _, middle, head = captured(modules.InPlace()).segments
    assert middle.inputs == ((0, 0),)
    assert head.inputs[0] == (1, 0)


def test_nested_scopes_split_the_outer_one_and_keep_explicit_indices():
    model = captured(modules.Chain(modules.NestedBlock, blocks=2))
    tags = [segment.tags for segment in model.segments]
    assert tags[1:5] == [(("PP", 1),), (("ACT", 0), ("PP", 1)), (("FIXED", 7), ("PP", 1)), (("PP", 1),)]
    assert tags[5:9] == [(("PP", 2),), (("ACT", 1), ("PP", 2)), (("FIXED", 7), ("PP", 2)), (("PP", 2),)]
    assert [segment.inputs for segment in model.segments[5:9]] == [((4, 0),), ((5, 0),), ((6, 0),), ((7, 0),)]
    assert model.segments[4].parameters == ("blocks.0.down.weight",)


def test_tied_parameters_are_listed_once_and_used_by_both_segments():
    model = captured(modules.Tied())
    assert [p.name for p in model.parameters].count("embed.weight") == 1
    assert "head.weight" not in [p.name for p in model.parameters]
    assert model.segments[0].parameters == ("embed.weight",)
    assert model.segments[-1].parameters == ("embed.weight",)
    untied = captured(modules.Chain(blocks=2))
    assert [s.backward for s in model.segments] == [s.backward for s in untied.segments]


def test_a_shared_block_lists_its_parameters_in_every_segment():
    model = captured(modules.SharedBlock())
    assert [segment.parameters[0] for segment in model.segments[1:5]] == [
        "blocks.0.up.weight",
        "blocks.1.up.weight",
        "blocks.0.up.weight",
        "blocks.0.up.weight",
    ]
    assert len({segment.backward for segment in model.segments[1:5]}) == 1


def test_buffers_are_counted_once_and_are_no_inputs():
    model = captured(modules.Buffered(blocks=2))
    assert model.buffer_bytes == 64 * modules.HIDDEN * 2
    assert model.segments[1].inputs == ((0, 0),)


def test_the_microbatch_dimension_is_found_wherever_it_is():
    model = captured(modules.BatchSecond(blocks=1), micro_batch=3)
    assert model.segments[0].outputs == (TensorSpec(shape=(8, 3, 16), dtype="bf16", batch_dim=1),)
    assert model.segments[2].outputs == (TensorSpec(shape=(3, 8, 16), dtype="bf16", batch_dim=0),)


def test_a_tensor_without_microbatch_dimension_has_none():
    class Scaled(modules.Chain):
        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.embed(tokens)
                scale = self.embed.weight.sum(0)
            with annotate("PP"):
                x = x * scale
            return self.loss(x, labels)

    assert captured(Scaled(blocks=0)).segments[0].outputs[1].batch_dim is None


def test_the_module_itself_is_left_alone():
    module = modules.Chain(blocks=2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    captured(module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all("forward" not in vars(block) for block in module.modules())


def test_a_factory_is_captured_from_its_name(monkeypatch, tmp_path):
    (tmp_path / "piper_captured_factory.py").write_text(
        "import torch, torch.nn.functional as F\nimport piper\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.e = torch.nn.Embedding(8, 4)\n"
        "        self.register_buffer('t', torch.ones(4, device='cpu'))\n"
        "    def forward(self, tokens, labels):\n"
        "        with piper.annotate('PP'):\n"
        "            logits = (self.e(tokens) * self.t).float().flatten(0, 1)\n"
        "            return F.cross_entropy(logits, labels.flatten() % 4, reduction='sum')\n"
        "def build():\n    return M()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = find_model("piper_captured_factory:build")
    model = capture(source, micro_batch=1, seq_len=4, dtype="bf16", cache_dir=tmp_path / "cache")
    assert model.facts.n_parameters == 32
    assert model.segments[0].parameters == ("e.weight",)
    assert not (tmp_path / "cache").exists()


def test_llama_segments_are_embedding_layers_and_head(tmp_path):
    model = capture(find_model("tiny-llama"), micro_batch=2, seq_len=64, dtype="fp32", cache_dir=tmp_path)
    tags = [dict(segment.tags) for segment in model.segments]
    units = [list(run) for _, run in groupby(tags, key=lambda found: found["PP"])]
    assert [len(unit) for unit in units] == [1, *[7] * 16, 2]
    assert [unit[0].get("LAYER") for unit in units] == [None, *range(16), None]
    assert ["".join(tag for tag in ("TP", "CP") if tag in found) for found in units[3]] == [
        "",
        "TP",
        "TPCP",
        "TP",
        "",
        "TP",
        "",
    ]  # norm; attention around its core; residual and norm; feed-forward; residual
    assert [found["TP"] for found in tags if "TP" in found and "CP" not in found] == [
        0,
        *(number for layer in range(16) for number in (2 * layer + 1, 2 * layer + 1, 2 * layer + 2)),
        33,
    ]
    assert [segment.inputs for segment in model.segments[8:15]] == [
        ((7, 0),),
        ((8, 0),),
        ((9, 1), (9, 2), (9, 0)),
        ((10, 0),),
        ((7, 0), (11, 0)),
        ((12, 1),),
        ((12, 0), (13, 0)),
    ]  # the residual stream goes past what it does not feed
    assert [segment.parameters for segment in model.segments[-2:]] == [
        ("model.norm.weight",),
        ("lm_head.weight",),
    ]
    assert model.segments[-1].inputs == ((113, 0), (-1, 1))
    assert sum(parameter.numel for parameter in model.parameters) == model.facts.n_parameters
    assert model.buffer_bytes == 2 * 64 * 4 * 4


class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 32)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        x = torch.tanh(x).exp()
        with annotate("PP"):
            return F.cross_entropy(x.float().flatten(0, 1), labels.flatten(), reduction="sum")


def test_unannotated_operators_are_named():
    with pytest.raises(ModelError) as caught:
        captured(Loose())
    assert caught.value.where == "Loose"
    assert caught.value.field == "unannotated operators"
    assert caught.value.value == "aten.tanh.default, aten.exp.default"
    assert 'piper.annotate("PP")' in caught.value.fix
