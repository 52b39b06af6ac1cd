"""Routers, stacked experts, and the sparse part that they make.

The experts of a layer are stacked: `experts.w1` [experts, width, hidden] holds what is `experts.N.w1.weight`
[width, hidden] in Hugging Face's Mixtral (`w1` the gate, `w3` up, `w2` down). Routing drops no token and adds
no auxiliary loss.

[Note: scopes of experts]
"EP": what expert parallelism distributes: the experts alone, on tokens sorted by expert; of their weights
dimension 0 numbers the experts. Routing, the sorting before and the sum after lie outside, so that an
exchange at the scope's borders moves exactly the routed tokens, microbatch x seq x top_k rows. A shared
expert is a feed-forward part of its own, under "TP". The other scopes are those of
[Note: scopes of a decoder].

Sources: Jiang et al. 2024 (arXiv 2401.04088), section 2.1; grouped products: Gale et al. 2022 (arXiv
2211.15841); node-limited routing: DeepSeek-V2 (arXiv 2405.04434), section 2.2.2; sigmoid and the correction
bias: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.annotation import annotate
from piper.models import shape as shapes
from piper.models.feed_forward import ACTIVATIONS, FeedForward, lifted, opened
from piper.models.projections import Linear


class Experts(nn.Module):
    """Many feed-forward parts of one shape, each on its own rows."""

    def __init__(self, shape: shapes.FeedForward, hidden: int, experts: int) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        if shape.gated and shape.fused_gate:
            self.w13 = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        else:
            self.w1 = nn.Parameter(torch.empty(experts, width, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, width))
        if shape.gated and not shape.fused_gate:
            self.w3 = nn.Parameter(torch.empty(experts, width, hidden))
        ups = [name for name in ("w13", "w1", "w3") if hasattr(self, name)]
        for name in (*(ups if shape.up_bias else ()), *(("w2",) if shape.down_bias else ())):
            features = getattr(self, name).shape[1]
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(experts, features)))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Map [rows, hidden] to the same shape; expert e takes the rows before ends[e] ([experts], int32)."""
        return self._product(self._inner(rows, ends), "w2", ends)

    def _inner(self, rows: Tensor, ends: Tensor) -> Tensor:
        if not self.shape.gated:
            return ACTIVATIONS[self.shape.activation](self._product(rows, "w1", ends))
        if self.shape.fused_gate:
            gate, up = self._product(rows, "w13", ends).chunk(2, dim=-1)
            return opened(self.shape, gate) * lifted(self.shape, up)
        gate, up = self._product(rows, "w1", ends), self._product(rows, "w3", ends)
        return opened(self.shape, gate) * lifted(self.shape, up)

    def _product(self, rows: Tensor, name: str, ends: Tensor) -> Tensor:
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias", None)
        product: Tensor = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        if bias is None:
            return product
        numbers = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
        biases: Tensor = bias.index_select(0, torch.searchsorted(ends, numbers, right=True))
        return product + biases


class Router(Linear):
    """Chooses experts for tokens; its weight has a row for each expert."""

    correction_bias: Tensor

    def __init__(self, shape: shapes.Router, hidden: int) -> None:
        super().__init__(hidden, shape.experts, bias=shape.bias)
        self.shape = shape
        if shape.correction_bias:
            self.register_buffer("correction_bias", torch.zeros(shape.experts, dtype=torch.float32))

    def choose(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (fp32) and numbers of the experts of each token, [tokens, top_k] both."""
        shape = self.shape
        logits = self(tokens)
        if shape.softcap is not None:
            logits = torch.tanh(logits / shape.softcap) * shape.softcap
        if shape.scores == "softmax_of_chosen":
            best, chosen = logits.topk(shape.top_k, dim=-1)
            weights = F.softmax(best, dim=-1, dtype=torch.float32)
        else:
            weights, chosen = self._chosen(self._scores(logits))
            if shape.normalised:
                weights = weights / weights.sum(-1, keepdim=True)
        return (weights if shape.scaling == 1.0 else weights * shape.scaling), chosen

    def _scores(self, logits: Tensor) -> Tensor:
        if self.shape.scores == "sigmoid":
            return logits.float().sigmoid()
        return F.softmax(logits, dim=-1, dtype=torch.float32)

    def _chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        shape, ranked = self.shape, scores
        if shape.correction_bias:
            ranked = ranked + self.correction_bias
        if shape.groups_kept < shape.groups:
            ranked = self._of_best_groups(ranked)
        best, chosen = ranked.topk(shape.top_k, dim=-1)
        return (best if ranked is scores else scores.gather(-1, chosen)), chosen

    def _of_best_groups(self, scores: Tensor) -> Tensor:
        shape = self.shape
        by_group = torch.unflatten(scores, -1, (shape.groups, -1))
        best_of_group = by_group.topk(1 if shape.group_score == "max" else 2, dim=-1)[0]
        of_group = best_of_group.sum(-1)
        kept = of_group.topk(shape.groups_kept, dim=-1)[1]
        left_out = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, kept, False)
        return by_group.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)


class SparseMoE(nn.Module):
    """A router, the experts that it chooses, `top_k` for each token, and the shared expert."""

    def __init__(self, shape: shapes.SparseMoE, hidden: int) -> None:
        super().__init__()
        self.shape = shape
        self.gate = Router(shape.router, hidden)
        self.experts = Experts(shape.expert, hidden, shape.router.experts)
        if shape.shared is not None:
            self.shared_expert = FeedForward(shape.shared, hidden)
        if shape.shared_gate:
            self.shared_expert_gate = Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [microbatch, seq, hidden] to the same shape."""
        routed = self._routed(x.flatten(0, 1)).view(x.shape)
        if self.shape.shared is None:
            return routed
        prepared = self.shared_expert.prepare(x)
        with annotate("TP"):
            made = self.shared_expert(prepared)
        shared = self.shared_expert.finish(made)
        if self.shape.shared_gate:
            shared = torch.sigmoid(self.shared_expert_gate(x)) * shared
        return routed + shared

    def _routed(self, tokens: Tensor) -> Tensor:
        router = self.shape.router
        weights, chosen = self.gate.choose(tokens)
        weights = weights.to(tokens.dtype)
        expert_of_row = chosen.flatten()
        order = expert_of_row.argsort(stable=True)
        home_of_row = order.argsort()
        experts = torch.arange(router.experts, device=tokens.device)
        ends = (expert_of_row.unsqueeze(1) <= experts).sum(0, dtype=torch.int32)
        rows = tokens.index_select(0, order // router.top_k)
        if router.weigh_input:
            rows = rows * weights.flatten().index_select(0, order).unsqueeze(-1)
        with annotate("EP"):
            made: Tensor = self.experts(rows, ends)
        by_token = made.index_select(0, home_of_row).view(-1, router.top_k, tokens.shape[-1])
        return by_token.sum(1) if router.weigh_input else (by_token * weights.unsqueeze(-1)).sum(1)
