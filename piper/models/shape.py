"""`DecoderShape`: what any decoder is made of, as torch-free data; from it follow its exact counts.

A family reads a published `config.json` into a `DecoderShape`; `piper.models.decoder` builds the module from
it. A part is an option of the data here, not a subclass there: a new family is mostly a new reader.

Counts: a parameter that is shared (a tied head) counts once. Active parameters are those that take part for
one token: of a layer's routed experts only `top_k`, all else whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
"""`gelu_tanh`: its tanh approximation; `relu2`: squared ReLU (So et al. 2021, arXiv 2109.08668)."""

Placement = Literal["pre", "post", "sandwich", "parallel", "parallel_shared"]
"""Where a layer's norms stand.

pre: before attention and before the feed-forward part; post: after each, on the way to the residual sum
(OLMo 2); sandwich: before and after each (Gemma 2); parallel: both parts read the layer's input, each through
its own norm (GPT-NeoX); parallel_shared: through one norm (GPT-J, Falcon 7B).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over the last dimension.

    Args:
        kind: "rms" or "layer".
        eps: added to the mean square or variance.
        bias: layer norm only.
        offset: the weight counts as 1 + weight (Gemma, Nemotron's layer norm "1p").
        weight: whether it has parameters at all.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = False
    offset: bool = False
    weight: bool = True

    def n_parameters(self, width: int) -> int:
        """Return the parameters of a norm over `width` features."""
        return width * (self.weight + self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    Args:
        kind: "linear" (all divided by `factor`), "llama3" (long wavelengths only, smoothly between), "yarn"
            (Peng et al. 2023, arXiv 2309.00071), "dynamic" (NTK, beyond the original context only) or
            "longrope" (one factor per frequency, arXiv 2402.13753).
        factor: the stretch, >= 1.
        low_freq_factor, high_freq_factor: llama3; wavelengths longer than original_context / low_freq_factor
            are stretched, shorter than original_context / high_freq_factor are not.
        original_context: context before the stretch, in tokens.
        beta_fast, beta_slow: yarn; turns within the original context above and below which a frequency is
            kept, or stretched.
        attention_factor: yarn, longrope; cosine and sine are multiplied by it.
        truncate: yarn; whether the borders of the ramp are rounded to whole dimensions.
        short_factors, long_factors: longrope, per frequency.
    """

    kind: Literal["linear", "llama3", "yarn", "dynamic", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

    Args:
        theta: base of the frequencies.
        dims: how many features of each head are rotated, the first ones; even.
        interleaved: pairs are (2i, 2i + 1) (GPT-J, DeepSeek) instead of (i, i + dims / 2).
        scaling: of the frequencies, or None.
    """

    theta: float
    dims: int
    interleaved: bool = False
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal self-attention with grouped keys and values.

    Args:
        heads, kv_heads, head_dim: of queries; of keys and values; features of each.
        qkv_bias, out_bias: of the projections.
        fused_qkv: one projection for queries, keys and values, or three.
        qk_norm: norm of queries and keys before rotation, or None.
        qk_norm_over: "head" (each head alone, one weight of head_dim for all), "each" (each head alone, with
            a weight of its own; Command R+) or "all" (all heads together).
        rotary: or None.
        alibi: linear biases of the scores (Press et al. 2021, arXiv 2108.12409).
        window: a query sees this many last tokens, itself included; None: all.
        softcap: scores become softcap * tanh(scores / softcap); None: not.
        scale: of the scores; None: head_dim ** -0.5.
        sinks: one learned score per head joins each softmax (GPT-OSS).
        clip_qkv: projections are clamped to +- this; None: not.
        dropout: of the probabilities.
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    fused_qkv: bool = False
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "each", "all"] = "head"
    rotary: Rotary | None = None
    alibi: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    clip_qkv: float | None = None
    dropout: float = 0.0

    def n_parameters(self, hidden: int) -> int:
        """Return the parameters between `hidden` features in and out."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        total = 2 * hidden * query + 2 * hidden * key_value
        total += (query + 2 * key_value) * self.qkv_bias + hidden * self.out_bias + self.heads * self.sinks
        if self.qk_norm is not None:
            widths = (self.head_dim, self.head_dim) if self.qk_norm_over == "head" else (query, key_value)
            total += sum(self.qk_norm.n_parameters(width) for width in widths)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Args:
        heads: of queries, keys and values.
        query_rank: width of the compressed queries; None: queries are projected in one step.
        kv_rank: width of the compressed keys and values.
        nope_dim, rope_dim, value_dim: features per head of queries and keys without rotation, with it (the
            rotated keys are shared by all heads), and of values.
        bias: of the down projections and of the output projection.
        norm: of the compressed queries, keys and values.
        rotary: of the `rope_dim` features.
        scale: of the scores; None: (nope_dim + rope_dim) ** -0.5.
        dropout: of the probabilities.
    """

    heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False
    norm: Norm
    rotary: Rotary
    scale: float | None = None
    dropout: float = 0.0

    def n_parameters(self, hidden: int) -> int:
        """Return the parameters between `hidden` features in and out."""
        query = self.heads * (self.nope_dim + self.rope_dim)
        down = hidden * (self.kv_rank + self.rope_dim) + (self.kv_rank + self.rope_dim) * self.bias
        up = self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        out = self.heads * self.value_dim * hidden + hidden * self.bias
        total = down + self.norm.n_parameters(self.kv_rank) + up + out
        if self.query_rank is None:
            return total + hidden * query
        compressed = hidden * self.query_rank + self.query_rank * self.bias
        return total + compressed + self.norm.n_parameters(self.query_rank) + self.query_rank * query


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """The feed-forward part of a layer, or one expert.

    Args:
        width: features between up and down projection.
        activation: of the up projection, or of the gate.
        gated: activation(gate(x)) * up(x) (Shazeer 2020, arXiv 2002.05202) instead of activation(up(x)).
        up_bias, down_bias: of the projections (the gate's as the up projection's).
        fused_gate: gate and up projection are one matrix.
        clamp: gated values are clamped to +- this, the gate from above (GPT-OSS); None: not.
        up_offset: the up projection counts as its value plus this (GPT-OSS: 1).
        gate_slope: the gate is x * sigmoid(gate_slope * x) instead of silu(x) (GPT-OSS: 1.702).
    """

    width: int
    activation: Activation = "silu"
    gated: bool = True
    up_bias: bool = False
    down_bias: bool = False
    fused_gate: bool = False
    clamp: float | None = None
    up_offset: float = 0.0
    gate_slope: float | None = None

    def n_parameters(self, hidden: int) -> int:
        """Return the parameters between `hidden` features in and out."""
        ups = 2 if self.gated else 1
        return (ups + 1) * hidden * self.width + ups * self.width * self.up_bias + hidden * self.down_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How tokens choose experts.

    Args:
        experts, top_k: of a layer; how many of them take each token.
        scores: "softmax" over all experts before the choice, "softmax_of_chosen" over the chosen ones, or
            "sigmoid" (DeepSeek-V3).
        normalised: weights of the chosen experts are divided by their sum.
        scaling: the weights are multiplied by it.
        groups, groups_kept: experts are chosen within the best groups only (node-limited routing); 1, 1: off.
        group_score: a group counts as its best expert ("max", DeepSeek-V2) or as the sum of its best two
            ("top2", DeepSeek-V3).
        correction_bias: a bias, not trained by gradients, joins the scores for the choice alone.
        bias: of the router's projection.
        softcap: logits become softcap * tanh(logits / softcap) (Grok-1); None: not.
        weigh_input: weights multiply the expert's input instead of its output (Llama 4).
    """

    experts: int
    top_k: int
    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    normalised: bool = True
    scaling: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    group_score: Literal["max", "top2"] = "max"
    correction_bias: bool = False
    bias: bool = False
    softcap: float | None = None
    weigh_input: bool = False

    def n_parameters(self, hidden: int) -> int:
        """Return the trained parameters (a correction bias is a buffer)."""
        return hidden * self.experts + self.experts * self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMoE:
    """Routed experts in place of the feed-forward part, with or without a shared one for every token.

    Args:
        router: how tokens choose.
        expert: shape of one routed expert.
        shared: shape of the shared expert (several of one width count as one of their sum), or None.
        shared_gate: the shared expert's output is multiplied by sigmoid of a projection to one feature.
    """

    router: Router
    expert: FeedForward
    shared: FeedForward | None = None
    shared_gate: bool = False

    def n_parameters(self, hidden: int, *, experts: int | None = None) -> int:
        """Return the parameters, counting `experts` routed experts (default: all)."""
        count = self.router.experts if experts is None else experts
        total = self.router.n_parameters(hidden) + count * self.expert.n_parameters(hidden)
        if self.shared is not None:
            total += self.shared.n_parameters(hidden) + hidden * self.shared_gate
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer.

    Args:
        attention, feed_forward: its parts.
        norm, placement: its norms, and where they stand.
        dropout: of what each part adds to the residual sum.
        residual_scale: what each part adds is multiplied by it (Granite).
    """

    attention: Attention | LatentAttention
    feed_forward: FeedForward | SparseMoE
    norm: Norm
    placement: Placement = "pre"
    dropout: float = 0.0
    residual_scale: float = 1.0

    @property
    def norms(self) -> int:
        """Return how many norms over the hidden features it has."""
        return {"pre": 2, "post": 2, "sandwich": 4, "parallel": 2, "parallel_shared": 1}[self.placement]

    def n_parameters(self, hidden: int, *, active: bool = False) -> int:
        """Return its parameters; `active`: those that take part for one token."""
        total = self.attention.n_parameters(hidden) + self.norms * self.norm.n_parameters(hidden)
        if active and isinstance(self.feed_forward, SparseMoE):
            return total + self.feed_forward.n_parameters(hidden, experts=self.feed_forward.router.top_k)
        return total + self.feed_forward.n_parameters(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Tokens (and positions) to hidden features.

    Args:
        positions: rows of a learned position embedding; None: it has none.
        scale: the embedded token is multiplied by it (Gemma: sqrt(hidden)).
        norm: of the embedding (BLOOM), or None.
        dropout: of the sum.
    """

    positions: int | None = None
    scale: float = 1.0
    norm: Norm | None = None
    dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Hidden features to the logits of the vocabulary.

    Args:
        tied: its matrix is the token embedding.
        bias: whether it has one.
        softcap: logits become softcap * tanh(logits / softcap); None: not.
        scale: logits are multiplied by it.
    """

    tied: bool = False
    bias: bool = False
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankAdapters:
    """LoRA: trained matrices of low rank beside frozen ones (Hu et al. 2021, arXiv 2106.09685).

    Args:
        rank: of the product B A.
        alpha: the product counts alpha / rank.
        targets: projections that get one, by their name in the module: "q_proj", "o_proj", ...
        dropout: of the adapter's input.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A decoder with its next-token loss.

    Args:
        family: key of `piper.models.MODELS`.
        hidden: features of the residual stream.
        vocabulary: rows of the embedding, as published.
        layers: in order; equal ones may be one object.
        embedding, final_norm, head: around them (final_norm None: none).
        context_length: longest sequence that the model was made for, in tokens.
        prediction_depth: modules that predict further tokens (multi-token prediction, DeepSeek-V3, arXiv
            2412.19437, section 2.2): each has three norms (of the token, of the stream, before the head), a
            projection 2 hidden -> hidden and a layer as the last one, and shares embedding and head.
        adapters: or None; with them all other parameters are frozen.
        frozen: parts that are not trained, by the beginning of their parameters' names: "model.embed_tokens".
        segment_lengths: documents that are packed into each sequence, in tokens, in order; a token sees those
            of its own document only. (): a sequence is one document.
        init_std: standard deviation of the published initialisation of matrices.
        assumed: config keys that were left out, with the value taken.
        notices: parts of the published model that are not here, each said in a sentence.
    """

    family: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    embedding: Embedding = Embedding()
    final_norm: Norm | None
    head: Head = Head()
    context_length: int
    prediction_depth: int = 0
    adapters: LowRankAdapters | None = None
    frozen: tuple[str, ...] = ()
    segment_lengths: tuple[int, ...] = ()
    init_std: float = 0.02
    assumed: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def n_parameters(self) -> int:
        """Return the exact number of parameters, without adapters."""
        return self._count(lambda layer: layer.n_parameters(self.hidden))

    @property
    def n_active_parameters(self) -> int:
        """Return how many parameters take part for one token."""
        return self._count(lambda layer: layer.n_parameters(self.hidden, active=True))

    def padded(self, multiple: int) -> DecoderShape:
        """Return the shape with a vocabulary rounded up to a multiple (Megatron: 128 times the tp degree)."""
        return replace(self, vocabulary=-(-self.vocabulary // multiple) * multiple)

    def _count(self, of_layer: Callable[[Layer], int]) -> int:
        hidden = self.hidden
        total = self.vocabulary * hidden * (1 if self.head.tied else 2) + self.vocabulary * self.head.bias
        total += (self.embedding.positions or 0) * hidden
        total += sum(norm.n_parameters(hidden) for norm in (self.embedding.norm, self.final_norm) if norm)
        kinds = {id(layer): layer for layer in self.layers}
        counts = {key: of_layer(layer) for key, layer in kinds.items()}
        total += sum(counts[id(layer)] for layer in self.layers)
        if self.prediction_depth:
            norms = 3 * (self.final_norm or Norm()).n_parameters(hidden)
            total += self.prediction_depth * (norms + 2 * hidden * hidden + of_layer(self.layers[-1]))
        return total
