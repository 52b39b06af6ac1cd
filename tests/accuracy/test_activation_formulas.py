"""Activation memory per layer, against Korthikanti et al. 2022 (arXiv 2205.05198), table 2, figures 1 and 7.

Their layers keep two bytes per element, dropout masks of one byte, and unfused attention. The figures are as
the authors of Calculon transcribed them.
"""

import json
from functools import cache

import pytest

from piper.models import find_model
from piper.predict import Job, predict
from piper.strategy import load_strategy

SEQ, TP = 2048, 8
SHAPES = {
    # catalogue name: hidden, heads, layers, microbatch, pipeline ranks, model chunks per rank (their table 3)
    "gpt-22b": (6144, 64, 48, 4, 1, 1),
    "gpt3-175b": (12288, 96, 96, 1, 8, 3),
    "gpt-529.6b": (20480, 128, 105, 1, 35, 3),
    "gpt-1008b": (25600, 160, 128, 1, 64, 1),
}
FIGURE_7 = {
    "gpt-22b": {"sp": 66.84, "selective": 49.42, "sp+selective": 16.18, "full": 7.64},
    "gpt3-175b": {"sp": 62.04, "selective": 56.53, "sp+selective": 18.49, "full": 8.71},
    "gpt-529.6b": {"sp": 58.31, "selective": 62.04, "sp+selective": 20.27, "full": 9.42},
    "gpt-1008b": {"sp": 58.31, "selective": 62.04, "sp+selective": 20.27, "full": 9.42},
}
"""Percent of what tensor parallelism alone keeps."""
FIGURE_1_GIB = {
    "gpt-22b": (59.25, 9.5625),
    "gpt3-175b": (66.84375, 12.3515625),
    "gpt-529.6b": (114.0234375, 23.076171875),
    "gpt-1008b": (131.25, 26.5625),
}
"""Activations of the first pipeline rank: without anything; with sequence parallelism and selective."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Bytes that one rank keeps of one layer: what a third layer adds."""
    folder = tmp_path_factory.mktemp("configs")

    def activations(name, layers, tp, strategy):
        micro_batch = SHAPES[name][3]
        config = {**find_model(name).config, "n_layer": layers, "vocab_size": 1024}
        file = folder / f"{name}-{layers}.json"
        file.write_text(json.dumps(config))
        job = Job(
            model=str(file), strategy=load_strategy(f"tp={tp},dp=1,{strategy}"), gpus=tp, seq_len=SEQ,
            micro_batch=micro_batch, global_batch=micro_batch, dtype="fp16",
            settings=(("model.attention", "fused_softmax"),),
        )  # fmt: skip
        return predict(job).result["ranks"][0]["memory_by_class_bytes"]["activations"]

    @cache
    def of_layer(name, *, tp=TP, sp=False, recompute="none"):
        sequence = f"sp={'on' if sp else 'off'}," if tp > 1 else ""
        strategy = f"{sequence}recompute={recompute}"
        return activations(name, 3, tp, strategy) - activations(name, 2, tp, strategy)

    return of_layer


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (8, False), (2, True), (8, True)])
def test_a_layer_keeps_what_the_formulas_say(kept, tp, sp, recompute):
    """s b h (34 + 5 a s / h); tensor parallelism alone does not cut 10 of it; selective drops 5 a s / h."""
    hidden, heads, _, micro_batch, *_ = SHAPES["gpt-22b"]
    core = 5 * heads * SEQ / hidden / tp if recompute == "none" else 0
    per_token = {True: 34 / tp, False: 10 + 24 / tp}[sp] + core
    if recompute == "full":
        per_token = 2 / tp if sp else 2  # the layer's input
    expected = SEQ * micro_batch * hidden * per_token
    assert kept("gpt-22b", tp=tp, sp=sp, recompute=recompute) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_shares_of_the_memory_are_those_of_figure_7(kept, name):
    baseline = kept(name)
    found = {
        "sp": kept(name, sp=True),
        "selective": kept(name, recompute="selective"),
        "sp+selective": kept(name, sp=True, recompute="selective"),
        "full": kept(name, recompute="full"),
    }
    for label, percent in FIGURE_7[name].items():
        assert 100 * found[label] / baseline == pytest.approx(percent, rel=0.02), label


@pytest.mark.parametrize("name", SHAPES)
def test_the_first_pipeline_rank_keeps_what_figure_1_shows(kept, name):
    """All layers' worth of one microbatch, and (p - 1) / (p m) more with m interleaved chunks."""
    *_, layers, _, ranks, chunks = SHAPES[name]
    times = layers * (1 + (ranks - 1) / (ranks * chunks) if chunks > 1 else 1)
    without, with_both = FIGURE_1_GIB[name]
    assert kept(name) * times / 2**30 == pytest.approx(without, rel=0.02)
    both = kept(name, sp=True, recompute="selective")
    assert both * times / 2**30 == pytest.approx(with_both, rel=0.02)
