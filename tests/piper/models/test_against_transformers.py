"""Loss, gradients and parameter counts of every family, against its module in `transformers`."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from piper.models.decoder import CausalLM
from tests.piper.models.transformers_cases.case import VOCABULARY
from tests.piper.models.transformers_cases.table import CASES, ours

transformers = pytest.importorskip("transformers")

SEQ = 12


def theirs(case):
    """Return their module, with weights, biases and buffers of routers all drawn anew."""
    config = transformers.AutoConfig.for_model(case.model_type, **case.config)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=generator)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3, generator=generator)
    return module.float().train()


def same_here(case, other):
    """Return our module with their weights."""
    torch.manual_seed(0)
    module = CausalLM(case.shape, seq_len=SEQ)
    given = ours(case, dict(other.named_parameters()))
    names = dict(module.named_parameters())
    assert set(given) == set(names)
    with torch.no_grad():
        for name, parameter in names.items():
            assert parameter.shape == given[name].shape, name
            parameter.copy_(given[name])
        biases = [b for n, b in other.named_buffers() if n.endswith("e_score_correction_bias")]
        routers = [m for m in module.modules() if hasattr(m, "correction_bias")]
        for router, bias in zip(routers, biases, strict=True):
            router.correction_bias.copy_(bias)
    return module.train()


def batch():
    data = torch.randint(0, VOCABULARY, (2, SEQ + 1), generator=torch.Generator().manual_seed(2))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_counts_are_those_of_transformers(name):
    case = CASES[name]
    other = theirs(case)
    module: nn.Module = same_here(case, other)
    tokens, labels = batch()
    logits = other(tokens, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    loss = module(tokens, labels)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    gradients = ours(case, {name: parameter.grad for name, parameter in other.named_parameters()})
    for name, parameter in module.named_parameters():
        scale = gradients[name].abs().max().item()
        torch.testing.assert_close(
            parameter.grad, gradients[name], rtol=1e-4, atol=1e-4 * max(scale, 1e-3), msg=name
        )
    count = sum(parameter.numel() for parameter in other.parameters())
    assert case.shape.n_parameters == count
