"""The model of a published run: by name from the catalogue, at the shape that the row states."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from piper.errors import ModelError
from piper.models import find_model
from piper.models.facts import facts_of
from piper.models.find import from_config
from piper.models.shape import DecoderShape, FeedForward, LowRankAdapters, SparseMoE
from piper.models.source import ModelSource
from piper.validation.rows import PublishedRow

_ADDITIONS = re.compile(
    r"\s*(\((?:tokendrop|mla|tr3m|proxy|\d+ layers)\)|\bproxy\b|\bshape\b|\breduced to \d+ layers\b)", re.I
)
"""What tables add to a model's name."""

_LORA = LowRankAdapters(rank=8, alpha=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
"""Adapters of a run that says LoRA and no more: those of attention (Hu et al. 2021, arXiv 2106.09685)."""

_GPT_FFN = 4
"""Feed-forward width over hidden size of a GPT; other ratios are gated."""


def model_of_row(row: PublishedRow, *, context: int | None) -> tuple[ModelSource, tuple[str, ...]]:
    """Return the model of a run, and what of it was assumed.

    Args:
        row: with name and shape.
        context: the model must take sequences of this length.
    Raises: ModelError for a shape that nothing describes; JobError for a broken number.
    """
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "topk")
    shape = tuple((name, row.integer(name)) for name in names)
    lora = "task=lora" in row.text("notes").lower()
    return _model(row.text("model"), shape, context=context or 0, lora=lora)


@cache
def with_vocabulary(source: ModelSource, size: int) -> ModelSource:
    """Return the model with another number of entries in its vocabulary."""
    return source if source.shape is None else _with_shape(source, replace(source.shape, vocabulary=size))


@cache
def _model(
    name: str, stated: tuple[tuple[str, int | None], ...], *, context: int, lora: bool
) -> tuple[ModelSource, tuple[str, ...]]:
    wanted = {key: value for key, value in stated if value is not None}
    found = _by_name(name)
    known = found is not None and not _other_shape(found.shape, wanted)
    source = found if found is not None and known else _by_shape(name, wanted)
    if source.shape is None:
        raise ModelError(
            where=name, field="model", value=name, rule="has no shape", fix="name a model of `piper models`"
        )
    shape, assumed = source.shape, []
    if len(shape.layers) != wanted["layers"]:
        shape = _with_layers(shape, wanted["layers"])
        if source.shape.prediction_depth:
            assumed.append("prediction of further tokens")
    vocabulary = wanted.get("vocab")
    if vocabulary is None:
        assumed.append("vocab")
    elif vocabulary != shape.vocabulary:
        shape = replace(shape, vocabulary=vocabulary)
    if context > shape.context_length:
        shape = _longer(shape, context)
    if lora:
        shape = replace(shape, adapters=_LORA)
        assumed.append("adapters")
    return _with_shape(source, shape), tuple(assumed)


def _by_name(name: str) -> ModelSource | None:
    for text in (name, _ADDITIONS.sub("", name).strip()):
        try:
            return find_model(text)
        except ModelError:
            continue
    return None


def _other_shape(shape: DecoderShape | None, wanted: dict[str, int]) -> bool:
    """Tell whether a model is another one than the row describes, layers and vocabulary apart."""
    if shape is None:
        return True
    layer = shape.layers[-1]
    part, attention = layer.feed_forward, layer.attention
    has = {"hidden": shape.hidden, "heads": attention.heads}
    if hasattr(attention, "kv_heads"):
        has["kv_heads"] = attention.kv_heads
    if isinstance(part, SparseMoE):
        has |= {"ffn": part.expert.width, "experts": part.router.experts, "topk": part.router.top_k}
    elif isinstance(part, FeedForward):
        has |= {"ffn": part.width}
    return any(wanted.get(key, value) != value for key, value in has.items())


def _by_shape(name: str, wanted: dict[str, int]) -> ModelSource:
    """Return a GPT, a Llama or a Mixtral of the shape that is stated."""
    for key in ("layers", "hidden", "heads"):
        if key not in wanted:
            raise ModelError(
                where=name, field=key, value=None, rule="is not stated, nor is the model in the catalogue",
                fix="give the shape of the model",
            )  # fmt: skip
    hidden, heads = wanted["hidden"], wanted["heads"]
    ffn = wanted.get("ffn", _GPT_FFN * hidden)
    if "experts" not in wanted and ffn == _GPT_FFN * hidden and wanted.get("kv_heads", heads) == heads:
        config = {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
            "n_embd": hidden, "n_layer": wanted["layers"], "n_head": heads, "n_positions": 2048,
            "vocab_size": wanted.get("vocab", 50257), "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.1,
            "resid_pdrop": 0.1, "embd_pdrop": 0.1, "tie_word_embeddings": True,
        }  # fmt: skip
    else:
        config = {
            "architectures": ["MixtralForCausalLM" if "experts" in wanted else "LlamaForCausalLM"],
            "model_type": "mixtral" if "experts" in wanted else "llama", "hidden_size": hidden,
            "num_hidden_layers": wanted["layers"], "num_attention_heads": heads,
            "num_key_value_heads": wanted.get("kv_heads", heads), "intermediate_size": ffn,
            "vocab_size": wanted.get("vocab", 32000), "max_position_embeddings": 8192, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
        }  # fmt: skip
        if "experts" in wanted:
            config |= {"num_local_experts": wanted["experts"], "num_experts_per_tok": wanted.get("topk", 2)}
    return from_config(config, name=name, kind="config", where=f"shape of {name}")


def _with_layers(shape: DecoderShape, number: int) -> DecoderShape:
    """Return the decoder with fewer or more layers: each kind keeps its share, and at least one."""
    whole = len(shape.layers)
    if len(set(shape.layers)) > 1 and number < whole:
        counts = {layer: shape.layers.count(layer) for layer in dict.fromkeys(shape.layers)}
        kept = {layer: max(1, round(count * number / whole)) for layer, count in counts.items()}
        last = next(reversed(kept))
        kept[last] += number - sum(kept.values())
        layers = tuple(layer for layer, count in kept.items() for _ in range(count))
    else:
        layers = tuple(shape.layers[position % whole] for position in range(number))
    return replace(shape, layers=layers, prediction_depth=0)


def _longer(shape: DecoderShape, context: int) -> DecoderShape:
    """Return the decoder for longer sequences: learned positions become as many."""
    embedding = shape.embedding
    if embedding.positions is not None:
        embedding = replace(embedding, positions=max(embedding.positions, context))
    return replace(shape, context_length=context, embedding=embedding)


def _with_shape(source: ModelSource, shape: DecoderShape) -> ModelSource:
    if shape == source.shape:
        return source
    return replace(
        source,
        kind="config",
        config=None,
        shape=shape,
        context_length=shape.context_length,
        default_seq_len=min(shape.context_length, source.default_seq_len or shape.context_length),
        n_parameters=shape.n_parameters,
        facts=facts_of(shape, name=source.name),
    )
