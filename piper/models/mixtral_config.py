"""The shape of a Mixtral-family model from its Hugging Face config: torch-free, exact parameter counts.

Source of keys and defaults: transformers `MixtralConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from piper.errors import ModelError
from piper.models.fields import Fields
from piper.models.llama_config import MOST_PARAMETERS, LlamaConfig
from simulator.plan import ModelFacts

MOST_EXPERTS = 10_000

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
"""Where Mixtral's defaults are not Llama's."""

_UNSUPPORTED = {"sliding_window": None, "router_jitter_noise": 0.0, "output_router_logits": False}
"""Options of the family that this module does not have, with the value that leaves them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig:
    """The shape of a Mixtral model.

    Args:
        dense: the shape of all but the experts; its `ffn` is that of one expert.
        experts: per layer.
        top_k: how many of them take each token.
        assumed: every key that the config left out, with the value taken.
    """

    dense: LlamaConfig
    experts: int
    top_k: int
    assumed: tuple[str, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, where: str) -> MixtralConfig:
        """Read a `config.json` object; raises ModelError naming the field."""
        for name, without in _UNSUPPORTED.items():
            value = config.get(name)
            if value is not None and value != without:
                raise ModelError(
                    where=where, field=name, value=value, rule="is not supported",
                    fix=f"leave it out, or set it to {'null' if without is None else str(without).lower()}",
                )  # fmt: skip
        filled = {name: value for name, value in _DEFAULTS.items() if config.get(name) is None}
        if isinstance(config.get("rope_parameters"), Mapping) and "rope_theta" in config["rope_parameters"]:
            filled.pop("rope_theta", None)
        dense = LlamaConfig.from_hf({**config, **filled}, where=where)
        read = Fields(config, where=where)
        experts = read.count("num_local_experts", default=8)
        top_k = read.count("num_experts_per_tok", default=2)
        _require(experts <= MOST_EXPERTS, where, "num_local_experts", experts, f"must be <= {MOST_EXPERTS}")
        _require(top_k <= experts, where, "num_experts_per_tok", top_k, f"is more than {experts} experts")
        assumed = (*(f"{name} = {value}" for name, value in filled.items()), *dense.assumed, *read.assumed)
        found = cls(dense=dense, experts=experts, top_k=top_k, assumed=assumed)
        total = found.n_parameters
        _require(total <= MOST_PARAMETERS, where, "number of parameters", total, "is more than 2^50")
        return found

    @property
    def context_length(self) -> int:
        """Return the longest sequence that the model was made for."""
        return self.dense.context_length

    @property
    def n_parameters(self) -> int:
        """Return the exact number of parameters."""
        return self._parameters(self.experts)

    @property
    def n_active_parameters(self) -> int:
        """Return how many parameters take part for one token: `top_k` experts per layer, all else."""
        return self._parameters(self.top_k)

    def facts(self, name: str) -> ModelFacts:
        """Return the counts for reports and the MFU formula."""
        return replace(
            self.dense.facts(name),
            n_parameters=self.n_parameters,
            n_active_parameters=self.n_active_parameters,
        )

    def _parameters(self, experts: int) -> int:
        one = 3 * self.dense.hidden * self.dense.ffn
        router = self.dense.hidden * self.experts
        return self.dense.n_parameters + self.dense.layers * ((experts - 1) * one + router)


def _require(holds: bool, where: str, field: str, value: object, rule: str) -> None:  # noqa: PLR0917
    if not holds:
        fix = f"correct {field} in the config (compare with the published config.json)"
        raise ModelError(where=where, field=field, value=value, rule=rule, fix=fix)
