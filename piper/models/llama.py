"""The Llama family: decoder with grouped-query attention, rotary embedding, RMS norm and SwiGLU.

Parameter names are those of Hugging Face's `LlamaForCausalLM`. Layers take the rotary tables and slice
them inside their scope, so that no operation lies outside of one.

[Note: scopes of a decoder]
"PP": units of the pipeline cut: the embedding, every layer (also "LAYER"), and norm + head + loss.
"TP": what tensor parallelism cuts: the embedding, attention from its projections to the output projection,
the feed-forward part, and head + loss. "CP": the attention between the tokens of a sequence, which context
parallelism cuts. Norms, dropout and residual sums lie between the "TP" scopes, so that they may be cut over
tokens (sequence parallelism).

Sources: Touvron et al. 2023 (arXiv 2302.13971); Ainslie et al. 2023 (grouped queries, arXiv 2305.13245);
rotary embedding: Su et al. 2021 (arXiv 2104.09864), in the "rotate half" layout of Hugging Face; scaling of
Llama 3.1: meta-llama/llama-models, `apply_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.annotation import annotate
from piper.models.llama_config import LlamaConfig, RopeScaling


def rope_tables(config: LlamaConfig, *, positions: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [positions, head_dim / 2], computed in fp32, in the default dtype and device."""
    if torch.get_default_device().type == "meta":
        shape = positions, config.head_dim // 2
        return torch.empty(shape), torch.empty(shape)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    dtype = torch.get_default_dtype()
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x [microbatch, seq, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)), dim=-1
    )


class Linear(nn.Linear):
    """`nn.Linear` without its default initialisation, which the model's own one replaces."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""


class Embedding(nn.Embedding):
    """`nn.Embedding` without its default initialisation."""

    def reset_parameters(self) -> None:
        """Leave the parameters as they are."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang, Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.grouped = config.kv_heads != config.heads
        query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden, query, bias=config.attention_bias)
        self.k_proj = Linear(config.hidden, key_value, bias=config.attention_bias)
        self.v_proj = Linear(config.hidden, key_value, bias=config.attention_bias)
        self.o_proj = Linear(query, config.hidden, bias=config.attention_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [microbatch, seq, hidden] to the same shape; cos, sin [>= seq, head_dim / 2]."""
        cos, sin = cos[: x.shape[1], None, :], sin[: x.shape[1], None, :]
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        with annotate("CP"):
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=True,
                enable_gqa=self.grouped,
            )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden, config.ffn, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden, config.ffn, bias=config.mlp_bias)
        self.down_proj = Linear(config.ffn, config.hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map [microbatch, seq, hidden] to the same shape."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [microbatch, seq, hidden] to the same shape."""
        with annotate("PP"), annotate("LAYER"):
            normed = self.input_layernorm(x)
            with annotate("TP"):
                attended = self.self_attn(normed, cos, sin)
            x = x + self._drop(attended)
            normed = self.post_attention_layernorm(x)
            with annotate("TP"):
                transformed = self.mlp(normed)
            return x + self._drop(transformed)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """Embedding and layers; the final norm is applied by the head's unit.

    Args:
        config: the shape apart from the layers.
        layers: each maps ([microbatch, seq, hidden], cos, sin) to [microbatch, seq, hidden].
        positions: length of the rotary tables.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig, layers: Iterable[nn.Module], *, positions: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config)
        cos, sin = rope_tables(config, positions=positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [microbatch, seq] to [microbatch, seq, hidden], not yet normalised."""
        with annotate("PP"), annotate("TP"):
            x: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


class CausalLM(nn.Module):
    """A decoder with its summed cross-entropy loss.

    Args:
        config: the shape apart from the layers.
        layers: of the decoder, in order.
        seq_len: longest sequence to prepare rotary tables for; at least the model's context.

    Attributes:
        init_std: standard deviation of the published initialisation (matrices; norms start at 1).
    """

    def __init__(
        self, config: LlamaConfig, layers: Iterable[nn.Module], *, seq_len: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.init_std = config.init_std
        self.model = Decoder(config, layers, positions=max(config.context_length, seq_len or 0))
        self.lm_head = Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        if not self.lm_head.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew from torch's generator."""
        for name, parameter in self.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                nn.init.ones_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=self.init_std)

    def reset_buffers(self) -> None:
        """Fill the rotary tables (after `to_empty`)."""
        cos, sin = rope_tables(self.config, positions=self.model.cos.shape[0])
        self.model.cos.copy_(cos)
        self.model.sin.copy_(sin)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the token losses (fp32).

        Args:
            tokens, labels: [microbatch, seq], int64; labels are the tokens shifted by one.
        """
        x = self.model(tokens)
        with annotate("PP"):
            normed = self.model.norm(x)
            with annotate("TP"):
                logits = self.lm_head(normed).float()
                return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class LlamaForCausalLM(CausalLM):
    """A Llama model; arguments as in `CausalLM`."""

    def __init__(self, config: LlamaConfig, *, seq_len: int | None = None) -> None:
        super().__init__(config, (Layer(config) for _ in range(config.layers)), seq_len=seq_len)
