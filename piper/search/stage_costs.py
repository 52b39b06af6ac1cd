"""Costs of stages from those of units: a matrix of how many units of each kind a stage has.

[Note: sums of units]
From its input to its output a stage takes the sum over its units. A rank is taken for less: the exchange
before the first kernel of the stage, and that behind its last one, may run while another microbatch computes.
Of the layers of a stage the first `recomputed` are computed again; units that are no layers are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piper.search.order_table import PassTimes
from piper.search.thin import Kinds
from piper.search.unit_costs import B, UnitCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """How many units of each kind every stage has.

    Args:
        counts: units by stage.
        plain, again: float64 [stages, kinds], units that are computed once, and those computed again.
        first, last: int64 [stages], kind of the first and the last unit.
        shared: float64 [stages], elements that two units of a stage share, counted twice.
    """

    counts: tuple[int, ...]
    plain: Floats
    again: Floats
    first: Ints
    last: Ints
    shared: Floats


def cut_of(counts: Sequence[int], kinds: Kinds, *, recomputed: int = 0) -> Cut:
    """Return a cut of a model into stages; `recomputed`: of the layers of each stage."""
    stages = len(counts)
    plain, again = np.zeros((stages, kinds.count)), np.zeros((stages, kinds.count))
    first, last = np.zeros(stages, dtype=np.int64), np.zeros(stages, dtype=np.int64)
    stage_of_unit: list[int] = []
    unit = 0
    for stage, count in enumerate(counts):
        left = recomputed
        listed = kinds.of_unit[unit : unit + count]
        first[stage], last[stage] = listed[0], listed[-1]
        for kind in listed:
            if left and kinds.layers[kind]:
                again[stage, kind] += 1
                left -= 1
            else:
                plain[stage, kind] += 1
        stage_of_unit += [stage] * count
        unit += count
    shared = np.zeros(stages)
    for home, other, numel in kinds.shared:
        if stage_of_unit[home] == stage_of_unit[other]:
            shared[stage_of_unit[home]] += numel
    return Cut(counts=tuple(counts), plain=plain, again=again, first=first, last=last, shared=shared)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Costs of the stages of a cut under n ways of working; ns, float64 [n, 3, stages] or [n, stages].

    Args:
        span_ns, lead_ns, trail_ns, busy_ns, processor_ns, slowed_ns, drain_ns: as in `UnitCosts`.
        kept_bytes, border_bytes: likewise.
        host_ns: that the host takes to launch the tasks of each pass.
        dense, expert: trained elements.
        update_ns, norm_ns: of uncut states.
        least_update_ns, least_norm_ns: as kernels of a whole stage, which begin once, not once per unit.
        transient_bytes: of the unit that needs most.
        sent_bytes: float64 [n], the smallest message to another stage.
        tasks: of F that compute, of a stage.
    """

    span_ns: Floats
    lead_ns: Floats
    trail_ns: Floats
    busy_ns: Floats
    processor_ns: Floats
    slowed_ns: Floats
    drain_ns: Floats
    kept_bytes: Floats
    border_bytes: Floats
    host_ns: Floats
    dense: Floats
    expert: Floats
    update_ns: Floats
    norm_ns: Floats
    least_update_ns: Floats
    least_norm_ns: Floats
    transient_bytes: Floats
    other_bytes: Floats
    sent_bytes: Floats
    tasks: Floats

    @property
    def by_processors(self) -> Floats:
        """Return which part of the kernels of all stages processors bound, float64 [n]."""
        busy = self.busy_ns.sum(axis=(1, 2))
        return np.asarray(self.processor_ns.sum(axis=(1, 2)) / np.maximum(busy, 1.0))

    def times(self, way: int, *, overlaps: bool) -> PassTimes:
        """Return the times of one way of working; `overlaps`: passes may run beside each other."""
        span, busy = self.span_ns[way], self.busy_ns[way]
        if not overlaps:
            busy = busy + self.slowed_ns[way]
            span = np.maximum(span, self.lead_ns[way] + busy)
        return PassTimes(
            span_ns=np.maximum(self.span_ns[way], self.lead_ns[way] + busy)
            if not overlaps
            else self.span_ns[way],
            lead_ns=self.lead_ns[way],
            trail_ns=self.trail_ns[way],
            busy_ns=busy,
            drain_ns=self.drain_ns[way],
        )


def stage_costs(
    cut: Cut, plain: Sequence[UnitCosts], again: Sequence[UnitCosts], *, tp: Sequence[int]
) -> StageCosts:
    """Return the costs of stages; see [Note: sums of units].

    Args:
        cut: of the model.
        plain, again: by way of working, of units that are computed once, and of those computed again.
        tp: by way of working: over how many ranks parameters that units share are cut.
    """
    whole = cut.plain + cut.again

    def added(name: str) -> Floats:
        once, twice = _stack(plain, name), _stack(again, name)
        found: Floats = once @ cut.plain.T + twice @ cut.again.T
        return found

    def state(name: str) -> Floats:
        found: Floats = _stack(plain, name) @ whole.T
        return found

    def joined(name: str) -> Floats:
        each = _stack(plain, name)
        once: Floats = np.where(whole > 0, each[:, None, :], np.inf).min(axis=2)
        return np.asarray((state(name) - np.maximum(whole.sum(axis=1) - 1, 0.0) * once) * counted_once)

    dense = state("dense")
    counted_once = 1.0 - np.divide(
        cut.shared / np.asarray(tp)[:, None], dense, out=np.zeros_like(dense), where=dense > 0
    )
    sent = _stack(plain, "sent_bytes")
    other = _stack(plain, "other_bytes")
    return StageCosts(
        span_ns=added("span_ns"),
        lead_ns=_at_ends(_stack(plain, "lead_ns"), forward=cut.first, backward=cut.last),
        trail_ns=_at_ends(_stack(plain, "trail_ns"), forward=cut.last, backward=cut.first),
        busy_ns=added("busy_ns"),
        processor_ns=added("processor_ns"),
        slowed_ns=added("slowed_ns"),
        drain_ns=added("span_ns")[:, B] - _spared(cut, plain, again),
        kept_bytes=added("kept_bytes"),
        border_bytes=added("border_bytes"),
        host_ns=added("host_ns"),
        dense=dense * counted_once,
        expert=state("expert"),
        update_ns=state("update_ns") * counted_once,
        norm_ns=state("norm_ns") * counted_once,
        least_update_ns=joined("update_ns"),
        least_norm_ns=joined("norm_ns"),
        transient_bytes=np.maximum(
            (_stack(plain, "transient_bytes")[:, None, :] * (cut.plain > 0)).max(axis=2),
            (_stack(again, "transient_bytes")[:, None, :] * (cut.again > 0)).max(axis=2),
        ),
        other_bytes=other.min(axis=1, keepdims=True) + (other - other.min(axis=1, keepdims=True)) @ whole.T,
        sent_bytes=np.where(sent > 0, sent, np.inf).min(axis=1),
        tasks=state("tasks"),
    )


def _stack(costs: Sequence[UnitCosts], name: str) -> Floats:
    return np.asarray(np.stack([getattr(each, name) for each in costs]))


def _at_ends(each: Floats, *, forward: Ints, backward: Ints) -> Floats:
    """Return what stands before or behind the kernels of a stage, of the unit that is there in each pass."""
    return np.asarray(np.stack([each[:, 0, forward], each[:, 1, backward], each[:, 2, backward]], axis=1))


def _spared(cut: Cut, plain: Sequence[UnitCosts], again: Sequence[UnitCosts]) -> Floats:
    """Return what of a stage's B may be done before its gradient arrives: at most that of a unit."""
    found = [
        ((_stack(costs, "span_ns")[:, B] - _stack(costs, "drain_ns"))[:, None, :] * (there > 0)).max(axis=2)
        for costs, there in ((plain, cut.plain), (again, cut.again))
    ]
    return np.asarray(np.maximum(found[0], found[1]))
