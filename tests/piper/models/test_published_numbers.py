"""Every entry of the catalogue against what its publisher prints."""

import pytest

from piper.models import CATALOGUE, find_model
from piper.models.describe import parameters_by_part, shapes_of
from piper.models.entries import read_entry
from piper.models.published import Published, read_published

SHAPES_ALONE = {
    "tiny-llama", "tiny-moe", "llama-13b-128k", "llama-30b-128k", "gpt-h768-l12", "gpt-h1024-l12",
    "gpt-h1024-l20", "gpt-h1536-l16", "gpt-h2048-l12", "gpt-h2048-l20", "gpt-h3072-l16", "gpt-h3072-l32",
    "gpt-760m", "gpt2-24l",
}  # fmt: skip
"""Entries for which nobody prints a number: ours, and shapes of published benchmarks."""

NAMES_IN_PUBLISHED_TABLES = {
    "GPT 1.3B (tr3m)": "gpt-1.3b-tr3m",
    "Grok-1 314B": "grok-1",
    "Nemotron4 15B": "nemotron4-15b",
    "Llama3 70B": "llama3-70b",
    "Llama3 8B": "llama3-8b",
    "GPT h1536 L16": "gpt-h1536-l16",
    "GPT h768 L12": "gpt-h768-l12",
    "GPT h3072 L16": "gpt-h3072-l16",
    "GPT h3072 L32": "gpt-h3072-l32",
    "GPT h2304 L24": "gpt-1.7b",
    "LLaMA-13B shape": "llama-13b-128k",
    "LLaMA-30B shape": "llama-30b-128k",
    "GPT 22B": "gpt-22b",
    "GPT 175B": "gpt-174.6b",
    "GPT 530B": "gpt-529.6b",
    "GPT 1T": "gpt-1008b",
    "22B": "gpt-22b",
    "175B": "gpt-174.6b",
    "530B": "gpt-529.6b",
    "1T": "gpt-1008b",
    "MPT-70b": "mpt-70b",
    "MPT-13b": "mpt-13b",
    "MPT-3b": "mpt-3b",
    "MPT-760m": "mpt-760m",
    "MPT-125m": "mpt-125m",
    "GPT OSS 120B": "gpt-oss-120b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_30B_a3B (tokendrop)": "qwen3-30b-a3b",
    "LLAMA3_70B": "llama3-70b",
    "LLAMA3_8B": "llama3-8b",
    "Mixtral-8x22B": "mixtral-8x22b",
    "GPT 1.7B": "gpt-1.7b",
    "GPT 3.6B": "gpt-3.6b",
    "GPT 7.5B": "gpt-7.5b",
    "GPT 18.4B": "gpt-18.4b",
    "GPT 39.1B": "gpt-39.1b",
    "GPT 76.1B": "gpt-76.1b",
    "GPT 145.6B": "gpt-145.6b",
    "GPT 310.1B": "gpt-310.1b",
    "GPT 529.6B": "gpt-529.6b",
    "GPT 1008B": "gpt-1008b",
    "GPT 174.6B": "gpt-174.6b",
    "1.5B": "gpt-1.5b",
    "6.2B": "gpt-6.2b",
    "GPT 1.5B": "gpt-1.5b",
    "GPT 6.2B": "gpt-6.2b",
    "Llama 3.1 8B": "llama3.1-8b",
    "GPT h3072 L30": "gpt-3.6b",
    "GPT h8192 L48": "gpt-39.1b",
    "GPT h2048 L20": "gpt-h2048-l20",
    "GPT h1024 L20": "gpt-h1024-l20",
    "GPT h1024 L12": "gpt-h1024-l12",
    "GPT h2048 L12": "gpt-h2048-l12",
    "GPT-2 24L": "gpt2-24l",
    "GPT 760M": "gpt-760m",
    "GPT 1.3B": "gpt-1.3b-alpa",
    "GPT 2.6B": "gpt-2.6b",
    "GPT 6.7B": "gpt-6.7b",
    "GPT 13B": "gpt-13b",
    "GPT 15B": "gpt-15b",
    "GPT 20B": "gpt-20b",
    "GPT 39B": "gpt-39.1b",
    "GPT 40B": "gpt-39.1b",
    "13B": "gpt-13b",
    "1_3B": "gpt-1.3b-alpa",
    "2_6B": "gpt-2.6b",
    "Llama-2-7b-hf": "llama2-7b",
    "Llama-2-70b-hf": "llama2-70b",
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_our_counts_are_the_published_ones(name):
    source, published = find_model(name), read_published(read_entry(name))
    if name in SHAPES_ALONE:
        assert published is None
        return
    assert published.source
    assert published.agrees(source.n_parameters, source.facts.n_active_parameters)


def test_most_published_counts_are_met_to_the_last_parameter():
    numbers = [read_published(read_entry(name)) for name in CATALOGUE]
    exact = [number for number in numbers if number is not None and isinstance(number.parameters, int)]
    assert len(exact) > 70


@pytest.mark.parametrize(("text", "name"), NAMES_IN_PUBLISHED_TABLES.items())
def test_names_of_published_tables_resolve(text, name):
    assert find_model(text).name == name


def printed(parameters, active=None, **more):
    differs = {"includes": 0, "leaves_out": 0, "active_leaves_out": 0} | more
    return Published(parameters=parameters, active=active, why="", source="t", **differs)


def test_a_printed_number_stands_for_what_differs_by_less_than_its_last_digit():
    assert printed("7.2B").agrees(7_241_732_096, 0)
    assert printed("7.3B").agrees(7_241_732_096, 0)
    assert not printed("7.4B").agrees(7_241_732_096, 0)
    assert not printed("7B").agrees(8_030_261_248, 0)
    assert printed("1.008T").agrees(1_008_038_758_400, 0)


def test_an_exact_number_is_met_exactly_up_to_what_it_includes():
    assert printed(110, includes=10).agrees(100, 0)
    assert not printed(110, includes=9).agrees(100, 0)
    assert printed(90, leaves_out=10).agrees(100, 0)
    assert not printed(100, active="3.61B").agrees(100, 4_187_440_704)
    assert printed(100, active="3.61B", active_leaves_out=579_133_440).agrees(100, 4_187_440_704)


@pytest.mark.parametrize("name", CATALOGUE)
def test_parts_sum_to_the_whole_and_every_layer_is_described_once(name):
    shape = find_model(name).shape
    assert sum(parameters_by_part(shape).values()) == shape.n_parameters
    assert sum(layers["count"] for layers in shapes_of(shape)["layers"]) == len(shape.layers)


def test_layers_that_take_turns_are_told_with_their_numbers():
    sliding, full = shapes_of(find_model("gpt-oss-20b").shape)["layers"]
    assert (sliding["numbers"][:7], full["numbers"][:7]) == ("0, 2, 4", "1, 3, 5")
    assert (sliding["attention"]["window"], "window" in full["attention"]) == (128, False)
    dense, sparse = shapes_of(find_model("deepseek-v3").shape)["layers"]
    assert (dense["numbers"], sparse["numbers"]) == ("0-2", "3-60")
