"""Small models of `transformers`, what they are made of, and how their weights are called here.

To add one: a `Case` in the file of its kind.
"""

import re

from tests.piper.models.transformers_cases.case import Case, Weights
from tests.piper.models.transformers_cases.fused_and_learned import FUSED_AND_LEARNED
from tests.piper.models.transformers_cases.latent import LATENT_ATTENTION
from tests.piper.models.transformers_cases.llama_like import LLAMA_LIKE
from tests.piper.models.transformers_cases.scaled_and_normed import SCALED_AND_NORMED
from tests.piper.models.transformers_cases.with_experts import WITH_EXPERTS

CASES: dict[str, Case] = {
    **LLAMA_LIKE,
    **SCALED_AND_NORMED,
    **WITH_EXPERTS,
    **LATENT_ATTENTION,
    **FUSED_AND_LEARNED,
}


def ours(case: Case, weights: Weights) -> Weights:
    """Return tensors by the names that they have here."""
    renamed: Weights = {}
    for name, value in weights.items():
        for pattern, replacement in case.names.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return case.convert(renamed)
