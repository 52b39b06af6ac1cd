"""The generic family: a decoder by its parts, as `piper models MODEL --json` prints them."""

import copy
import json
from dataclasses import replace

import pytest

from piper.errors import ModelError
from piper.models import CATALOGUE, find_model
from piper.models.describe import shapes_of
from piper.models.reading.config import read_shape
from tests.tiny_configs import TINY

PLAIN = TINY["generic"]


def read(config):
    return read_shape({"architectures": ["PiperDecoder"]} | config, where="t")


@pytest.mark.parametrize("name", CATALOGUE)
def test_what_is_printed_of_a_model_is_a_config_of_it(name):
    shape = find_model(name).shape
    printed = json.loads(json.dumps(shapes_of(shape)))
    found = read(printed)
    assert found == replace(shape, family="generic", init_std=found.init_std, assumed=(), notices=())


def test_adapters_and_packing_are_printed_as_they_are_read():
    own = {
        "adapter_config": {"r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "target_modules": ["q_proj"]},
        "frozen": ["lm_head"],
        "segment_lengths": [16, 16],
    }
    printed = json.loads(json.dumps(shapes_of(read(PLAIN | own))))
    assert {name: printed[name] for name in own} == own
    assert replace(read(printed), init_std=0.02) == read(PLAIN | own)


def test_the_arguments_of_a_megatron_run_count_as_llama_2():
    """32 layers of 4096, SwiGLU of 11008, RMS norm, no biases, untied, a vocabulary of 32000."""
    layer = {
        "count": 32,
        "attention": {"heads": 32, "kv_heads": 32, "head_dim": 128, "rotary": {"theta": 1e4, "dims": 128}},
        "feed_forward": {"width": 11008},
        "norm": {"kind": "rms"},
    }
    config = {"hidden": 4096, "vocabulary": 32000, "context_length": 4096, "layers": [layer]}
    shape = read(config | {"final_norm": {"kind": "rms"}})
    assert shape.n_parameters == 6_738_415_616
    assert shape.layers[0] == find_model("llama2-7b").shape.layers[0] or shape.layers[0].norm.eps == 1e-6


def test_layers_may_be_counted_repeated_and_numbered():
    a, b = ({**PLAIN["layers"][0], "dropout": dropout} for dropout in (0.0, 0.5))

    def dropouts(**config):
        return [layer.dropout for layer in read(PLAIN | config).layers]

    assert dropouts(layers=[a | {"count": 2}, b | {"count": 1}]) == [0.0, 0.0, 0.5]
    assert dropouts(layers=[a | {"count": 1}, b | {"count": 1}], repeat=2) == [0.0, 0.5, 0.0, 0.5]
    del a["count"], b["count"]
    assert dropouts(layers=[a | {"numbers": "0, 2-3"}, b | {"numbers": "1"}]) == [0.0, 0.5, 0.0, 0.0]
    assert dropouts(layers=[a, b]) == [0.0, 0.5]


MOE = {"router": {"experts": 8, "top_k": 2}, "expert": {"width": 8}, "kind": "SparseMoE"}
LATENT = {
    "kind": "LatentAttention", "heads": 4, "query_rank": None, "kv_rank": 8, "nope_dim": 4, "rope_dim": 4,
    "value_dim": 4, "norm": {}, "rotary": {"theta": 1e4, "dims": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "field", "rule"),
    [
        (("hiden",), 64, "hiden", "is no field of PiperDecoder"),
        (("hidden",), "64", "hidden", "must be a whole number"),
        (("hidden",), 0, "hidden", "must be at least 1"),
        (("vocabulary",), True, "vocabulary", "must be a whole number"),
        (("final_norm",), ..., "final_norm", "is missing"),
        (("final_norm",), {"kind": "batch"}, "final_norm.kind", "is not known"),
        (("final_norm",), {"epsilon": 1e-5}, "final_norm.epsilon", "is no field of Norm"),
        (("head",), {"tied": "yes"}, "head.tied", "must be true or false"),
        (("embedding",), {"scale": float("nan")}, "embedding.scale", "must be a number"),
        (("embedding",), None, "embedding", "must be an object"),
        (("layers",), 12, "layers", "must be a list of layers"),
        (("layers",), [12], "layers[0]", "must be an object"),
        (("layers", 0, "count"), 0, "layers[0].count", "whole number >= 1"),
        (("layers", 0, "count"), 10**6, "layers[0].count", "at most 10000"),
        (("repeat",), 9999, "layers", "at most 10000"),
        (("layers", 0, "numbers"), "0-", "layers[0].numbers", "must be numbers of layers"),
        (("layers", 0, "numbers"), "1-2", "layers", "must number all layers from 0"),
        (("layers", 0, "norm"), ..., "layers[0].norm", "is missing in Layer"),
        (("layers", 0, "placement"), "above", "layers[0].placement", "is not known"),
        (("layers", 0, "attention"), None, "layers[0].attention", "must not be null"),
        (("layers", 0, "attention"), [], "layers[0].attention", "must be an object"),
        (("layers", 0, "attention", "kind"), "Linear", "layers[0].attention.kind", "is not known"),
        (("layers", 0, "attention", "kv_heads"), 3, "attention.kv_heads", "must divide 8 heads"),
        (("layers", 0, "attention", "heads"), 0, "attention.heads", "must be at least 1"),
        (("layers", 0, "attention", "window"), 0, "attention.window", "must be at least 1"),
        (("layers", 0, "attention", "rotary", "dims"), 5, "attention.rotary.dims", "must be even"),
        (("layers", 0, "attention"), LATENT | {"rope_dim": 2}, "attention.rotary.dims", "must be 2"),
        (("layers", 0, "attention"), LATENT | {"kv_rank": 0}, "attention.kv_rank", "must be at least 1"),
        (("layers", 0, "feed_forward", "width"), 0, "feed_forward.width", "must be at least 1"),
        (("layers", 0, "feed_forward"), MOE | {"expert": {"width": 0}}, "expert.width", "at least 1"),
        (("layers", 0, "feed_forward"), MOE | {"shared": {"width": 0}}, "shared.width", "at least 1"),
        (("layers", 0, "feed_forward"), MOE | {"router": {"experts": 8, "top_k": 9}}, "router.top_k", "8"),
        (("layers", 0, "feed_forward"), MOE | {"router": {"experts": 0, "top_k": 1}}, "router.experts", "1"),
        (
            ("layers", 0, "feed_forward"),
            MOE | {"router": {"experts": 8, "top_k": 1, "groups": 3}},
            "router.groups",
            "must divide 8 experts",
        ),
        (
            ("layers", 0, "feed_forward"),
            MOE | {"router": {"experts": 8, "top_k": 1, "groups": 4, "groups_kept": 5}},
            "router.groups_kept",
            "from 1 to 4",
        ),
        (("layers", 0, "attention", "head_dim"), 2**40, "number of parameters", "2^50"),
    ],
)
def test_a_part_that_cannot_be_is_named(path, value, field, rule):
    config = copy.deepcopy(PLAIN)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(ModelError) as caught:
        read(config)
    assert caught.value.field == field
    assert rule in caught.value.rule
    assert caught.value.fix
