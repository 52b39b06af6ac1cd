import json
import subprocess
import sys
from pathlib import Path

import pytest

from piper.models import ARCHITECTURES, CATALOGUE, MODELS, build_module, find_model
from piper.models.entries import read_entry

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
    ],
)
def test_published_parameter_counts_are_exact(name, count):
    source = find_model(name)
    assert source.n_parameters == count
    assert source.facts.n_parameters == source.facts.n_active_parameters == count


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_built_module_has_as_many_parameters_as_the_config_says(name):
    source = find_model(name)
    module = build_module(source, dtype="bf16", device="meta")
    assert sum(parameter.numel() for parameter in module.parameters()) == source.n_parameters


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_entry_names_its_source_and_aliases_of_its_own(name):
    entry = read_entry(name)
    assert set(entry) - {"published"} == {"schema_version", "aliases", "source", "config"}
    assert entry["source"]
    others = {alias.lower() for other in CATALOGUE if other != name for alias in read_entry(other)["aliases"]}
    assert not others & {alias.lower() for alias in entry["aliases"]}
    for alias in (*entry["aliases"], name.upper()):
        assert find_model(alias).name == name


def test_every_catalogue_file_is_listed():
    files = {file.name for file in (REPOSITORY / "piper/models/catalogue").glob("*.yaml")}
    assert files == set(CATALOGUE.values())


def test_every_architecture_belongs_to_a_family_that_exists():
    assert set(ARCHITECTURES.values()) == set(MODELS)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("LLAMA3_8B", "llama3-8b"),
        ("Llama 3.1 8B", "llama3.1-8b"),
        ("Llama3 70B", "llama3-70b"),
        ("LLaMA3-8B", "llama3-8b"),
    ],
)
def test_names_used_in_published_tables_resolve_in_any_case(text, name):
    assert find_model(text).name == name


@pytest.mark.parametrize("name", ["llama3-8b", "tiny-llama"])
def test_example_configs_are_the_catalogue_shapes(name):
    folder = REPOSITORY / "examples" / name
    from_file = find_model(str(folder / "config.json"))
    assert from_file.config == read_entry(name)["config"]
    assert from_file.name == name
    assert from_file.kind == "config"
    assert find_model(str(folder)).config == from_file.config
    assert from_file.fingerprint() == find_model(name).fingerprint()


def test_default_sequence_length_is_the_context_capped():
    assert find_model("llama3.1-405b").context_length == 131072
    assert find_model("llama3.1-405b").default_seq_len == 8192
    assert find_model("llama2-7b").default_seq_len == 4096
    assert find_model("tiny-llama").default_seq_len == 64


def test_the_tiny_model_allows_every_small_strategy():
    facts = find_model("tiny-llama").facts
    assert (facts.layers, facts.heads) == (16, 8)
    assert find_model("tiny-llama").config["num_key_value_heads"] == 4


def test_left_out_keys_are_reported_with_the_value_taken(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = find_model(str(tmp_path))
    assert "num_key_value_heads = 4" in source.assumed
    assert "tie_word_embeddings = False" in source.assumed
    assert source.context_length == 2048


def test_finding_a_model_loads_no_torch():
    code = (
        "import sys; from piper.models import find_model; find_model('llama3-8b'); find_model('Llama3 70B');"
        "find_model('examples/llama3-8b'); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=120)
