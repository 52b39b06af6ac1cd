"""Clauses and a plan -> `Disturbance`: what is different about each rank, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cost_models.errors import InputError
from simulator.jitter.draws import CHANCE_BITS, lognormal_factors, no_factors
from simulator.jitter.spec import (
    NS_PER_MS,
    WHERE,
    Clause,
    Hiccup,
    Link,
    Noise,
    On,
    Per,
    SlowNode,
    Span,
    Straggler,
    written,
)
from simulator.plan import Plan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Disturbance:
    """What each rank of a job does not do as planned.

    Args:
        node: int64 [ranks].
        compute_factor: float64 [ranks], by which all computation is longer.
        network_factor: float64 [ranks], by which what it sends or receives over the network is longer.
        noisy: bool [ranks], whether its computation takes factors of `compute_noise`.
        hiccup_chance: int64 [ranks], of 2^53: how probable a hiccup is in a computation.
        hiccup_ns: int64 [ranks], how long one is.
        draw: int64 [ranks], lowest of the ranks that draw together.
        compute_noise, communication_noise: float64 [2^16], factors of mean 1; [0]: no noise.
    """

    node: Ints
    compute_factor: Floats
    network_factor: Floats
    noisy: npt.NDArray[np.bool_]
    hiccup_chance: Ints
    hiccup_ns: Ints
    draw: Ints
    compute_noise: Floats
    communication_noise: Floats

    @property
    def is_random(self) -> bool:
        """Tell whether anything is drawn."""
        return bool(self.noisy.any() or self.hiccup_chance.any() or len(self.communication_noise))

    @property
    def is_healthy(self) -> npt.NDArray[np.bool_]:
        """Return which ranks have nothing of their own that `healed` could mend, bool [ranks]."""
        slow = (self.compute_factor != 1.0) | (self.network_factor != 1.0)
        healthy: npt.NDArray[np.bool_] = ~(slow | self.noisy | (self.hiccup_chance > 0))
        return healthy

    def healed(self, ranks: Sequence[int]) -> Disturbance:
        """Return the same job with `ranks` as planned: no factors, no noise of theirs, no hiccups."""
        chosen = np.zeros(len(self.node), dtype=np.bool_)
        chosen[list(ranks)] = True
        return replace(
            self,
            compute_factor=np.where(chosen, 1.0, self.compute_factor),
            network_factor=np.where(chosen, 1.0, self.network_factor),
            noisy=self.noisy & ~chosen,
            hiccup_chance=np.where(chosen, 0, self.hiccup_chance),
            hiccup_ns=np.where(chosen, 0, self.hiccup_ns),
        )


def resolve(clauses: Sequence[Clause], plan: Plan, *, gpus_per_node: int) -> Disturbance:
    """Return what the clauses mean for the ranks of `plan`, `gpus_per_node` to a node, in order.

    Raises: InputError for a rank or node that the job lacks, and for two hiccups of one rank.
    """
    ranks = plan.num_ranks
    node = np.arange(ranks) // gpus_per_node
    compute, network = np.ones(ranks), np.ones(ranks)
    chance, hiccup_ns = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    noise = {On.COMPUTE: no_factors(), On.COMMUNICATION: no_factors()}
    per = Per.GROUP
    for clause in clauses:
        chosen = named_ranks(clause, node)
        match clause:
            case Straggler() | SlowNode():
                compute[chosen] *= clause.factor
            case Link():
                network[chosen] = np.maximum(network[chosen], 1 / clause.factor)
            case Noise():
                table = lognormal_factors(clause.sigma)
                noise |= {on: table for on in noise if clause.on in (on, On.ALL)}
                per = clause.per if clause.per == Per.RANK else per
            case Hiccup():
                _require_first_hiccup(clause, chance[chosen])
                chance[chosen] = max(1, round(clause.probability * 2**CHANCE_BITS))
                hiccup_ns[chosen] = max(1, round(clause.ms * NS_PER_MS))
                per = clause.per if clause.per == Per.RANK else per
    return Disturbance(
        node=node,
        compute_factor=compute,
        network_factor=network,
        noisy=np.full(ranks, len(noise[On.COMPUTE]) > 0),
        hiccup_chance=chance,
        hiccup_ns=hiccup_ns,
        draw=np.arange(ranks) if per == Per.RANK else tensor_parallel_groups(plan),
        compute_noise=noise[On.COMPUTE],
        communication_noise=noise[On.COMMUNICATION],
    )


def tensor_parallel_groups(plan: Plan) -> Ints:
    """Return, by rank, the lowest rank of its tensor-parallel group, int64 [ranks]."""
    found = np.empty(plan.num_ranks, dtype=np.int64)
    single = len(plan.device_plans) == 1
    for device in plan.device_plans:
        here = np.array(range(len(found)) if single else plan.mesh.ranks(pp=device.pipeline_rank))
        mesh = device.mesh or plan.mesh
        sizes = [(name, size) for name, size in mesh.axes if name != "pp"]
        place, stride = np.arange(len(here)), 1
        first = place.copy()
        for name, size in sizes:
            if name == "tp":
                first = place - place // stride % size * stride
            stride *= size
        found[here] = here[first]
    return found


def named_ranks(clause: Clause, node: Ints) -> Ints:
    """Return the ranks that a clause is about, rising: all of them where it names none.

    Args:
        clause: of a jitter.
        node: int64 [ranks].
    Raises: InputError for a rank or node that the job lacks.
    """
    rank_span: Span | None = getattr(clause, "rank", None)
    node_span: Span | None = getattr(clause, "node", None)
    if rank_span is not None:
        return _inside(clause, "rank", rank_span, np.arange(len(node)))
    if node_span is not None:
        return _inside(clause, "node", node_span, node)
    return np.arange(len(node))


def _inside(clause: Clause, name: str, span: Span, number: Ints) -> Ints:  # noqa: PLR0917
    last = int(number.max())
    if span.last > last:
        raise InputError(
            where=WHERE,
            field=f"{clause.kind}.{name}",
            value=str(span),
            rule=f"must be in 0..{last}: the job has {last + 1} {name}{'s' if last else ''}",
            fix=f"name a {name} of the job",
        )
    return np.flatnonzero((number >= span.first) & (number <= span.last))


def _require_first_hiccup(clause: Hiccup, before: Ints) -> None:
    if before.any():
        raise InputError(
            where=WHERE,
            field="hiccup",
            value=written(clause),
            rule="is given for a rank that has a hiccup already",
            fix="name other ranks, or leave one of them out",
        )
