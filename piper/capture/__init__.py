"""Capture: an annotated module becomes segments with their operations and memory.

The module runs on meta tensors (shapes, no numbers) while a dispatch mode notes every kernel, every tensor
saved for backward, and every tensor that crosses from one scope to another. What the cache knows needs no
torch, nor does another size of a model of which it knows the family ([Note: families]).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from cost_models.errors import require_positive_int
from piper.capture.choice import KernelChoice
from piper.capture.collection import collection_paused
from piper.capture.domain import Domain
from piper.capture.known import Found, Known
from piper.errors import CacheNotice, ModelError
from piper.graph.captured import CapturedModel
from simulator.plan import ModelFacts

if TYPE_CHECKING:
    from torch import nn


DEFAULT_KERNELS = KernelChoice()
"""Kernels of torch on CUDA."""


class Source(Protocol):
    """What capture needs of a model that is not built yet (`piper.models.ModelSource`)."""

    @property
    def name(self) -> str:
        """Return the name for reports and messages."""

    @property
    def facts(self) -> ModelFacts | None:
        """Return counts for reports, if they are known."""

    def fingerprint(self) -> str | None:
        """Return a key of all that decides what the module computes, or None."""

    def build(self, *, dtype: str, device: str, seq_len: int | None = None) -> nn.Module:
        """Return the annotated module."""


def capture(
    source: Source | nn.Module,
    *,
    micro_batch: int,
    seq_len: int,
    dtype: str,
    kernels: KernelChoice = DEFAULT_KERNELS,
    cache_dir: str | os.PathLike[str] | None = None,
    dedupe: bool = True,
) -> CapturedModel:
    """Return the segments of a model at one microbatch size.

    Args:
        source: from `piper.models.find_model`, or an annotated module (left untouched, never cached).
        micro_batch: sequences per microbatch.
        seq_len: tokens per sequence.
        dtype: "fp32", "bf16" or "fp16".
        kernels: for which device and kernels.
        cache_dir: folder of the cache; default $PIPER_CACHE_DIR or ~/.cache/piper.
        dedupe: run repeated blocks once; the result is the same.
    Raises: ModelError for sizes, dtypes and modules that cannot be captured.
    """
    name = getattr(source, "name", None) or type(source).__name__
    fix = "give a whole number >= 1"
    require_positive_int(micro_batch, where=name, field="micro_batch", fix=fix, error=ModelError)
    require_positive_int(seq_len, where=name, field="seq_len", fix=fix, error=ModelError)
    tokens = micro_batch * seq_len
    fix = "lower --micro-batch or --seq-len"
    require_positive_int(tokens, where=name, field="tokens of a microbatch", fix=fix, error=ModelError)
    sizes: dict[str, Any] = {"micro_batch": micro_batch, "seq_len": seq_len, "dtype": dtype}
    fingerprint = getattr(source, "fingerprint", lambda: None)()
    if fingerprint is None:
        return _captured(source, name=name, sizes=sizes, kernels=kernels, dedupe=dedupe)
    facts = getattr(source, "facts", None)
    options = (fingerprint, dtype, kernels.key)
    known, point = Known.of(source, cache_dir=cache_dir, options=options), (micro_batch, seq_len)
    model = known.model_at(point)
    if model is None and dedupe:
        domain = known.domain_to_try(point)
        model, found = _sampled(source, point, name=name, dtype=dtype, kernels=kernels, domain=domain)
        known.keep(model, found)
    elif model is None:
        model = _captured(source, name=name, sizes=sizes, kernels=kernels, dedupe=False)
        known.keep(model, [])
    return model if facts is None else replace(model, facts=facts)


def _captured(
    source: Any, *, name: str, sizes: dict[str, Any], kernels: KernelChoice, dedupe: bool
) -> CapturedModel:
    from piper.capture.fresh import capture_fresh

    return capture_fresh(source, name=name, sizes=sizes, kernels=kernels, dedupe=dedupe)


def _sampled(
    source: Any,
    point: tuple[int, int],
    *,
    name: str,
    dtype: str,
    kernels: KernelChoice,
    domain: Domain | None,
) -> tuple[CapturedModel, list[Found]]:
    with collection_paused():
        from piper.capture.sampling import sample

        return sample(source, point, name=name, dtype=dtype, kernels=kernels, domain=domain)


__all__ = ["CacheNotice", "CapturedModel", "KernelChoice", "Source", "capture"]
