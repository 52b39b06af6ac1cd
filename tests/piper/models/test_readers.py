"""Readers against shapes whose modules equal those of `transformers` (`test_against_transformers`)."""

from dataclasses import replace
from pathlib import Path

import pytest

from piper.models import ARCHITECTURES, MODELS
from piper.models.source import load
from tests.piper.models.transformers_cases.table import CASES

REPOSITORY = Path(__file__).parents[3]
WITH_ANOTHER_CONTEXT = {"bloom", "rope_dynamic"}
"""Cases whose config does not state the context that their shape was given."""


def read(config, *, family):
    return load(MODELS[family].reader)(config, where="t")


@pytest.mark.parametrize("name", CASES)
def test_a_reader_finds_the_shape_whose_module_is_that_of_transformers(name):
    case = CASES[name]
    config = {"model_type": case.model_type} | case.config
    found = read(config, family=ARCHITECTURES[case.model_type])
    context = found.context_length if name in WITH_ANOTHER_CONTEXT else case.shape.context_length
    expected = replace(case.shape, family=found.family, context_length=context, init_std=found.init_std)
    assert replace(found, assumed=(), notices=()) == expected


def test_every_reader_file_serves_a_family():
    files = {path.stem for path in (REPOSITORY / "piper/models/families").glob("*.py")} - {"__init__"}
    assert files == {family.reader.partition(":")[0].rpartition(".")[2] for family in MODELS.values()}


@pytest.mark.parametrize("family", MODELS)
def test_a_family_is_named_after_its_line_in_the_table(family):
    from tests.tiny_configs import TINY

    assert read(TINY[family], family=family).family == family


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("qwen2", [None, None, 8, 8]),
        ("qwen3", [None, None, 8, 8]),
        ("qwen2_moe", [8, None, None, None]),
        ("qwen3_moe", [8, 8, 8, 8]),
    ],
)
def test_qwen_slides_where_its_classes_do(family, windows):
    from tests.tiny_configs import TINY

    asked = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "num_hidden_layers": 4}
    found = read(TINY[family] | asked, family=family)
    assert [layer.attention.window for layer in found.layers] == windows
    without = read(TINY[family] | asked | {"use_sliding_window": False}, family=family)
    assert {layer.attention.window for layer in without.layers} == {None}
