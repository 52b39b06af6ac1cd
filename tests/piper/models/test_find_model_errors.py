import json
import math

import pytest
import torch

import piper
from piper.errors import ModelError
from piper.models import build_module, find_model
from piper.models.find import from_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 32,
}


def find_config(folder, **changes):
    config = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return find_model(str(file))


def test_a_misspelt_name_gets_a_suggestion():
    with pytest.raises(ModelError) as caught:
        find_model("lama3-8b")
    assert caught.value.field == "MODEL"
    assert "'llama3-8b'" in caught.value.fix


@pytest.mark.parametrize(
    ("given", "named"),
    [(torch.nn.Identity(), "my_package.models:build"), (find_config, f"{__name__}:find_config"), (None, "")],
)
def test_a_model_that_is_no_text_gets_the_form_of_a_name(given, named):
    with pytest.raises(ModelError, match=r"package\.module:function") as caught:
        piper.compile_plan(given, "pp=2")
    assert named in caught.value.fix


def test_a_factory_that_is_a_module_is_told_to_become_a_function(tmp_path, monkeypatch):
    (tmp_path / "built_already.py").write_text("from torch import nn\nmodel = nn.Linear(2, 2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match="is a module, and must be a function") as caught:
        build_module(find_model("built_already:model"), dtype="fp32", device="meta")
    assert "return model" in caught.value.fix


def test_an_auxiliary_loss_is_told_once_and_only_if_it_has_a_weight():
    config = dict(find_model("deepseek-v2-lite").config)
    told = {
        weight: from_config(
            config | {"seq_aux": True, "aux_loss_alpha": weight}, name="x", kind="config", where="x"
        ).shape.notices
        for weight in (0.001, 0.0)
    }
    assert [len([text for text in told[w] if "aux_loss_alpha" in text]) for w in (0.001, 0.0)] == [1, 0]


def test_broken_json_names_line_and_column(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{\n  "hidden_size": 64,\n  oops\n}')
    with pytest.raises(ModelError) as caught:
        find_model(str(file))
    assert caught.value.where == f"{file}:3:3"
    assert caught.value.field == "file"
    assert "is not valid JSON" in caught.value.rule
    assert "as it was published" in caught.value.fix


@pytest.mark.parametrize("text", ["no/such/config.json", "no/such/folder/"])
def test_a_missing_file_is_named(text):
    with pytest.raises(ModelError, match="does not exist") as caught:
        find_model(text)
    assert caught.value.field == "file"
    assert "config.json" in caught.value.fix


def test_a_folder_without_config_is_a_missing_file(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        find_model(str(tmp_path))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="cannot be read") as caught:
        find_model(str(file))
    assert caught.value.field == "file"


def test_json_that_is_no_object_is_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("[1, 2]")
    with pytest.raises(ModelError, match="must be an object") as caught:
        find_model(str(file))
    assert caught.value.field == "JSON"


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"architectures": ["Qwen9ForCausalLM"]}, "architectures", "Qwen9ForCausalLM"),
        ({"architectures": ..., "model_type": "qwen9"}, "model_type", "qwen9"),
        ({"architectures": ...}, "model_type", None),
        ({"architectures": []}, "model_type", None),
    ],
)
def test_an_unsupported_architecture_is_named(tmp_path, changes, field, value):
    with pytest.raises(ModelError) as caught:
        find_config(tmp_path, **changes)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert "ForCausalLM" in caught.value.fix or "'qwen3'" in caught.value.fix
    assert "package.module:function" in caught.value.fix or value is None


def test_model_type_is_enough(tmp_path):
    assert find_config(tmp_path, architectures=..., model_type="llama").family == "llama"


COUNTS = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [..., None, 0, -4, "64", 64.5, True, math.nan])
def test_a_count_that_is_missing_or_no_positive_number_is_refused(tmp_path, field, value):
    with pytest.raises(ModelError) as caught:
        find_config(tmp_path, **{field: value})
    assert caught.value.field == field
    assert caught.value.fix


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_attention_heads": 6}, "num_attention_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": "16"}, "head_dim"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 0, "rope_type": "default"}}, "rope_parameters.rope_theta"),
        ({"rope_scaling": 8}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yran", "factor": 8.0}}, "rope_scaling.rope_type"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"hidden_size": 2**30, "intermediate_size": 2**30}, "number of parameters"),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 8.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0,
                           "high_freq_factor": 1.0}}, "rope_scaling.low_freq_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"attention_dropout": 1.0}, "attention_dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"hidden_dropout": "0.1"}, "hidden_dropout"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)  # fmt: skip
def test_a_field_that_contradicts_the_family_is_named(tmp_path, changes, field):
    with pytest.raises(ModelError) as caught:
        find_config(tmp_path, **changes)
    assert caught.value.field == field
    assert caught.value.where.endswith("config.json")
    assert caught.value.fix


@pytest.fixture
def module_folder(tmp_path, monkeypatch):
    (tmp_path / "piper_user_models.py").write_text(
        "import torch\n"
        "answer = 42\n"
        "def build():\n    return torch.nn.Linear(2, 2)\n"
        "def nothing():\n    return 7\n"
        "def broken():\n    raise ValueError('no weights')\n"
    )
    (tmp_path / "piper_user_broken.py").write_text("import piper_no_such_dependency\n")
    (tmp_path / "piper_user_raises.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("module_folder")
@pytest.mark.parametrize(
    ("text", "field", "value", "rule"),
    [
        ("piper_no_such_package:build", "module", "piper_no_such_package", "cannot be found"),
        ("piper_user_models.inner:build", "module", "piper_user_models.inner", "cannot be found"),
        ("piper_user_broken:build", "module", "piper_no_such_dependency", "cannot be found"),
        ("piper_user_raises:build", "module", "piper_user_raises", "RuntimeError: at import"),
        ("piper_user_models:bild", "function", "bild", "is not a function"),
        ("piper_user_models:answer", "function", "answer", "cannot be called"),
        ("piper_user_models:nothing", "factory", "int", "is not an nn.Module"),
        ("piper_user_models:broken", "factory", "piper_user_models:broken", "ValueError: no weights"),
        ("piper_user_models:", "factory", "piper_user_models:", "must be package.module:function"),
        ("piper_user_models:a b", "factory", "piper_user_models:a b", "must be package.module:function"),
    ],
)
def test_a_factory_that_fails_is_blamed_by_part(text, field, value, rule):
    with pytest.raises(ModelError) as caught:
        build_module(find_model(text), dtype="fp32")
    assert (caught.value.field, caught.value.value) == (field, value)
    assert rule in caught.value.rule
    assert caught.value.fix


@pytest.mark.usefixtures("module_folder")
def test_a_missing_function_lists_what_the_module_has():
    with pytest.raises(ModelError) as caught:
        build_module(find_model("piper_user_models:bild"), dtype="fp32")
    assert "build, nothing, broken" in caught.value.fix


@pytest.mark.usefixtures("module_folder")
def test_a_factory_in_the_current_folder_is_built_in_the_dtype_asked_for():
    import torch

    source = find_model("piper_user_models:build")
    assert (source.kind, source.family, source.context_length, source.default_seq_len) == (
        "factory",
        None,
        None,
        None,
    )
    assert source.fingerprint() is None
    assert {p.dtype for p in build_module(source, dtype="bf16").parameters()} == {torch.bfloat16}


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ModelError) as caught:
        build_module(find_model("tiny-llama"), dtype="bf61")
    assert caught.value.field == "dtype"
    assert "bf16" in caught.value.fix


@pytest.mark.parametrize("text", ["~nobody-of-this-name/config.json", "x" * 5000, "nul\0byte/config.json"])
def test_a_path_that_cannot_be_is_refused(text):
    with pytest.raises(ModelError) as caught:
        find_model(text)
    assert caught.value.field in {"file", "MODEL"}
    assert caught.value.fix


def test_architectures_that_are_no_list_are_refused_whatever_the_model_type_says(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"architectures": "LlamaForCausalLM", "model_type": "llama"}')
    with pytest.raises(ModelError) as caught:
        find_model(str(file))
    assert caught.value.field == "architectures"
    assert "LlamaForCausalLM" in caught.value.fix
