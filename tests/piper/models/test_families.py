"""What holds for every family: it is built, counted, trained, and cut into segments without a difference."""

import pytest
import torch

from piper.models import MODELS, build_module
from piper.models.find import from_config
from tests.tiny_configs import TINY


def source(name):
    return from_config(TINY[name], name=name, kind="config", where=name)


def batch(vocabulary, *, seq_len=16):
    data = torch.randint(0, vocabulary, (2, seq_len + 1), generator=torch.Generator().manual_seed(1))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def test_every_family_has_a_small_config():
    assert set(TINY) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_module_has_as_many_parameters_as_its_shape_says(name):
    module = build_module(source(name), dtype="fp32", device="meta")
    assert sum(parameter.numel() for parameter in module.parameters()) == source(name).shape.n_parameters


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_trained(name):
    torch.manual_seed(0)
    module = build_module(source(name), dtype="fp32")
    loss = module(*batch(source(name).shape.vocabulary))
    loss.backward()
    assert loss.isfinite()
    without = [n for n, p in module.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not without
