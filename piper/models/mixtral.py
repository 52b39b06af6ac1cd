"""The Mixtral family: Llama's decoder with sparse experts in place of the feed-forward part.

Parameter names are those of Hugging Face's `MixtralForCausalLM`, but the experts of a layer are stacked:
`experts.w1` [experts, ffn, hidden] holds what is `experts.N.w1.weight` [ffn, hidden] there.
Routing drops no token and adds no auxiliary loss (as published: `output_router_logits` is off).

[Note: scopes of experts]
"EP": what expert parallelism distributes: the experts alone, on tokens sorted by expert; of their weights
dimension 0 numbers the experts. Routing, the sorting before and the sum after lie outside, so that an
exchange at the scope's borders moves exactly the routed tokens, microbatch x seq x top_k rows. The other
scopes are those of [Note: scopes of a decoder].

Source: Jiang et al. 2024 (arXiv 2401.04088), section 2.1; grouped products: Gale et al. 2022 (arXiv
2211.15841).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.annotation import annotate
from piper.models.llama import Attention, CausalLM, Linear, RMSNorm
from piper.models.mixtral_config import MixtralConfig


class Experts(nn.Module):
    """SwiGLU of many experts, each on its own rows."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        experts, hidden, ffn = config.experts, config.dense.hidden, config.dense.ffn
        self.w1 = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, ffn))
        self.w3 = nn.Parameter(torch.empty(experts, ffn, hidden))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Map [rows, hidden] to the same shape; expert e takes the rows before ends[e] ([experts], int32)."""
        gate = F.grouped_mm(rows, self.w1.transpose(1, 2), offs=ends)
        up = F.grouped_mm(rows, self.w3.transpose(1, 2), offs=ends)
        return F.grouped_mm(F.silu(gate) * up, self.w2.transpose(1, 2), offs=ends)


class SparseMoE(nn.Module):
    """A router and the experts that it chooses, `top_k` for each token."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.top_k = config.top_k
        self.gate = Linear(config.dense.hidden, config.experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map [microbatch, seq, hidden] to the same shape."""
        tokens = x.flatten(0, 1)
        scores = F.softmax(self.gate(tokens), dim=-1, dtype=torch.float32)
        chosen_scores, chosen = scores.topk(self.top_k, dim=-1)
        weights = (chosen_scores / chosen_scores.sum(-1, keepdim=True)).to(x.dtype)
        expert_of_row = chosen.flatten()
        order = expert_of_row.argsort(stable=True)
        home_of_row = order.argsort()
        experts = torch.arange(self.num_experts, device=x.device)
        ends = (expert_of_row.unsqueeze(1) <= experts).sum(0, dtype=torch.int32)
        rows = tokens.index_select(0, order // self.top_k)
        with annotate("EP"):
            made: Tensor = self.experts(rows, ends)
        by_token = made.index_select(0, home_of_row).view(-1, self.top_k, x.shape[-1])
        return (by_token * weights.unsqueeze(-1)).sum(1).view(x.shape)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config.dense)
        self.block_sparse_moe = SparseMoE(config)
        self.input_layernorm = RMSNorm(config.dense)
        self.post_attention_layernorm = RMSNorm(config.dense)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [microbatch, seq, hidden] to the same shape; cos, sin [>= seq, head_dim / 2]."""
        with annotate("PP"), annotate("LAYER"):
            normed = self.input_layernorm(x)
            with annotate("TP"):
                attended = self.self_attn(normed, cos, sin)
            x = x + attended
            mixed: Tensor = self.block_sparse_moe(self.post_attention_layernorm(x))
            return x + mixed


class MixtralForCausalLM(CausalLM):
    """A Mixtral model; arguments as in `CausalLM`."""

    def __init__(self, config: MixtralConfig, *, seq_len: int | None = None) -> None:
        layers = (Layer(config) for _ in range(config.dense.layers))
        super().__init__(config.dense, layers, seq_len=seq_len)
