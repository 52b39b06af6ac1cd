"""Summary: plan, timeline and prices -> the keys of the `piper simulate --json` result that they decide."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.errors import CostModelError, check_invariant, nearest
from cost_models.price import CostModel
from simulator.conventions import CONVENTIONS, DEFAULT, model_flops_per_token
from simulator.distinct import distinct_rows
from simulator.memory import Peak, owners_at, peak_of, reserved_peak_bytes
from simulator.plan import (
    COLLECTIVE_KINDS,
    NONE,
    RECV_KINDS,
    SEND_KINDS,
    DevicePlan,
    Plan,
    TaskKind,
)
from simulator.pricing import PROVENANCES
from simulator.repetition import Repetition
from simulator.timeline.attribution import BUSY, Label, attribute
from simulator.timeline.timeline import RankTrack, Timeline
from simulator.workload import Workload, build_workload

PAIR = 2
MOST_OWNERS = 10
"""Largest buffers at a rank's peak that are named."""
MEASURED_BASIS = (
    "of the published runs with this stack, predicted with parameters fitted to other runs, 80 % were off by "
    "at most {error:.1%} (docs/accuracy.md)"
)
BAND_BASIS = (
    "the prices of all tasks, each at the low (high) end of its band, over their sum: this ratio, averaged "
    "over ranks, scales the step time; compute and communication are taken to be off in the same direction"
)


def summarize(
    plan: Plan,
    timeline: Timeline,
    cost_model: CostModel,
    *,
    workload: Workload | None = None,
    convention: str = DEFAULT,
    repetition: Repetition | None = None,
) -> dict[str, Any]:
    """Return the result of a simulated timeline (CONTRACT, `piper simulate --json`).

    Args:
        plan, timeline, cost_model: what was simulated, what came out, and what priced it.
        workload: `build_workload(plan, cost_model)` if the caller has it already.
        convention: how model FLOPs are counted.
        repetition: a part of the timeline that the job does more often than the plan: the result is that of
            the job.

    Left to the caller: schema_version, cluster, stack, defaults, timings_s.
    Raises: CostModelError if the cost model has no peak for the compute dtype; InternalError for a broken
        number (NaN, a negative time, more FLOPs than the devices can do).
    """
    work = build_workload(plan, cost_model) if workload is None else workload
    run = _Run(plan=plan, timeline=timeline, repetition=repetition)
    peaks = [peak_of(track) for track in timeline.tracks]
    result: dict[str, Any] = {
        "model": plan.model.name,
        "n_parameters": plan.model.n_parameters,
        "n_gpus": plan.num_ranks,
        "strategy": {"shorthand": plan.strategy, "directives": list(plan.directives)},
        "schedule": plan.schedule,
    }
    result |= _speed(run, cost_model, convention=convention)
    result |= _memory(plan, timeline, cost_model, peaks=peaks)
    result |= _breakdown(run)
    result["ranks"] = _ranks(run, peaks=peaks)
    result["error_band"] = _error_band(run, work, step_error=cost_model.step_error)
    result["provenance"] = _provenance(run, work)
    result["warnings"] = [*plan.notices, *timeline.warnings, *_warnings(result)]
    _require_sound(plan, result, executed_flops=_flops(run), cost_model=cost_model)
    return result


class _Run:
    """A simulated run with all that is repeated in it [Note: steady state]."""

    def __init__(self, *, plan: Plan, timeline: Timeline, repetition: Repetition | None) -> None:
        self.plan, self.timeline, self.repetition = plan, timeline, repetition
        self.tokens_per_step = plan.training.tokens_per_step
        self.step_ns, self.makespan_ns = timeline.step_time_ns, timeline.makespan_ns
        self.attribution = attribute(plan, timeline)
        self.copies: npt.NDArray[np.int64] | None = None
        if repetition is not None:
            ends_ns = repetition.step_ends_ns(timeline.step_end_ns)
            self.tokens_per_step = repetition.tokens_per_step
            self.step_ns += repetition.inserted_ns
            self.makespan_ns = int(ends_ns[-1])
            self.attribution = self.attribution.with_copies(repetition.attribution, times=repetition.times)
            self.copies = repetition.copies

    @property
    def step_s(self) -> float:
        return self.step_ns / 1e9

    def counts(self, rows: npt.NDArray[np.int64], *, of: npt.NDArray[np.bool_], most: int) -> list[int]:
        """Return how often each row occurs among some tasks, counting their copies."""
        weights = None if self.copies is None else self.copies[of]
        return [int(count) for count in np.bincount(rows[of], weights=weights, minlength=most)]

    def time_ns(self, time_ns: int) -> int:
        """Return when something happens that the timeline shows at `time_ns`."""
        return time_ns if self.repetition is None else self.repetition.moved_ns(time_ns)


def _speed(run: _Run, cost_model: CostModel, *, convention: str) -> dict[str, Any]:
    plan, tokens, ranks, step_s = run.plan, run.tokens_per_step, run.plan.num_ranks, run.step_s
    per_token = model_flops_per_token(plan.model, seq_len=plan.training.seq_len, convention=convention)
    flops, counting = tokens * per_token, CONVENTIONS[convention]
    available_flops = step_s * ranks * _peak_flops_per_s(plan, cost_model)
    recomputed = 0 if counting.with_recompute else _recomputed_flops(run, whole=counting.whole_scores)
    return {
        "step_time_s": step_s,
        "makespan_s": run.makespan_ns / 1e9,
        "tokens_per_s": _ratio(tokens, step_s),
        "tokens_per_s_per_gpu": _ratio(tokens, step_s * ranks),
        "model_flops_per_step": flops,
        "tflops_per_gpu": _ratio(flops, step_s * ranks) / 1e12,
        "mfu": _ratio(flops, available_flops) if cost_model.peak_flops_per_s else None,
        "hfu": _ratio(flops + recomputed, available_flops) if cost_model.peak_flops_per_s else None,
        "mfu_convention": convention,
    }


def _peak_flops_per_s(plan: Plan, cost_model: CostModel) -> float:
    """Return the peak of the compute dtype; 0 for a cost model without hardware, which has no MFU."""
    peaks, dtype = cost_model.peak_flops_per_s, plan.training.dtype
    if not peaks:
        return 0.0
    if dtype not in peaks:
        raise CostModelError(
            where=cost_model.name,
            field="peak_flops_per_s",
            value=dtype,
            rule="has no datasheet peak on this device",
            fix=nearest(dtype, peaks),
        )
    return peaks[dtype]


def _flops(run: _Run) -> int:
    """Return the FLOPs that all ranks execute in a step."""
    return _sum_of_works(run, [work.flops for work in run.plan.works], recompute_only=False)


def _recomputed_flops(run: _Run, *, whole: bool) -> int:
    """Return the FLOPs of all recompute tasks; `whole`: with all scores of causal attention."""
    by_work = [
        sum(op.flops * op.count * (2 if whole and op.causal else 1) for op in work.operations)
        for work in run.plan.works
    ]
    return _sum_of_works(run, by_work, recompute_only=True)


def _sum_of_works(run: _Run, by_work: list[int], *, recompute_only: bool) -> int:
    tables = [device.tasks for device in run.plan.device_plans]
    work, kind = (np.concatenate([getattr(table, name) for table in tables]) for name in ("work", "kind"))
    counted = (work != NONE) & ((kind == TaskKind.R) | (not recompute_only))
    times = run.counts(work, of=counted, most=len(by_work))
    return sum(flops * n for flops, n in zip(by_work, times, strict=True)) * run.plan.replicas


def _memory(plan: Plan, timeline: Timeline, cost_model: CostModel, *, peaks: list[Peak]) -> dict[str, Any]:
    """Return peaks of the worst rank, and whether it fits (reserved + context + communicators)."""
    devices = {device.pipeline_rank: device for device in plan.device_plans}
    needed, reserved, communicators = 0, 0, 0
    for track in timeline.tracks:
        device = devices[track.pipeline_rank]
        shape = (-1, len(device.tasks))
        start, end = track.start_ns.reshape(shape), track.end_ns.reshape(shape)
        buffers = _communicator_bytes(plan, device, cost_model)
        left = cost_model.device_memory_bytes - cost_model.context_bytes - buffers
        here = reserved_peak_bytes(
            device, start_ns=start, end_ns=end,
            expandable_segments=cost_model.expandable_segments, capacity_bytes=left,
        )  # fmt: skip
        reserved, communicators = max(reserved, here), max(communicators, buffers)
        needed = max(needed, here + buffers + cost_model.context_bytes)
    return {
        "peak_memory_bytes": max(peak.total_bytes for peak in peaks),
        "peak_reserved_bytes": reserved,
        "context_bytes": cost_model.context_bytes,
        "communicator_bytes": communicators,
        "needed_memory_bytes": needed,
        "device_memory_bytes": cost_model.device_memory_bytes,
        "fits": needed <= cost_model.device_memory_bytes,
        "expandable_segments": cost_model.expandable_segments,
    }


def _communicator_bytes(plan: Plan, device: DevicePlan, cost_model: CostModel) -> int:
    """Return what the communicators of a rank take: one per set of ranks, or peer, on each stream.

    Two streams never share one, since its operations run in one order; groups with the same ranks do.
    """
    table = device.tasks
    transfers = np.isin(table.kind, np.array(sorted(SEND_KINDS | RECV_KINDS)))
    pairs = len(distinct_rows([table.stream[transfers], table.peer[transfers]])[0])
    collectives = np.flatnonzero(np.isin(table.kind, np.array(sorted(COLLECTIVE_KINDS))))
    first, _ = distinct_rows([table.stream[collectives], table.group[collectives]])
    rows = zip(
        table.stream[collectives[first]].tolist(), table.group[collectives[first]].tolist(), strict=True
    )
    sets = {(stream, plan.groups[group].members) for stream, group in rows}
    in_groups = sum(cost_model.communicator_bytes(len(members[0])) for _, members in sets)
    return in_groups + pairs * cost_model.communicator_bytes(PAIR)


def _breakdown(run: _Run) -> dict[str, Any]:
    step_s, attribution = run.step_s, run.attribution
    idle = [label for label in Label if label not in BUSY]
    return {
        "bubble_fraction": _ratio(attribution.mean_s(Label.BUBBLE), step_s),
        "idle_fraction": _ratio(attribution.mean_s(*idle), step_s),
        "breakdown_s": attribution.breakdown_s(),
        "bubble_s": attribution.bubble_s(),
    }


def _ranks(run: _Run, *, peaks: list[Peak]) -> list[dict[str, Any]]:
    devices = {device.pipeline_rank: device for device in run.plan.device_plans}

    def row(track: RankTrack, busy_ns: int, peak: Peak) -> dict[str, Any]:
        return {
            "pipeline_rank": track.pipeline_rank,
            "n_devices": track.n_devices,
            "stages": list(track.stages),
            "busy_s": busy_ns / 1e9,
            "peak_memory_bytes": peak.total_bytes,
            "peak_at_s": run.time_ns(peak.time_ns) / 1e9,
            "memory_by_class_bytes": peak.by_name(),
            "peak_owners": [
                {"owner": owner, "bytes": size}
                for owner, size in owners_at(devices[track.pipeline_rank], track, time_ns=peak.time_ns)[
                    :MOST_OWNERS
                ]
            ],
        }

    busy_ns = run.attribution.busy_ns().tolist()
    return [row(*columns) for columns in zip(run.timeline.tracks, busy_ns, peaks, strict=True)]


def _error_band(run: _Run, workload: Workload, *, step_error: float | None) -> dict[str, Any]:
    if step_error is not None:
        low_s, high_s = run.step_s / (1 + step_error), run.step_s / (1 - step_error)
        basis = MEASURED_BASIS.format(error=step_error)
        return {"step_time_low_s": low_s, "step_time_high_s": high_s, "basis": basis}
    prices, counts = workload.prices, _counts(run, workload)
    seconds = math.fsum(prices.seconds * counts)
    low = _ratio(math.fsum(prices.low_s * counts), seconds) if seconds else 1.0
    high = _ratio(math.fsum(prices.high_s * counts), seconds) if seconds else 1.0
    step_s = run.step_s
    return {"step_time_low_s": step_s * low, "step_time_high_s": step_s * high, "basis": BAND_BASIS}


def _provenance(run: _Run, workload: Workload) -> dict[str, float]:
    by_name = (workload.prices.provenance_s * _counts(run, workload)[:, None]).sum(axis=0)
    total = float(by_name.sum())
    return {name.value: _ratio(float(s), total) for name, s in zip(PROVENANCES, by_name, strict=True)}


def _counts(run: _Run, workload: Workload) -> npt.NDArray[np.int64]:
    """Return how many tasks have each price, int64 [prices]."""
    most = len(workload.prices.seconds)
    return np.array(run.counts(workload.price, of=workload.price != NONE, most=most), dtype=np.int64)


def _warnings(result: dict[str, Any]) -> list[str]:
    found = []
    if not result["fits"]:
        needed, have = result["needed_memory_bytes"], result["device_memory_bytes"]
        found.append(
            f"does not fit: {needed / 2**30:.1f} GiB reserved with driver context and communicators, "
            f"{have / 2**30:.1f} GiB usable per device"
        )
    if result["mfu"] is not None and result["mfu"] > 1:
        found.append(
            f"MFU above 1: the {result['mfu_convention']} convention counts work that the devices do not do, "
            "such as the half of the score matrix that causal attention leaves out"
        )
    return found


def _ratio(part: float, whole: float) -> float:
    """Return part / whole, 0 where the whole is 0 (a step that takes no time has no rate)."""
    return part / whole if whole else 0.0


def _require_sound(plan: Plan, result: dict[str, Any], *, executed_flops: int, cost_model: CostModel) -> None:
    """Refuse broken numbers; they are ours, not the user's."""
    numbers = [value for value in result.values() if isinstance(value, float)]
    numbers += [*result["breakdown_s"].values(), *result["provenance"].values()]
    check_invariant(
        all(math.isfinite(number) and number >= 0 for number in numbers), f"broken number in {result}"
    )
    parts = math.fsum(result["breakdown_s"].values())
    step_s = result["step_time_s"]
    check_invariant(abs(parts - step_s) <= 1e-9 * step_s, f"breakdown {parts} s of a step of {step_s} s")
    available_flops = step_s * plan.num_ranks * _peak_flops_per_s(plan, cost_model)
    explained = 0 < executed_flops <= available_flops
    check_invariant(result["mfu"] is None or result["mfu"] <= 1 or explained, f"MFU = {result['mfu']} > 1")
    band = result["error_band"]
    inside = band["step_time_low_s"] <= step_s <= band["step_time_high_s"]
    check_invariant(inside, f"step time {step_s} s outside its band {band}")
