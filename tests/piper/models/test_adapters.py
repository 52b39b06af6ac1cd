"""Adapters and frozen parts as a config states them; what the module makes of them is tested with it."""

import json
import math

import pytest

from piper.errors import ModelError
from piper.models import build_module, find_model
from piper.models.find import from_config
from piper.models.projections import AdaptedLinear
from piper.models.reading.adapters import adapter_parameters
from piper.models.reading.config import read_shape
from piper.models.shape import LowRankAdapters
from tests.tiny_configs import TINY


def adapters(family="llama", **stated):
    return read_shape(TINY[family] | {"adapter_config": stated}, where="t").adapters


def test_an_adapter_config_of_peft_is_read():
    found = adapters(
        peft_type="LORA", r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "down_proj"],
        task_type="CAUSAL_LM", bias="none", modules_to_save=None, base_model_name_or_path="meta-llama/x",
    )  # fmt: skip
    assert (found.rank, found.alpha, found.dropout) == (16, 32.0, 0.05)
    assert found.targets == ("q_proj", "down_proj")


def test_left_out_keys_take_pefts_defaults_and_are_told():
    shape = read_shape(TINY["llama"] | {"adapter_config": {}}, where="t")
    assert (shape.adapters.rank, shape.adapters.alpha, shape.adapters.targets) == (
        8,
        8.0,
        ("q_proj", "v_proj"),
    )
    assert "adapter_config.r = 8" in shape.assumed
    assert "target_modules = q_proj, v_proj" in shape.assumed


def test_all_linear_layers_are_all_but_head_router_and_routed_experts():
    assert adapters(target_modules="all-linear") == adapters(
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert adapters("mixtral", target_modules="all-linear").targets == (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )


def test_names_of_other_modules_mean_the_same_projection():
    assert adapters("gpt_neox", target_modules=["query_key_value", "dense"]).targets == ("qkv_proj", "o_proj")


def test_rank_stabilised_adapters_count_more():
    found = adapters(r=16, lora_alpha=8, use_rslora=True)
    assert found.alpha / found.rank == pytest.approx(8 / math.sqrt(16))


def test_parts_may_be_frozen_without_adapters():
    shape = read_shape(TINY["llama"] | {"frozen": ["model.embed_tokens", "model.layers.0."]}, where="t")
    assert shape.frozen == ("model.embed_tokens", "model.layers.0.")


@pytest.mark.parametrize("family", TINY)
def test_every_projection_that_is_named_exists_in_the_module(family):
    config = TINY[family] | {"adapter_config": {"target_modules": "all-linear"}}
    source = from_config(config, name=family, kind="config", where="t")
    module = build_module(source, dtype="fp32", device="meta")
    adapted = {
        name.rpartition(".")[2] for name, part in module.named_modules() if isinstance(part, AdaptedLinear)
    }
    assert adapted == set(source.shape.adapters.targets)
    trained = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    assert sum(trained) == adapter_parameters(source.shape)


def folder(path, **files):
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return find_model(str(path))


def test_an_adapter_file_beside_the_config_is_read_with_it(tmp_path):
    source = folder(tmp_path, config=TINY["llama"], adapter_config={"r": 4, "target_modules": ["o_proj"]})
    assert source.shape.adapters == LowRankAdapters(rank=4, alpha=8.0, targets=("o_proj",))
    assert source.n_parameters == find_model(str(tmp_path / "config.json")).n_parameters


def test_an_adapter_alone_stands_on_the_model_that_it_names(tmp_path):
    stated = {"r": 16, "base_model_name_or_path": "meta-llama/Meta-Llama-3-8B", "target_modules": ["q_proj"]}
    source = folder(tmp_path, adapter_config=stated)
    assert (source.shape.adapters.rank, source.n_parameters) == (16, 8_030_261_248)


def test_an_adapter_whose_model_is_not_known_asks_for_its_config(tmp_path):
    with pytest.raises(ModelError, match="not a catalogue name") as caught:
        folder(tmp_path, adapter_config={"base_model_name_or_path": "someone/own-model"})
    assert caught.value.field == "base_model_name_or_path"
    assert "config.json" in caught.value.fix


def test_llama_2_with_rank_8_on_queries_and_values_trains_4_million():
    """32 layers of 2 (4096 + 4096) 8: what peft prints for its default targets."""
    shape = find_model("llama2-7b").config | {"adapter_config": {"r": 8}}
    assert adapter_parameters(read_shape(shape, where="t")) == 4_194_304
    assert adapter_parameters(read_shape(TINY["llama"], where="t")) == 0


def test_documents_may_be_packed_and_the_vocabulary_padded():
    shape = read_shape(
        TINY["llama"] | {"segment_lengths": [12, 20], "pad_vocab_size_multiple": 96}, where="t"
    )
    assert (shape.segment_lengths, shape.vocabulary) == ((12, 20), 192)
    assert shape.n_parameters == read_shape(TINY["llama"] | {"vocab_size": 192}, where="t").n_parameters
