"""The shape of a Llama-family model from its Hugging Face config: torch-free, exact parameter count.

Source of keys and defaults: transformers `LlamaConfig` (version 4: `rope_theta`, `rope_scaling`; version 5:
`rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from piper.errors import ModelError
from piper.models.fields import Fields
from simulator.plan import ModelFacts

MOST_LAYERS = 10_000
MOST_PARAMETERS = 2**50
"""Far beyond any model; sizes in bytes stay within 64 bits, and a slip of the keyboard is told at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    Args:
        kind: "linear" (all divided by `factor`) or "llama3" (long wavelengths only, smoothly between).
        factor: the stretch, >= 1.
        low_freq_factor, high_freq_factor, original_context: llama3 only; wavelengths longer than
            original_context / low_freq_factor are stretched, shorter than original_context /
            high_freq_factor are not.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a Llama model; field names are ours, `from_hf` reads the published ones.

    `assumed` names every key that the config left out, with the value taken.
    """

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    attention_dropout: float
    hidden_dropout: float
    init_std: float
    assumed: tuple[str, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, where: str) -> LlamaConfig:
        """Read a `config.json` object; raises ModelError naming the field."""
        read = Fields(config, where=where)
        hidden = read.count("hidden_size")
        heads = read.count("num_attention_heads")
        kv_heads = read.count("num_key_value_heads", default=heads)
        _require(heads % kv_heads == 0, where, "num_key_value_heads", kv_heads, f"must divide {heads} heads")
        if config.get("head_dim") is None:
            _require(
                hidden % heads == 0,
                where,
                "num_attention_heads",
                heads,
                f"must divide {hidden} (hidden_size)",
            )
        head_dim = read.count("head_dim", default=hidden // heads)
        _require(head_dim % 2 == 0, where, "head_dim", head_dim, "must be even (rotary embedding)")
        layers = read.count("num_hidden_layers")
        _require(layers <= MOST_LAYERS, where, "num_hidden_layers", layers, f"must be at most {MOST_LAYERS}")
        activation = config.get("hidden_act", "silu")
        _require(activation == "silu", where, "hidden_act", activation, "must be silu for a Llama model")
        found = cls(
            hidden=hidden,
            ffn=read.count("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=read.count("vocab_size"),
            context_length=read.count("max_position_embeddings", default=2048),
            norm_eps=read.number("rms_norm_eps", default=1e-6),
            rope_theta=_rope_theta(config, where=where, read=read),
            rope_scaling=_rope_scaling(config, where=where),
            tied_embeddings=read.flag("tie_word_embeddings", default=False),
            attention_bias=read.flag("attention_bias", default=False),
            mlp_bias=read.flag("mlp_bias", default=False),
            attention_dropout=read.share("attention_dropout", default=0.0),
            hidden_dropout=read.share("hidden_dropout", default=0.0),
            init_std=read.number("initializer_range", default=0.02),
            assumed=tuple(read.assumed),
        )
        total = found.n_parameters
        _require(total <= MOST_PARAMETERS, where, "number of parameters", total, "is more than 2^50")
        return found

    @property
    def n_parameters(self) -> int:
        """Return the exact number of parameters, a tied matrix counted once."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * query + 2 * self.hidden * key_value
        attention += (query + 2 * key_value + self.hidden) * self.attention_bias
        mlp = 3 * self.hidden * self.ffn + (2 * self.ffn + self.hidden) * self.mlp_bias
        matrices = 1 if self.tied_embeddings else 2
        layer = attention + mlp + 2 * self.hidden
        return matrices * self.vocabulary * self.hidden + self.layers * layer + self.hidden

    def facts(self, name: str) -> ModelFacts:
        """Return the counts for reports and the MFU formula."""
        return ModelFacts(
            name=name,
            n_parameters=self.n_parameters,
            n_active_parameters=self.n_parameters,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            head_dim=self.head_dim,
            vocabulary=self.vocabulary,
        )


def _rope_theta(config: Mapping[str, Any], *, where: str, read: Fields) -> float:
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and "rope_theta" in nested:
        return Fields(nested, where=where, prefix="rope_parameters.").number("rope_theta")
    return read.number("rope_theta", default=10000.0)


def _rope_scaling(config: Mapping[str, Any], *, where: str) -> RopeScaling | None:
    key = "rope_scaling" if config.get("rope_scaling") is not None else "rope_parameters"
    scaling = config.get(key)
    if scaling is None:
        return None
    _require(isinstance(scaling, Mapping), where, key, scaling, "must be an object or null")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    kinds = ("linear", "llama3")
    _require(kind in kinds, where, f"{key}.rope_type", kind, "must be default, linear or llama3")
    read = Fields(scaling, where=where, prefix=f"{key}.")
    factor = read.number("factor")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    low, high = read.number("low_freq_factor"), read.number("high_freq_factor")
    _require(low < high, where, f"{key}.low_freq_factor", low, f"must be less than high_freq_factor = {high}")
    original = read.count("original_max_position_embeddings")
    return RopeScaling(
        kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=original
    )


def _require(holds: bool, where: str, field: str, value: object, rule: str) -> None:  # noqa: PLR0917
    if not holds:
        fix = f"correct {field} in the config (compare with the published config.json)"
        raise ModelError(where=where, field=field, value=value, rule=rule, fix=fix)
