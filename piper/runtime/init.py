"""Initial values and data: functions of (seed, name or step, shape), the same on every layout."""

from __future__ import annotations

import torch
from torch import Tensor

from piper.runtime.pieces import index_of, piece_of
from piper.runtime.seeds import seed_of
from simulator.plan import Plan

PADDING = -1
"""Stands for no token in a batch."""
IGNORED = -100
"""The label that `torch.nn.functional.cross_entropy` leaves out (its `ignore_index`)."""
STANDARD_DEVIATION = 0.02
"""Of weight matrices and embeddings (GPT-2, Radford et al. 2019; Llama's `initializer_range`)."""


def initial_value(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Return the fp32 start of a parameter: normal(0, 0.02) for matrices, 0 for biases, 1 for norms."""
    if len(shape) > 1:
        generator = torch.Generator().manual_seed(seed_of("parameter", seed, name))
        return torch.randn(shape, generator=generator) * STANDARD_DEVIATION
    return torch.zeros(shape) if name.rpartition(".")[2] == "bias" else torch.ones(shape)


def initial_piece(plan: Plan, rank: int, name: str, *, seed: int) -> Tensor:
    """Return the start of what a rank holds of a parameter: a piece of the whole value, contiguous."""
    shape = next(parameter.shape for parameter in plan.parameters if parameter.name == name)
    return initial_value(name, shape, seed=seed)[index_of(piece_of(plan, rank, name))].contiguous()


def batch_of_step(plan: Plan, *, seed: int, step: int, padding: float = 0.0) -> Tensor:
    """Return the token numbers of one optimizer step, [global_batch, seq_len + 1] int64.

    Args:
        padding: share of tokens that are `PADDING`, at the ends of sequences of different lengths.
    """
    facts = plan.training
    generator = torch.Generator().manual_seed(seed_of("data", seed, step))
    shape = (facts.global_batch, facts.seq_len + 1)
    batch = torch.randint(plan.model.vocabulary, shape, generator=generator)
    if padding:
        most = 2 * padding * facts.seq_len  # lengths are uniform
        ends = facts.seq_len + 1 - (torch.rand(shape[0], 1, generator=generator) * most).round().long()
        batch[torch.arange(shape[1]) >= ends.clamp(min=2)] = PADDING
    return batch


def inputs_of(rows: Tensor) -> Tensor:
    """Return what a model reads of rows of a batch, [rows, seq_len], contiguous."""
    return rows[:, :-1].clamp(min=0)


def labels_of(rows: Tensor) -> Tensor:
    """Return what it should answer, contiguous; padding is a label that cross-entropy leaves out."""
    labels = rows[:, 1:].contiguous()
    return labels.masked_fill(labels == PADDING, IGNORED)


def counted_tokens(batch: Tensor) -> int:
    """Return by how many tokens the loss of a step is divided: its labels without padding.

    [Note: every token weighs the same]
    It is known to every rank before the first backward, so that no mean of means is ever taken: each
    microbatch contributes its sum / this number, whatever microbatches, replicas and padding there are.
    """
    return int((batch[:, 1:] != PADDING).sum())


def samples_of(plan: Plan, *, replica: int, microbatch: int) -> range:
    """Return the global sample numbers of one microbatch of one replica."""
    sizes = plan.training.micro_batch_sizes
    start = replica * sum(sizes) + sum(sizes[:microbatch])
    return range(start, start + sizes[microbatch])


def replica_of(plan: Plan, rank: int) -> int:
    """Return which replica of the model a rank belongs to."""
    return plan.mesh.coordinate(rank, "dp")
