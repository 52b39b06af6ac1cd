"""What directives state about parts of the model: read by the passes, never by the plan's readers.

Every fact claims segments. Two facts of one class that claim the same segment are a conflict, which the
directive that comes second reports with both lines (`require_unclaimed`). The line does not count in
comparisons: the same facts from another order of the file are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from piper.errors import StrategyError


class Fact(Protocol):
    """A statement about segments, and the line it comes from."""

    @property
    def segments(self) -> tuple[int, ...]:
        """Return the claimed segments, rising."""

    @property
    def where(self) -> str:
        """Return file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """Parameters that all replicas keep equal, and how their state is cut over the replicas.

    Args:
        segments: whose parameters.
        zero: 0 nothing is cut; 1 optimizer state; 2 and gradients; 3 and parameters.
        shard_ranks: ranks over which the state is cut (HSDP); None: all dp x cp replicas.
        bucket_bytes: most bytes of summed gradients in one bucket, or None: one bucket per stage.
        reduce_every: "step": once, after the last microbatch; "microbatch": each microbatch's gradients on
            their own, into a separate accumulator.
        prefetch: ZeRO-3: how many compute tasks earlier a parameter gather may start, or None: one bucket.
        reshard: ZeRO-3: free gathered parameters after the forward and gather them again for the backward.
        buffer_pool: ZeRO-3: most gathered buckets at one time, or None: what prefetch needs.
        reduce_stream, gather_stream: names of the streams of reductions and parameter gathers.
        reduce_dtype: dtype in which gradients travel, or None: as the training's `StateDtypes` say.
        where: file and line.
    """

    segments: tuple[int, ...]
    zero: int = 0
    shard_ranks: int | None = None
    bucket_bytes: int | None = None
    reduce_every: str = "step"
    prefetch: int | None = None
    reshard: bool = True
    buffer_pool: int | None = None
    reduce_stream: str = "dp"
    gather_stream: str = "dp"
    reduce_dtype: str | None = None
    where: str = field(default="strategy", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSharding:
    """Regions whose parameters are cut over the axis tp (columns first, then rows).

    Args:
        segments: inside the regions.
        sequence_parallel: between regions of a stage, activations are cut over the tokens: the regions
            are entered by an all-gather and left by a reduce-scatter, else by nothing and an all-reduce.
        asynchronous: the collectives are overlapped with the matmuls they feed, piece by piece.
        stream: of the collectives.
        where: file and line.
    """

    segments: tuple[int, ...]
    sequence_parallel: bool = True
    asynchronous: bool = False
    stream: str = "tp"
    where: str = field(default="strategy", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSharding:
    """Regions of experts that are owned by different ranks of a group; tokens travel by all-to-all.

    Args:
        segments: inside the regions.
        degree: ranks over which the experts are distributed (mesh axis ep).
        tensor_degree: ranks that share one expert (mesh axis etp).
        imbalance: tokens on the fullest rank / mean (>= 1).
        capacity: most tokens of an expert / mean, or None: no token is dropped.
        stream: of the all-to-alls.
        where: file and line.
    """

    segments: tuple[int, ...]
    degree: int
    tensor_degree: int = 1
    imbalance: float = 1.0
    capacity: float | None = None
    stream: str = "ep"
    where: str = field(default="strategy", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSharding:
    """Attention whose sequence is cut over the axis cp.

    Args:
        segments: the attention regions; all other segments only see fewer tokens.
        method: "ring": keys and values go round; "all_to_all": tokens are exchanged for heads.
        balanced: each rank takes an early and a late piece, so that causal work is equal.
        stream: of the exchanges.
        where: file and line.
    """

    segments: tuple[int, ...]
    method: str = "ring"
    balanced: bool = True
    stream: str = "cp"
    where: str = field(default="strategy", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Segments whose activations are made again before the backward.

    Args:
        segments: which.
        mode: "full": only inputs are kept; "ops": and results of attention and of every second matmul;
            "selective": the listed kinds alone are made again.
        kinds: selective: kinds of operations (`cost_models.ops.OpKind` values).
        where: file and line.
    """

    segments: tuple[int, ...]
    mode: str = "full"
    kinds: tuple[str, ...] = ()
    where: str = field(default="strategy", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloading:
    """State or activations that wait on the host.

    Args:
        segments: whose.
        what: "optimizer", "params" or "activations".
        prefetch: how many tasks of the compute stream before its use the copy back may start.
        stream: of the copies.
        where: file and line.
    """

    segments: tuple[int, ...]
    what: str
    prefetch: int = 1
    stream: str = "host"
    where: str = field(default="strategy", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMesh:
    """The ranks of some stages, arranged otherwise than those of the others.

    Args:
        segments: of the stages.
        axes: (name, size) of tp, cp and dp, whose product is that of the job's mesh; and of ep and etp where
            they are stated.
        shard_ranks: over how many ranks state is cut (HSDP), or None: not stated.
        where: file and line.
    """

    segments: tuple[int, ...]
    axes: tuple[tuple[str, int], ...]
    shard_ranks: int | None = None
    where: str = field(default="strategy", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRule:
    """Which stream wins, or how much of the device its kernels may take: one of the two for each rule.

    Args:
        stream: name; "pp" or the graph's `transfer_stream` means all streams of transfers.
        priority: higher wins; None: this rule is about `sms`.
        sms: streaming multiprocessors that a collective on it takes; None: this rule is about `priority`.
        where: file and line.
    """

    stream: str
    priority: int | None = None
    sms: int | None = None
    where: str = field(default="strategy", compare=False)


def require_unclaimed(
    claimed: Sequence[Fact], segments: Sequence[int], *, where: str, op: str, value: object
) -> None:
    """Raise StrategyError when a fact already claims one of the segments; names both lines."""
    wanted = set(segments)
    for fact in claimed:
        taken = wanted.intersection(fact.segments)
        if taken:
            raise StrategyError(
                where=where, field=f"{op}.filter", value=value,
                rule=f"claims segment {min(taken)}, which the {op} at {fact.where} already claims",
                fix=f"let each region be claimed by one {op}",
            )  # fmt: skip
