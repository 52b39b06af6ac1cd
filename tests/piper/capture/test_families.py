"""Families: other sizes of a model follow from a few captures, equal to what a capture of their own finds."""

import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import piper.capture
from cost_models.ops import OpKind
from piper.annotation import annotate
from piper.capture import KernelChoice, capture
from piper.capture.domain import Domain, domains_of, one_length
from piper.capture.fresh import capture_fresh
from piper.capture.sampling import LARGEST, MAX_OPERATORS, sample
from piper.models import MODELS, find_model
from piper.models.find import from_config
from tests.tiny_configs import TINY

CONTEXT = 61
HERE = 29

UNLIKE = (
    "llama",
    "llama4",
    "mixtral",
    "gemma2",
    "gemma3",
    "deepseek_v3",
    "gpt_oss",
    "gpt2",
    "bloom",
    "falcon",
)
"""Families that differ most in what they run; the others are among the slow tests."""

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")


@dataclass(frozen=True, kw_only=True)
class Own:
    """A model of the test: `module` for any length."""

    module: type[nn.Module]
    name: str = "own"
    facts: None = None
    context_length: int | None = CONTEXT
    length_breaks: tuple[int, ...] = ()

    def fingerprint(self) -> str:
        return f"{self.module.__qualname__}"

    def build(self, *, dtype, device, seq_len=None):
        module = self.module(seq_len) if getattr(self.module, "takes_length", False) else self.module()
        return module.to(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype])).to(device)


class Plain(nn.Module):
    """An embedding and a head; what lies between is for its children."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 8), nn.Linear(8, 37, bias=False)

    def middle(self, x):
        return x

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.middle(self.embed(tokens))
        with annotate("PP"):
            return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten(), reduction="sum")


class Windowed(Plain):
    """Sees the last 40 tokens only, which it tells nobody."""

    def middle(self, x):
        return x + F.pad(x[:, -40:].sum(1, keepdim=True), (0, 0, 0, 0))


class Chunked(Plain):
    """Works on 16 tokens at a time."""

    def middle(self, x):
        return torch.cat([torch.relu(part) for part in x.split(16, dim=1)], dim=1)


class Lonely(Plain):
    """Does something else for a single sequence."""

    def middle(self, x):
        return torch.relu(x) if x.shape[0] == 1 else torch.sigmoid(torch.relu(x))


class Tabled(Plain):
    """Holds a table as long as the sequence."""

    takes_length = True

    def __init__(self, seq_len):
        super().__init__()
        self.register_buffer("table", torch.zeros(seq_len, 8))

    def middle(self, x):
        return x + self.table[: x.shape[1]]


class Small(Plain):
    """Refuses many sequences at once."""

    def middle(self, x):
        if x.shape[0] > 100:
            raise ValueError("too many")
        return x


class Padded(Plain):
    """Its microbatch is padded to an even number."""

    def middle(self, x):
        return torch.relu(F.pad(x, (0, 0, 0, 0, 0, x.shape[0] % 2)))[: x.shape[0]]


def found_for(source, *, micro_batch=2, seq_len=HERE):
    domain = domains_of(seq_len, context_length=CONTEXT, breaks=source.length_breaks)[0]
    _, found = sample(
        source, (micro_batch, seq_len), name="own", dtype="fp32", kernels=KernelChoice(), domain=domain
    )
    return [(one.domain, [(f.smallest, f.largest) for f in one.families]) for one in found]


def fresh(source, point, dtype="fp32"):
    sizes = {"micro_batch": point[0], "seq_len": point[1], "dtype": dtype}
    return capture_fresh(source, name=source.name, sizes=sizes, kernels=KernelChoice(), dedupe=True)


@pytest.fixture
def only_cached(monkeypatch):
    """Lets captures come from the cache only, from the call of the returned function on."""

    def no_more():
        def refuse(*_, **__):
            raise AssertionError("captured anew")

        monkeypatch.setattr(piper.capture, "_sampled", refuse)
        monkeypatch.setattr(piper.capture, "_captured", refuse)

    return no_more


def check_others(name, seq_len, context, only_cached, folder):
    """Compare a random size, and a single sequence of that length, with captures of their own."""
    config = TINY[name]
    keys = [key for key in CONTEXT_KEYS if key in config] or CONTEXT_KEYS[:1]
    config = {**config, **dict.fromkeys(keys, context)}
    source = from_config(config, name=name, kind="config", where=name)
    sizes = {"dtype": "fp32", "cache_dir": folder}
    capture(source, micro_batch=1, seq_len=seq_len, **sizes)
    only_cached()
    domain = domains_of(seq_len, context_length=source.context_length, breaks=source.length_breaks)[0]
    draw = random.Random(name)
    lengths = range(domain.low, domain.high + 1, domain.step)
    length = draw.choice(lengths)
    for point in ((draw.randint(2, LARGEST), length), (1, length)):
        held = capture(source, micro_batch=point[0], seq_len=point[1], **sizes)
        assert held == fresh(source, point)


@pytest.mark.parametrize(
    "name", [name if name in UNLIKE else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_other_sizes_of_every_model_equal_captures_of_their_own(name, only_cached, tmp_path):
    check_others(name, 96, 544, only_cached, tmp_path)


def test_as_many_keys_as_features_are_not_taken_for_features():
    source = from_config(
        {**TINY["gemma2"], "max_position_embeddings": 544}, name="g", kind="config", where="g"
    )

    def cut_positions(seq_len):
        model = fresh(source, (2, seq_len))
        kernels = [op for segment in model.segments for op in segment.forward.operations]
        return [op.tensor_dim for op in kernels if op.kind is OpKind.SOFTMAX]

    attention = source.shape.layers[0].attention
    assert cut_positions(attention.heads * attention.head_dim) == cut_positions(160)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen3_moe", "grok"])
def test_models_whose_kernels_round_nothing_are_held_at_odd_lengths_too(name, only_cached, tmp_path):
    check_others(name, HERE, CONTEXT, only_cached, tmp_path)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe"])
def test_kernels_whose_sizes_meet_by_chance_are_joined_as_in_a_capture_of_their_own(name, tmp_path):
    source = find_model(name)
    capture(source, micro_batch=1, seq_len=63, dtype="bf16", cache_dir=tmp_path)
    hidden = source.config["hidden_size"]
    for point in ((hidden // 32, 32), (hidden // 16, 16), (2, 64), (8, 16), (16, 16)):
        held = capture(source, micro_batch=point[0], seq_len=point[1], dtype="bf16", cache_dir=tmp_path)
        assert held == fresh(source, point, "bf16")


def test_a_model_without_surprises_is_one_family_over_both_sizes():
    assert found_for(Own(module=Plain)) == [(Domain(low=13, high=CONTEXT, step=1), [(1, LARGEST)])]


@pytest.mark.parametrize("module", [Windowed, Chunked, Tabled])
def test_a_model_that_changes_with_the_length_is_a_family_over_microbatches_only(module):
    wide = Domain(low=13, high=CONTEXT, step=1)
    assert found_for(Own(module=module)) == [(wide, []), (one_length(HERE), [(1, LARGEST)])]


def test_a_model_that_tells_its_window_is_one_family_on_each_side():
    told = Own(module=Windowed, length_breaks=(40,))
    assert found_for(told) == [(Domain(low=13, high=40, step=1), [(1, LARGEST)])]
    assert found_for(told, seq_len=47) == [(Domain(low=41, high=CONTEXT, step=1), [(1, LARGEST)])]


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_single_sequences_that_run_another_way_are_a_family_of_their_own(micro_batch):
    found = found_for(Own(module=Lonely), micro_batch=micro_batch)
    assert found == [(Domain(low=13, high=CONTEXT, step=1), [(2, LARGEST), (1, 1)])]


def test_a_model_that_counts_sequences_in_pairs_has_no_family():
    wide = Domain(low=13, high=CONTEXT, step=1)
    assert found_for(Own(module=Padded)) == [(wide, []), (one_length(HERE), [])]


def test_a_model_that_fails_at_a_size_nobody_asked_for_has_no_family_and_is_captured_all_the_same(tmp_path):
    source = Own(module=Small)
    assert [families for _, families in found_for(source)] == [[], []]
    model = capture(source, micro_batch=3, seq_len=HERE, dtype="fp32", cache_dir=tmp_path)
    assert model == fresh(source, (3, HERE))


def test_a_model_of_very_many_operators_is_tried_at_one_length_only(monkeypatch):
    monkeypatch.setattr("piper.capture.sampling.MAX_OPERATORS", 5)
    assert MAX_OPERATORS > 5
    assert found_for(Own(module=Plain)) == [(one_length(HERE), [(1, LARGEST)])]


def test_larger_microbatches_than_were_tried_are_captured(tmp_path):
    source, sizes = Own(module=Plain), {"seq_len": HERE, "dtype": "fp32", "cache_dir": tmp_path}
    capture(source, micro_batch=1, **sizes)
    model = capture(source, micro_batch=LARGEST + 1, **sizes)
    assert model == fresh(source, (LARGEST + 1, HERE))
    assert len(list(tmp_path.iterdir())) == 2
