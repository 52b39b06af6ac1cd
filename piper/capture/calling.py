"""How a module is called: with tokens and labels, whatever its `forward` names them, and out comes a loss.

[Note: calling a module]
Piper trains on `tokens` and `labels`, both int64 [microbatch, seq]; label t is the token after token t. By
the parameters of `forward`:

- `input_ids` and `labels` (the convention of transformers): both go by keyword, the loss is `output.loss`.
  Those models shift the labels themselves and average; where forward takes further keywords, they are told
  that ours are shifted (`shift_labels`) and to divide by one (`num_items_in_batch`), which gives a sum. A
  key-value cache is switched off (`use_cache`).
- one parameter, or `input_ids` alone: the module returns scores [microbatch, seq, classes] (or an object
  with `logits`), and the loss is their summed cross-entropy in fp32.
- otherwise: `forward(tokens, labels)` returns the loss, or an object with `loss`.

An object may also be a mapping, or a tuple in which only one tensor can be meant.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from piper.annotation import joined
from piper.errors import ModelError
from piper.tagging import tagged_forwards


def loss_of(module: nn.Module, tokens: Tensor, labels: Tensor) -> Any:
    """Return what a module computes as its loss [Note: calling a module].

    Args:
        tokens, labels: [microbatch, seq], int64.
    """
    tagged = [forward for _, forward in tagged_forwards(module)]
    units = sum(forward.is_default for forward in tagged) or None
    with joined(units=units) if tagged else nullcontext():
        return _loss_of(module, tokens, labels)


def _loss_of(module: nn.Module, tokens: Tensor, labels: Tensor) -> Any:
    parameters = inspect.signature(module.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    if {"input_ids", "labels"} <= parameters.keys():
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            options |= {"shift_labels": labels, "num_items_in_batch": 1}
        return _part(module(input_ids=tokens, labels=labels, **options), "loss")
    if computes_no_loss(module):
        scores = _scores(_part(module(tokens, **options), "logits"), tokens, where=type(module).__name__)
        with joined():
            return F.cross_entropy(scores.float().flatten(0, -2), labels.flatten(), reduction="sum")
    return _part(module(tokens, labels), "loss")


def _scores(scores: Any, tokens: Tensor, *, where: str) -> Tensor:
    if isinstance(scores, Tensor) and scores.shape[:-1] == tokens.shape and scores.is_floating_point():
        return scores
    shown = f"{scores.dtype} {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
    raise ModelError(
        where=where, field="forward", value=shown,
        rule="takes no labels, so it must return scores [microbatch, seq, classes]",
        fix="take (tokens, labels) and return the summed loss, or return the scores of every token",
    )  # fmt: skip


def computes_no_loss(module: nn.Module) -> bool:
    """Return whether a module takes no labels, so that its loss is computed outside."""
    parameters = inspect.signature(module.forward).parameters
    if "labels" in parameters:
        return False
    if next(iter(parameters), "") == "input_ids":
        return True
    by_place = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    takes = [parameter for parameter in parameters.values() if parameter.kind in by_place]
    several = len(takes) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return bool(takes) and not several


def _part(output: Any, name: str) -> Any:
    """Return a part of what a module returned: by name, or from a tuple the only number or only scores."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        fitting = [x for x in output if isinstance(x, Tensor) and (x.dim() == 0) == (name == "loss")]
        return fitting[0] if len(fitting) == 1 else output
    if isinstance(output, Mapping):
        return output.get(name, output)
    return getattr(output, name, output)
