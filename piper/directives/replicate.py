"""`replicate`: data parallelism with mean semantics, and ZeRO: state that is cut over the replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from cost_models.ops import DTYPE_BYTES
from piper.errors import StrategyError
from piper.graph.directive import (
    Directive,
    claimed,
    read_choice,
    read_devices,
    read_filter,
    read_flag,
    read_name,
    read_whole_number,
    refuse_unknown_keys,
    state,
)
from piper.graph.facts import Replication
from piper.graph.filters import Filter
from piper.graph.graph import Graph

BYTES_PER_MB = 2**20
"""`bucket_mb` counts 2^20 bytes (CONTRACT)."""
REDUCTIONS = ("step", "microbatch")
REDUCE_DTYPES = ("fp32", "bf16", "fp16")
_FLAGS = ("shard_optimizer", "shard_grads", "shard_params")
_ALIASES = {"bucket_size": "bucket_mb", "prefetch_distance": "prefetch", "regather": "reshard"}
_GATHERING = ("prefetch", "reshard", "buffer_pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate(Directive):
    """Keep equal parameters on all replicas: reduce their gradients once per step, or per microbatch.

    rewrite: B(all microbatches) -> update
          -> B(all microbatches) -> all-reduce -> update                               (ZeRO 0)
          -> B(all microbatches) -> reduce-scatter -> update of a shard -> all-gather  (shard_optimizer)
          -> B -> reduce-scatter -> update of a shard -> all-gather                    (shard_grads)
          -> all-gather -> F;  all-gather -> B -> reduce-scatter -> update of a shard  (shard_params)

    Args:
        filter: whose parameters.
        devices: the reference's device list; it must be that of the stages (checked when the file is read).
        axis: the mesh axis of the replicas.
        shard_optimizer, shard_grads, shard_params: ZeRO 1, 2, 3; each includes those before it.
        shard_ranks: over how many ranks the state is cut (HSDP); None: all replicas.
        bucket_mb: most 2^20 bytes of gradients in one bucket; None: one bucket per stage.
        reduce: "step": once, after the last microbatch; "microbatch": each on its own.
        prefetch, reshard, buffer_pool: of parameter gathers (`piper.graph.facts.Replication`).
        reduce_stream, gather_stream: names of streams.
        reduce_dtype: in which gradients travel; None: as the job's `strategy` section says, else fp32.
    """

    op: ClassVar[str] = "replicate"
    keys: ClassVar[tuple[str, ...]] = (
        "filter", "devices", "device", "axis", *_FLAGS, "shard_ranks", "bucket_mb", "reduce", "prefetch",
        "reshard", "buffer_pool", "reduce_stream", "gather_stream", "reduce_dtype", *_ALIASES,
    )  # fmt: skip

    filter: Filter
    devices: tuple[int, ...] | None = None
    axis: str = "dp"
    shard_optimizer: bool = False
    shard_grads: bool = False
    shard_params: bool = False
    shard_ranks: int | None = None
    bucket_mb: int | None = None
    reduce: str = "step"
    prefetch: int | None = None
    reshard: bool = True
    buffer_pool: int | None = None
    reduce_stream: str = "dp"
    gather_stream: str = "dp"
    reduce_dtype: str | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "replicate", "filter": {"PP": "*"}, "shard_optimizer": true}`."""
        if "stream" in entry:
            raise StrategyError(
                where=where, field="replicate.stream", value=entry["stream"],
                rule="is not a field of replicate", fix="write reduce_stream or gather_stream",
            )  # fmt: skip
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        stated = _without_aliases(entry, where=where)
        fields: dict[str, Any] = {
            name: reader(stated[name], where=where, name=f"replicate.{_written(entry, name)}")
            for name, reader in _READERS.items()
            if name in stated
        }
        found = cls(
            filter=read_filter(entry, where=where, op=cls.op),
            devices=read_devices(entry, where=where, op=cls.op),
            where=where,
            **fields,
        )
        _check_together(found, fields, where=where)
        return found

    @property
    def zero(self) -> int:
        """Return the ZeRO level."""
        return 3 if self.shard_params else 2 if self.shard_grads else int(self.shard_optimizer)

    def apply(self, graph: Graph) -> Graph:
        """State the replication of the matched segments."""
        self._require_narrow(graph)
        parts: dict[int | None, list[int]] = {}
        for segment in claimed(graph, self.filter, where=self.where, op=self.op):
            ranks = self._shard_ranks(graph, graph.stage_of_segment[segment])
            parts.setdefault(ranks, []).append(segment)
        for ranks, segments in parts.items():
            fact = self._fact(tuple(segments), ranks)
            graph = state(graph, "replications", fact, op=self.op, value=self.filter.source)
        return graph

    def _require_narrow(self, graph: Graph) -> None:
        """Raise where gradients would travel in wider numbers than they are summed in."""
        summed = graph.state_dtypes.gradient
        if self.reduce_dtype is not None and DTYPE_BYTES[self.reduce_dtype] > DTYPE_BYTES[summed]:
            raise StrategyError(
                where=self.where, field="replicate.reduce_dtype", value=self.reduce_dtype,
                rule=f"is wider than {summed}, in which gradients are summed (gradient_dtype)",
                fix="leave it out, or set strategy.gradient_dtype=fp32",
            )  # fmt: skip

    def _shard_ranks(self, graph: Graph, stage: int) -> int | None:
        """Return over how many ranks the state of a stage is cut; None: over all its replicas."""
        replicas = graph.axis_size("dp", stage=stage) * graph.axis_size("cp", stage=stage)
        own = graph.stage_mesh(stage)
        stated = self.shard_ranks if own is None or own.shard_ranks is None else own.shard_ranks
        if not self.zero or stated in {None, replicas}:
            return None
        if replicas % stated:
            raise StrategyError(
                where=self.where, field="replicate.shard_ranks", value=stated,
                rule=f"does not divide the {replicas} replicas (dp x cp)"
                + ("" if own is None else f" of stage {stage}"),
                fix=f"use a divisor of {replicas}"
                + ("" if own is None else ", or leave it out and let meshes say dp_shard"),
            )  # fmt: skip
        return stated

    def _fact(self, segments: tuple[int, ...], shard_ranks: int | None) -> Replication:
        return Replication(
            segments=segments,
            zero=self.zero,
            shard_ranks=shard_ranks,
            bucket_bytes=None if self.bucket_mb is None else self.bucket_mb * BYTES_PER_MB,
            reduce_every=self.reduce,
            prefetch=self.prefetch,
            reshard=self.reshard,
            buffer_pool=self.buffer_pool,
            reduce_stream=self.reduce_stream,
            gather_stream=self.gather_stream,
            reduce_dtype=self.reduce_dtype,
            where=self.where,
        )


def _axis(value: object, *, where: str, name: str) -> str:
    if value != "dp":
        raise StrategyError(
            where=where, field=name, value=value, rule="is not an axis of replicas", fix='write "axis": "dp"'
        )
    return "dp"


def _reduction(value: object, *, where: str, name: str) -> str:
    return read_choice(value, REDUCTIONS, where=where, name=name)


def _dtype(value: object, *, where: str, name: str) -> str:
    return read_choice(value, REDUCE_DTYPES, where=where, name=name)


def _distance(value: object, *, where: str, name: str) -> int:
    return read_whole_number(value, where=where, name=name, least=0)


_READERS: dict[str, Any] = {
    "axis": _axis,
    **dict.fromkeys(_FLAGS, read_flag),
    "shard_ranks": read_whole_number,
    "bucket_mb": read_whole_number,
    "reduce": _reduction,
    "prefetch": _distance,
    "reshard": read_flag,
    "buffer_pool": read_whole_number,
    "reduce_stream": read_name,
    "gather_stream": read_name,
    "reduce_dtype": _dtype,
}


def _without_aliases(entry: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return the fields under our names; raises when a field and its alias differ."""
    stated = {key: value for key, value in entry.items() if key not in _ALIASES}
    for alias, name in _ALIASES.items():
        if alias in entry and stated.setdefault(name, entry[alias]) != entry[alias]:
            raise StrategyError(
                where=where, field=f"replicate.{alias}", value=entry[alias],
                rule=f"contradicts {name} = {stated[name]}, which means the same", fix=f"keep {name}",
            )  # fmt: skip
    return stated


def _written(entry: Mapping[str, Any], name: str) -> str:
    """Return the name under which a field stands in the file."""
    return name if name in entry else next((a for a, n in _ALIASES.items() if n == name and a in entry), name)


def _check_together(found: Replicate, stated: Mapping[str, object], *, where: str) -> None:
    for name in _GATHERING:
        if name in stated and not found.shard_params:
            raise StrategyError(
                where=where, field=f"replicate.{name}", value=stated[name],
                rule="is about gathered parameters, but shard_params is not set",
                fix=f'leave {name} out, or write "shard_params": true',
            )  # fmt: skip
    if found.shard_ranks is not None and not found.zero:
        raise StrategyError(
            where=where, field="replicate.shard_ranks", value=found.shard_ranks,
            rule="cuts no state: none of shard_optimizer, shard_grads and shard_params is set",
            fix='leave it out, or write for example "shard_params": true',
        )  # fmt: skip
