"""Sequences longer than the table of positions that a model learns."""

import pytest

from piper.errors import ModelError
from piper.models import build_module
from piper.models.find import from_config
from tests.tiny_configs import TINY

LEARNED = TINY["gpt2"]


def build(seq_len, **changes):
    source = from_config(LEARNED | changes, name="tiny", kind="config", where="config.json")
    return build_module(source, dtype="fp32", device="meta", seq_len=seq_len)


def test_a_sequence_longer_than_the_table_is_refused_with_the_longest():
    build(32)
    with pytest.raises(ModelError) as caught:
        build(33)
    assert (caught.value.where, caught.value.field, caught.value.value) == ("config.json", "seq_len", 33)
    assert "32 positions" in caught.value.rule
    assert "--seq-len 32" in caught.value.fix
