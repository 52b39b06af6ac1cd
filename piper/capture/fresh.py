"""A capture without the cache: build on meta, record three times, assemble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from piper.capture.assemble import Assembly, assemble
from piper.capture.choice import KernelChoice
from piper.capture.default_units import tag_repeated_blocks
from piper.capture.dtypes import compute_dtype
from piper.capture.records import ReplayMismatchError
from piper.capture.repeats import repeated_blocks
from piper.capture.run import Run, UnannotatedError, record, to_meta
from piper.graph.captured import CapturedModel
from simulator.plan import ModelFacts


def capture_fresh(
    source: Any, *, name: str, sizes: dict[str, Any], kernels: KernelChoice, dedupe: bool
) -> CapturedModel:
    """Return the captured model; see `piper.capture.capture`."""
    subject = Subject(source, name=name, seq_len=sizes["seq_len"], dtype=sizes["dtype"], kernels=kernels)
    try:
        return _captured(subject, sizes=sizes, dedupe=dedupe)
    except UnannotatedError:
        notice = tag_repeated_blocks(subject.module)
        if notice is None:
            raise
        model = _captured(subject, sizes=sizes, dedupe=dedupe)
        return replace(model, notices=(notice, *model.notices))


def _captured(subject: Subject, *, sizes: dict[str, Any], dedupe: bool) -> CapturedModel:
    captures = Captures(subject, blocks=repeated_blocks(subject.module) if dedupe else ())
    try:
        model = captures.at(sizes["micro_batch"], sizes["seq_len"]).model
    except ReplayMismatchError:
        captures = Captures(subject, blocks=())
        model = captures.at(sizes["micro_batch"], sizes["seq_len"]).model
    return replace(model, notices=captures.notices)


class Subject:
    """A module on the meta device, in one dtype.

    Args:
        source: as in `piper.capture.capture`.
        name: for messages.
        seq_len: longest sequence that it must take.
        dtype: "fp32", "bf16" or "fp16".
        kernels: for which kernels it is captured.
    """

    def __init__(self, source: Any, *, name: str, seq_len: int, dtype: str, kernels: KernelChoice) -> None:
        torch_dtype = compute_dtype(dtype, where=name)
        self.name, self.dtype, self.kernels = name, dtype, kernels
        self.facts: ModelFacts | None = None
        if isinstance(source, nn.Module):
            self.module = to_meta(source, dtype=torch_dtype)
            return
        self.facts = source.facts
        self.module = source.build(dtype=dtype, device="meta", seq_len=seq_len)
        if not all(tensor.is_meta for tensor in (*self.module.parameters(), *self.module.buffers())):
            self.module = to_meta(self.module, dtype=torch_dtype)

    @property
    def layout(self) -> list[tuple[object, ...]]:
        """Return names, shapes, dtypes and gradients of all parameters and buffers."""
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        return [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]


class Captures:
    """Captures of one module at several sizes; a recording that two of them need is made once.

    Args:
        subject: the module.
        blocks: from `repeated_blocks`, to be run once.
    """

    def __init__(self, subject: Subject, *, blocks: Sequence[tuple[nn.Module, int]]) -> None:
        self._subject, self._blocks = subject, blocks
        self._runs: dict[tuple[int, int, bool], Run] = {}

    def at(self, micro_batch: int, seq_len: int, *, other: int | None = None) -> Assembly:
        """Return the capture at one size; raises ModelError, ReplayMismatchError.

        Args:
            micro_batch, seq_len: the size.
            other: the microbatch to compare with; default one sequence more.
        """
        subject, other = self._subject, other or micro_batch + 1
        return assemble(
            subject.module,
            runs=(
                self.run(micro_batch, seq_len, grad=True),
                self.run(micro_batch, seq_len, grad=False),
                self.run(other, seq_len, grad=True),
            ),
            facts=subject.facts,
            sizes=(micro_batch, seq_len, subject.dtype),
            other=other,
        )

    @property
    def notices(self) -> tuple[str, ...]:
        """Return what users should know of the module."""
        runs = self._runs.values()
        names = list(dict.fromkeys(name for run in runs for name in run.rewritten))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        found = [f"forward changes the buffer {n}{more}: simulated, refused by piper run" for n in names[:1]]
        if any(run.recorder.values.assumed_balance for run in runs):
            found.append("forward reads which experts were chosen: captured with every expert chosen alike")
        return tuple(found)

    @property
    def num_operators(self) -> int:
        """Return how many operators the largest recording holds, replayed blocks left out."""
        return max((run.recorder.num_operators for run in self._runs.values()), default=0)

    def run(self, micro_batch: int, seq_len: int, *, grad: bool) -> Run:
        """Return the recording at one size."""
        key = (micro_batch, seq_len, grad)
        if key not in self._runs:
            self._runs[key] = record(
                self._subject.module,
                where=self._subject.name,
                micro_batch=micro_batch,
                seq_len=seq_len,
                grad=grad,
                blocks=self._blocks,
                kernels=self._subject.kernels,
            )
        return self._runs[key]
