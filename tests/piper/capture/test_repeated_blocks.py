"""Blocks that are run once and replayed give what running all of them gives; others are run."""

from dataclasses import replace

import modules
import pytest
from torch import nn

from piper.capture import capture
from piper.capture.choice import KernelChoice
from piper.capture.fresh import capture_fresh
from piper.capture.repeats import repeated_blocks
from piper.graph import PassCost
from piper.models import find_model
from piper.models.find import from_config

SIZES = {"micro_batch": 2, "seq_len": 8, "dtype": "bf16"}


def both(module):
    return [capture(module, dedupe=dedupe, **SIZES) for dedupe in (True, False)]


@pytest.mark.parametrize(
    "module",
    [
        modules.Chain(blocks=4),
        modules.Pairs(blocks=3),
        modules.Numbered(blocks=3),
        modules.Chain(modules.NestedBlock, blocks=3),
        modules.OneSegment(blocks=3),
        modules.SharedBlock(),
        modules.HalfUsed(blocks=3),
        modules.Tied(blocks=3),
        modules.Buffered(blocks=3),
        modules.BatchSecond(blocks=3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_replayed_and_full_captures_are_equal(module):
    replayed, full = both(module)
    assert replayed == full


def without_order(segment):
    """The segment with the operations of its backward sorted, and no workspace of it."""
    sorted_passes = {
        name: PassCost(
            operations=tuple(sorted(getattr(segment, name).operations, key=repr)), workspace_bytes=0
        )
        for name in ("backward", "backward_inputs", "backward_weights")
    }
    return replace(segment, **sorted_passes)


@pytest.mark.parametrize(
    "module", [modules.Skip(blocks=3), modules.Anchored(blocks=3)], ids=["Skip", "Anchored"]
)
def test_where_a_tensor_has_several_consumers_only_the_moment_of_its_gradients_sum_differs(module):
    """A block replayed alone sums its own gradients first, as a run does that cuts at segments."""
    replayed, full = both(module)
    assert [without_order(s) for s in replayed.segments] == [without_order(s) for s in full.segments]
    one_tensor = 2 * 8 * modules.HIDDEN * 2
    for a, b in zip(replayed.segments, full.segments, strict=True):
        assert abs(a.backward.workspace_bytes - b.backward.workspace_bytes) <= one_tensor


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    ],
    ids=["plain", "tied", "biases", "dropout"],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_replayed_and_full_captures_of_llama_are_equal(changes, dtype):
    source = find_model("tiny-llama")
    source = from_config(
        {**source.config, "num_hidden_layers": 4, **changes}, name="t", kind="config", where="t"
    )
    sizes = SIZES | {"dtype": dtype}
    replayed, full = (
        capture_fresh(source, name="t", sizes=sizes, kernels=KernelChoice(), dedupe=dedupe)
        for dedupe in (True, False)
    )
    assert replayed == full


def calls_of(monkeypatch, kind):
    count = []
    original = kind.forward
    monkeypatch.setattr(
        kind, "forward", lambda *args, **kwargs: (count.append(1), original(*args, **kwargs))[1]
    )
    return count


def test_equal_blocks_run_once_per_recording(monkeypatch):
    calls = calls_of(monkeypatch, modules.Block)
    capture(modules.Chain(blocks=9), **SIZES)
    assert len(calls) == 3  # with gradients, without, and at a larger microbatch
    capture(modules.Chain(blocks=9), dedupe=False, **SIZES)
    assert len(calls) == 3 + 3 * 9


def test_blocks_with_an_index_are_all_run(monkeypatch):
    calls = calls_of(monkeypatch, modules.NumberedBlock)
    model = capture(modules.Numbered(blocks=3), **SIZES)
    assert len(calls) == 3 * 3
    assert [dict(segment.tags)["LAYER"] for segment in model.segments[1:4]] == [0, 1, 2]


def test_equal_blocks_share_their_costs():
    segments = capture(modules.Chain(blocks=5), **SIZES).segments[1:6]
    assert len({id(segment.forward) for segment in segments}) == 1
    assert len({id(segment.backward) for segment in segments}) == 1
    assert len({(s.name, s.tags, s.parameters) for s in segments}) == 5


def test_a_sum_of_gradients_of_replayed_blocks_is_counted_where_it_happens():
    segments = capture(modules.Anchored(blocks=3), **SIZES).segments
    additions = [
        sum(op.count for op in segment.backward.operations if op.name == "aten.add.Tensor")
        for segment in segments
    ]
    assert additions == [0, 1, 1, 1, 0, 0]


def signatures(*blocks):
    return [signature for _, signature in repeated_blocks(nn.ModuleList(blocks))]


def test_siblings_are_repeated_only_when_nothing_tells_them_apart():
    assert len(set(signatures(modules.Block(), modules.Block(), modules.Block()))) == 1
    assert len(signatures(modules.Block(), modules.NestedBlock())) == 0
    other = modules.Block()
    other.up = nn.Linear(modules.HIDDEN, 3 * modules.HIDDEN, bias=False)
    assert len(signatures(modules.Block(), other)) == 0
    frozen = modules.Block().requires_grad_(False)
    assert len(signatures(modules.Block(), frozen)) == 0
    hooked = modules.Block()
    hooked.register_forward_hook(lambda *_: None)
    assert len(signatures(modules.Block(), hooked)) == 0
    assert len(signatures(modules.Block(), modules.Block().eval())) == 0
    options = [modules.Block(), modules.Block()]
    options[0].scale = options[1].scale = 2.0
    assert len(set(signatures(*options))) == 1
    options[1].scale = 3.0
    assert len(signatures(*options)) == 0


def test_repeats_do_not_depend_on_the_sequence_in_the_list():
    """Two kinds of blocks in turn: each kind is recorded once, and every segment has its own costs."""

    class Mixed(modules.Chain):
        def __init__(self):
            super().__init__(blocks=0)
            self.blocks = nn.ModuleList(
                [modules.Block(), modules.NestedBlock(), modules.Block(), modules.NestedBlock()]
            )

    replayed, full = both(Mixed())
    assert replayed == full
    assert replace(replayed.segments[1], name="", tags=(), parameters=(), inputs=()) == replace(
        replayed.segments[6], name="", tags=(), parameters=(), inputs=()
    )
