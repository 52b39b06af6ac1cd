"""Buckets: which parameters of a pipeline rank are reduced, cut and updated together (DESIGN 3).

[Note: buckets]
The trained parameters of a stage are divided by what holds for them: dense ones; "sequence" ones, which are
dense with gradients that are partial over tp (`piper.graph.shares`, [Note: partial gradients]); the experts
of each `shard`; and what is offloaded apart from what is not. One bucket for each, parameters in order of
first use, unless
* `bucket_mb` is stated: segments are added, along the model, while the gradients of none of its buckets grow
  beyond it (a segment is never divided);
* parameters are cut (ZeRO-3) or wait on the host (`offload`): one bucket per unit of the cut (a layer).
A parameter that several stages of one pipeline rank use is stored once, with its first stage.

[Note: tied parameters]
A parameter on several pipeline ranks is stored on each. Its gradients are first summed over these (per
replica), once per step, then reduced with their bucket, and every holder makes the same update. Where the
stage's gradients are cut or reduced per microbatch, such parameters have a bucket of their own that is
reduced once per step, with at most the optimizer state cut (ZeRO-1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from cost_models.ops import DTYPE_BYTES
from piper.errors import StrategyError
from piper.graph.cut import units_of
from piper.graph.facts import ExpertSharding, Offloading, Replication
from piper.graph.graph import Graph
from piper.graph.rank_groups import (
    copies_group,
    expert_copies_group,
    expert_replica_group,
    expert_shard_group,
    on_stream,
    replica_count,
    replica_group,
    shard_group,
)
from piper.graph.shares import Shares
from simulator.plan import NONE, Bucket, Group, TaskKind

ALIGNMENT_ELEMENTS = 8
"""A sharded bucket is padded to a multiple of this x shard count (DESIGN 3)."""
CUT_GRADIENTS, CUT_PARAMETERS = 2, 3
"""ZeRO levels from which gradients, and parameters, are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How a bucket is reduced.

    Args:
        bucket: its `group` is not numbered yet.
        rule: the replication of its parameters.
        shards: ranks over which the state is cut; None: it is not cut.
        gathering: the same ranks, on the stream of gathers.
        copies: ranks that hold the same shard, and are summed over after it; None: there are none.
        everyone: all ranks with a part of the gradient, when the state is not cut; None: one rank.
    """

    bucket: Bucket
    rule: Replication
    shards: Group | None
    gathering: Group | None
    copies: Group | None
    everyone: Group | None

    @property
    def per_microbatch(self) -> bool:
        """Return whether it is reduced after every backward."""
        return self.bucket.zero >= CUT_GRADIENTS or self.rule.reduce_every == "microbatch"

    @property
    def group(self) -> Group | None:
        """Return the first group that it is reduced over."""
        return self.shards or self.everyone


@dataclass(frozen=True, slots=True)
class _Key:
    """What the parameters of one bucket have in common."""

    stage: int
    rule: Replication
    kind: str
    expert: ExpertSharding | None
    tied: bool
    chunk: int
    offloaded: tuple[str, ...]


def padded(numel: int, shard_count: int) -> int:
    """Return `numel` padded up to a multiple of 8 x shard count; unchanged for one shard (DESIGN 3)."""
    if shard_count == 1:
        return numel
    unit = ALIGNMENT_ELEMENTS * shard_count
    return -(-numel // unit) * unit


def rule_of(graph: Graph, bucket: Bucket) -> Replication:
    """Return the replication of a bucket's parameters; that of one replica where none is stated."""
    wanted = set(bucket.parameters)
    for segment in graph.segments_of_stage(bucket.stage):
        if not wanted.isdisjoint(graph.model.segments[segment].parameters):
            for fact in graph.replications:
                if segment in fact.segments:
                    return fact
    return Replication(segments=())


def offloading_of(graph: Graph, bucket: Bucket, what: str) -> Offloading | None:
    """Return the fact that leaves the optimizer state or the parameters of a bucket to the host, or None."""
    facts = [fact for fact in graph.offloadings if fact.what == what]
    wanted = set(bucket.parameters)
    for segment in graph.segments_of_stage(bucket.stage) if facts else ():
        if not wanted.isdisjoint(graph.model.segments[segment].parameters):
            return next((fact for fact in facts if segment in fact.segments), None)
    return None


@dataclass(frozen=True, kw_only=True)
class BucketPlanner:
    """Buckets of all pipeline ranks.

    Args:
        graph: placed, with the facts of all directives.
    """

    graph: Graph

    def reductions(self, pipeline_rank: int) -> tuple[Reduction, ...]:
        """Return the buckets of a pipeline rank, stage by stage along the model."""
        keys: dict[_Key, list[str]] = {}
        seen: set[str] = set()
        for stage in self.graph.stages_of_rank(pipeline_rank):
            for segment in self.graph.segments_of_stage(stage):
                for name in self._new(segment, seen):
                    keys.setdefault(self._key(stage, segment, name), []).append(name)
        return tuple(self._reduction(pipeline_rank, key, keys) for key in keys)

    @cached_property
    def divided(self) -> Mapping[TaskKind, tuple[int, ...]]:
        """Return, per pass (F, B) and segment, a number that changes where a bucket ends its tasks.

        F and B where parameters are fetched before use, or where gathers after an update overlap with the
        next forward; B alone where only `bucket_mb` is stated, so that reductions overlap.
        """
        rules = self.graph.replications
        if not self._fetched and not any(rule.bucket_bytes is not None for rule in rules):
            nothing = (0,) * len(self.graph.stage_of_segment)
            return {TaskKind.F: nothing, TaskKind.B: nothing}
        apart = frozenset(range(len(self.chunks))) if self.graph.gathers_overlap else self._fetched
        forward = tuple(chunk if i in apart else 0 for i, chunk in enumerate(self.chunks))
        return {TaskKind.F: forward, TaskKind.B: self.chunks}

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Return, per segment, a number that changes where buckets of its stage end."""
        found: list[int] = []
        sizes: dict[object, int] = {}
        for segment, stage in enumerate(self.graph.stage_of_segment):
            if segment == 0 or stage != self.graph.stage_of_segment[segment - 1]:
                found.append(0)
                sizes = self._grown({}, segment)
                continue
            more = self._grown(sizes, segment)
            new = self._separate(segment, more)
            sizes = self._grown({}, segment) if new else more
            found.append(found[-1] + new)
        return tuple(found)

    def _separate(self, segment: int, sizes: Mapping[object, int]) -> bool:
        """Return whether a segment begins a new bucket, which would grow to `sizes` otherwise."""
        rule = self.segment_rule(segment)
        if rule.bucket_bytes is not None:
            return max(sizes.values(), default=0) > rule.bucket_bytes
        units = self._units
        return segment in self._fetched and units[segment] != units[segment - 1]

    @cached_property
    def _fetched(self) -> frozenset[int]:
        """Return the segments whose parameters are gathered (ZeRO-3) or reloaded before they are used."""
        cut = (rule.segments for rule in self.graph.replications if rule.zero >= CUT_PARAMETERS)
        away = (fact.segments for fact in self.graph.offloadings if fact.what == "params")
        return frozenset(i for segments in (*cut, *away) for i in segments)

    def _grown(self, sizes: Mapping[object, int], segment: int) -> dict[object, int]:
        found, element = dict(sizes), DTYPE_BYTES[self.graph.state_dtypes.gradient]
        for name in self.graph.model.segments[segment].parameters:
            if name in self._trained:
                kind = self._kind(name)
                found[kind] = found.get(kind, 0) + self._shares.local_numel((name,)) * element
        return found

    def segment_rule(self, segment: int) -> Replication:
        """Return the replication of a segment's parameters; that of one replica where none is stated."""
        if segment in self._rules:
            return self._rules[segment]
        stage = self.graph.stage_of_segment[segment]
        rank = self.graph.pipeline_rank_of_stage[stage]
        replicas = replica_count(self.graph, rank)
        if replicas > 1:
            raise StrategyError(
                where=next((fact.where for fact in self.graph.replications), "strategy"),
                field="replicate.filter", value=f"stage {stage}",
                rule=f"is on {replicas} replicas, but no replicate claims it",
                fix='add {"op": "replicate", "filter": {"PP": "*"}}',
            )  # fmt: skip
        return Replication(segments=())

    def _new(self, segment: int, seen: set[str]) -> Iterable[str]:
        used = self.graph.model.segments[segment].parameters
        names = [name for name in used if name in self._trained and name not in seen]
        seen.update(names)
        return names

    def _key(self, stage: int, segment: int, name: str) -> _Key:
        rule = self._without_segments(self.segment_rule(segment))
        apart = rule.zero >= CUT_GRADIENTS or rule.reduce_every == "microbatch"
        expert = self._shares.expert_of[segment] if self._shares.is_expert(name) else None
        return _Key(
            stage=stage,
            rule=rule,
            kind=self._kind(name),
            expert=None if expert is None else replace(expert, segments=()),
            tied=apart and name in self.tied,
            chunk=self.chunks[segment],
            offloaded=tuple(
                fact.what
                for fact in self.graph.offloadings
                if fact.what != "activations" and segment in fact.segments
            ),
        )

    def _without_segments(self, rule: Replication) -> Replication:
        """Return a rule as one of any segments; those of one rule share it."""
        found = self._wide_rules.get(id(rule))
        if found is None or found[0] is not rule:
            found = self._wide_rules[id(rule)] = (rule, replace(rule, segments=()))
        return found[1]

    @cached_property
    def _wide_rules(self) -> dict[int, tuple[Replication, Replication]]:
        return {}

    def _kind(self, name: str) -> str:
        if self._shares.is_expert(name):
            return "expert"
        return "sequence" if self._shares.is_partial(name) else "dense"

    @cached_property
    def tied(self) -> Mapping[str, tuple[int, ...]]:
        """Return the pipeline ranks of each trained parameter that several of them use."""
        homes: dict[str, set[int]] = {}
        for number, segment in enumerate(self.graph.model.segments):
            ranks = self.graph.pipeline_ranks_of_stage[self.graph.stage_of_segment[number]]
            for name in segment.parameters:
                if name in self._trained:
                    homes.setdefault(name, set()).update(ranks)
        return {name: tuple(sorted(ranks)) for name, ranks in homes.items() if len(ranks) > 1}

    def _reduction(self, rank: int, key: _Key, keys: Mapping[_Key, Sequence[str]]) -> Reduction:
        names = keys[key]
        zero = min(key.rule.zero, 1) if key.tied else key.rule.zero
        rule = replace(key.rule, reduce_every="step") if key.tied else key.rule
        found = self._groups(rank, replace(key, rule=replace(rule, zero=zero)))
        shards, copies, everyone = (
            None if group is None else on_stream(group, rule.reduce_stream) for group in found
        )
        count = 1 if shards is None else shards.size
        numel = self._shares.local_numel(names)
        bucket = Bucket(
            name=_name(key, keys), stage=key.stage, kind=key.kind, parameters=tuple(names), numel=numel,
            padded_numel=padded(numel, count), shard_count=count,
            group=NONE if (shards or everyone) is None else 0, zero=zero,
        )  # fmt: skip
        return Reduction(
            bucket=bucket,
            rule=rule,
            shards=shards,
            gathering=None if found[0] is None else on_stream(found[0], rule.gather_stream),
            copies=copies,
            everyone=everyone,
        )

    def _groups(self, rank: int, key: _Key) -> tuple[Group | None, Group | None, Group | None]:
        """Return the groups (shards, copies, everyone) of one bucket."""
        shards = key.rule.shard_ranks if key.rule.zero else 1
        alike = (rank, shards, key.expert, key.kind == "sequence")
        if alike not in self._known:
            self._known[alike] = self._new_groups(rank, key)
        return self._known[alike]

    @cached_property
    def _known(self) -> dict[object, tuple[Group | None, Group | None, Group | None]]:
        return {}

    def _new_groups(self, rank: int, key: _Key) -> tuple[Group | None, Group | None, Group | None]:
        replicas = replica_count(self.graph, rank)
        wanted = (key.rule.shard_ranks or replicas) if key.rule.zero else 1
        if key.expert is not None:
            whole = expert_replica_group(self.graph, rank, key.expert)
            shards = gcd(wanted, whole.size)
            if shards == 1:
                return None, None, _several(whole)
            cut = expert_shard_group(self.graph, rank, key.expert, shards=shards)
            copies = expert_copies_group(self.graph, rank, key.expert, shards=shards)
            return cut, _several(copies), None
        partial = key.kind == "sequence"
        if wanted == 1:
            return None, None, _several(replica_group(self.graph, rank, partial=partial))
        cut = shard_group(self.graph, rank, shards=wanted)
        return cut, _several(copies_group(self.graph, rank, shards=wanted, partial=partial)), None

    @cached_property
    def _rules(self) -> Mapping[int, Replication]:
        return {i: fact for fact in self.graph.replications for i in fact.segments}

    @cached_property
    def _shares(self) -> Shares:
        return Shares(graph=self.graph)

    @cached_property
    def _trained(self) -> Mapping[str, int]:
        return self.graph.model.trained_numel

    @cached_property
    def _units(self) -> tuple[int, ...]:
        return units_of(self.graph.model).of_segment


def _several(group: Group) -> Group | None:
    return group if group.size > 1 else None


def _name(key: _Key, keys: Mapping[_Key, object]) -> str:
    """Return the name of a bucket: kind and stage, and a number where the stage has several such."""
    alike = [other for other in keys if (other.stage, other.kind) == (key.stage, key.kind)]
    suffix = f"n{alike.index(key)}" if len(alike) > 1 else ""
    return f"{key.kind}{key.stage}{suffix}"
