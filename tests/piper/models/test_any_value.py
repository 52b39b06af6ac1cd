"""Whatever stands under a key of a config, reading it ends in a shape or in a message that names the file."""

import math

import pytest

from piper.errors import ModelError
from piper.models import MODELS
from piper.models.reading.config import read_shape
from tests.tiny_configs import TINY

STRANGE = [None, True, False, 0, 1, 3, -1, 2**70, 0.5, -2.5, math.nan, math.inf, "", "x", [], {}, [1], [None]]
STRANGE += [
    {"a": 1},
    ["sliding_attention"],
    [[1]],
    {"rope_type": "yarn"},
    {"type": ["x"]},
    {"rope_theta": None},
]

EVERYWHERE = [
    "architectures", "model_type", "text_config", "llm_config", "vision_config", "audio_config", "frozen",
    "adapter_config", "quantization_config", "is_encoder_decoder", "segment_lengths", "rope_scaling",
    "pad_vocab_size_multiple", "rope_parameters", "layer_types", "tie_word_embeddings",
    "num_nextn_predict_layers",
]  # fmt: skip


def refused(config):
    """Return the refusal of a config, or None; what is read has counts that go together."""
    try:
        shape = read_shape(config, where="t")
    except ModelError as error:
        return error
    assert 0 < shape.n_active_parameters <= shape.n_parameters
    return None


@pytest.mark.parametrize("family", MODELS)
def test_a_strange_value_is_read_or_refused(family):
    config = TINY[family]
    assumed = [note.partition(" = ")[0] for note in read_shape(config, where="t").assumed]
    for key in dict.fromkeys([*config, *assumed, *EVERYWHERE]):
        for value in STRANGE:
            error = refused(config | {key: value})
            assert error is None or (error.where == "t" and error.rule and error.fix)
