"""The fast evaluator: what a step of a cell takes and needs under every way of keeping its states.

[Note: estimates]
The order of the schedule is timed with the costs of its stages (`piper.search.order_table`). Before its first
pass a rank updates, and gathers what was cut; behind its last one it reduces. What ZeRO-3 gathers for every
microbatch is waited for unless it is fetched before. What computes gives up the processors that messages
beside it hold, those that wait included. No links that are shared, no host: a simulation says more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cost_models.ops import DTYPE_BYTES
from piper.search.cells import (
    RECEIVES,
    CellTable,
    Frame,
    first_stages,
    held_by_messages,
    replicas_of,
    waits_for_copies_ns,
)
from piper.search.order_table import OrderTable, PassTimes, order_table
from piper.search.stage_costs import StageCosts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_CUT_GRADIENTS, _CUT_PARAMETERS = 2, 3
_FUSED_PASSES, _SPLIT_PASSES = 2, 3
_MB = 2.0**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimates:
    """Of one cell, by row of the table of keepings of its layout.

    Args:
        step_ns, bound_ns: float64 [rows], estimated, and a lower bound.
        needed_bytes: float64 [rows], of the worst rank, without context and communicators.
        least_bytes: float64 [rows], a lower bound of the same.
    """

    step_ns: Floats
    bound_ns: Floats
    needed_bytes: Floats
    least_bytes: Floats


@dataclass(kw_only=True)
class Estimator:
    """Estimates cells of a table, which must be refined.

    Args:
        table: bounds and costs.
        costs: of passes, for schedules that weigh them.
    """

    table: CellTable
    costs: tuple[tuple[str, object], ...]

    def of(self, cell: int) -> Estimates:
        """Return the estimates of one cell."""
        table = self.table
        frame, costs = table.frames[int(table.frame[cell])], table.costs_of(cell)
        layout = int(table.layout[cell])
        batch = table.global_batch // int(table.space.layouts["dp"][layout])
        number = -(-batch // int(table.space.layouts["micro_batch"][layout]))
        order = order_table(
            table.space.choices.texts("schedule")[frame.schedule],
            pp=frame.pp, vp=frame.vp, num_microbatches=number, costs=self.costs,
        )  # fmt: skip
        return _CellEstimate(table=table, cell=cell, frame=frame, costs=costs, order=order).rows()


@dataclass(kw_only=True, eq=False)
class _CellEstimate:
    table: CellTable
    cell: int
    frame: Frame
    costs: StageCosts
    order: OrderTable

    def rows(self) -> Estimates:
        space, layout = self.table.space, int(self.table.layout[self.cell])
        columns = space.keepings[int(space.keeping_of[layout])].columns
        known: dict[tuple[int, int], tuple[Floats, Floats, Floats, Floats]] = {}
        sizes: dict[tuple[int, int, int], tuple[float, float]] = {}
        lows: dict[tuple[int, int, int, bool], float] = {}
        found = []
        for zero, hsdp, offload, bucket, prefetch in zip(
            *(c.tolist() for c in columns.values()), strict=True
        ):
            if (zero, hsdp) not in known:
                known[zero, hsdp] = self._messages(zero, hsdp)
            away = space.choices.texts("offload")[offload]
            key = (zero, hsdp, offload)
            if key not in sizes:
                sizes[key] = self._bytes(zero, hsdp, away)
            if (*key, bucket > 0) not in lows:
                messages = known[zero, hsdp]
                lows[*key, bucket > 0] = self._bound_ns(messages, zero=zero, away=away, bucket_mb=bucket)
            step = self._step_ns(
                known[zero, hsdp], keeping=(zero, hsdp, away), bucket_mb=bucket, prefetch=prefetch
            )
            found.append((step, lows[*key, bucket > 0], *sizes[key]))
        steps, bound, needed, least = np.array(found, dtype=np.float64).reshape(-1, 4).T
        return Estimates(
            step_ns=np.maximum(steps, bound), bound_ns=bound, needed_bytes=needed, least_bytes=least
        )

    @cached_property
    def _ends_ns(self) -> Floats:
        """Return when ranks end, beside receives that wait: of both neighbours, nearly all the time."""
        waiting = RECEIVES * self.table.network.held_by_message(
            float(self.costs.sent_bytes[0]), apart=self._apart if self.frame.pp > 1 else 0
        )
        return self._alone_ns * (1.0 + float(self.costs.by_processors[0]) * waiting)

    @cached_property
    def _apart(self) -> int:
        """Return the ranks between a rank and the next one of its pipeline."""
        columns, layout = self.table.space.layouts, int(self.table.layout[self.cell])
        return int(columns["tp"][layout] * columns["cp"][layout] * columns["dp"][layout])

    @cached_property
    def _alone_ns(self) -> Floats:
        return self.order.ends_ns(self._times, transfer_ns=self._hop_ns, begin_ns=np.zeros(self.frame.pp))

    @cached_property
    def _host_ns(self) -> float:
        each = self.costs.host_ns[0].sum(axis=0)
        return float(self.order.num_microbatches * max(each[stages].sum() for stages in self._stages))

    @cached_property
    def _shared_cores_ns(self) -> float:
        """Return the time of all kernels of all ranks on the cores that they share; 0: each has its own."""
        cost_model = self.table.network.cost_model
        cores = cost_model.cluster.host.cores
        if cores is None or not cost_model.stack.contention:
            return 0.0
        each = float(self.costs.busy_ns[0].sum()) * self.order.num_microbatches
        called = self.frame.pp * self._called_ns
        return (each + called) * self._apart / cores

    @cached_property
    def _called_ns(self) -> float:
        """Return what the passes of a rank take beside their kernels; 0 where the host runs ahead."""
        passes = len(self._stages[0]) * (_SPLIT_PASSES if self.frame.rule.splits else _FUSED_PASSES)
        return (
            1e9 * self.table.network.cost_model.pass_overhead.seconds * passes * self.order.num_microbatches
        )

    @cached_property
    def _times(self) -> PassTimes:
        return self.costs.times(0, overlaps=self.frame.rule.overlaps)

    @cached_property
    def _hop_ns(self) -> float:
        layouts = np.array([self.table.layout[self.cell]])
        return float(self.table._hop_ns(self.frame, layouts, self.costs.sent_bytes[:1])[0])

    @cached_property
    def _stages(self) -> list[list[int]]:
        return [self.frame.stages_of_rank(rank) for rank in range(self.frame.pp)]

    def _by_rank(self, each: Floats) -> Floats:
        return np.array([each[0, stages].sum() for stages in self._stages])

    def _largest(self, each: Floats) -> Floats:
        return np.array([each[0, stages].max() for stages in self._stages])

    def _messages(self, zero: int, hsdp: int) -> tuple[Floats, Floats, Floats, Floats]:
        """Return (gather, reduction) of each stage, float64 [stages], estimated and at least."""
        table, stages = self.table, self.frame.num_stages
        layouts = np.full(stages, table.layout[self.cell])
        replicas = replicas_of(table.space, layouts, hsdp=hsdp)
        dense, expert = self.costs.dense[0], self.costs.expert[0]
        units = np.array(table.cut(self.frame, "none").counts, dtype=np.float64)
        return tuple(  # type: ignore[return-value]
            price(
                table.network,
                dense,
                expert,
                replicas=replicas,
                zero=zero,
                floor=floor,
                pieces=units if zero >= _CUT_PARAMETERS and not floor else 1.0,
            )
            for floor in (False, True)
            for price in (table.rules.gather_ns, table.rules.reduce_ns)
        )

    def _update_ns(self, zero: int, away: str) -> Floats:
        times = self._by_rank(self.costs.update_ns) + self._by_rank(self.costs.norm_ns)
        return times * self._share(zero, away)

    def _share(self, zero: int, away: str) -> float:
        """Return which part of an update the device makes."""
        layouts = np.array([self.table.layout[self.cell]])
        replicas = replicas_of(self.table.space, layouts, hsdp=0)
        share = float(self.table.rules.update_share(replicas, zero=zero)[0])
        return share if away in {"none", "activations"} else 0.0

    def _held(self, zero: int, hsdp: int) -> float:
        """Return which part of the processors messages of replicas hold."""
        replicas = replicas_of(self.table.space, np.array([self.table.layout[self.cell]]), hsdp=hsdp)
        return float(held_by_messages(self.table, self.costs, replicas=replicas, zero=zero)[0])

    def _step_ns(
        self, messages: tuple[Floats, ...], *, keeping: tuple[int, int, str], bucket_mb: int, prefetch: int
    ) -> float:
        zero, hsdp, away = keeping
        gather, reduce = messages[:2]
        number = self.order.num_microbatches
        first = [min(stages) for stages in self._stages]
        begin, tail = self._update_ns(zero, away), reduce[first]
        if bucket_mb:
            element = DTYPE_BYTES[self.table.rules.states.reduce]
            whole = np.maximum((self.costs.dense[0] + self.costs.expert[0])[first] * element, 1.0)
            tail = tail * np.minimum(1.0, bucket_mb * _MB / whole)
        if zero < _CUT_PARAMETERS:
            begin = begin + gather[first]
        ends = self._ends_ns + tail
        extra = np.zeros(self.frame.pp)
        if zero >= _CUT_GRADIENTS:
            sums = np.array([reduce[stages].sum() for stages in self._stages])
            gathers = np.array([gather[stages].sum() for stages in self._stages])
            busy = number * (sums + (2 * gathers if zero >= _CUT_PARAMETERS else 0.0))
            beside = np.minimum(busy, self._ends_ns) * self._held(zero, hsdp)
            beside = beside * float(self.costs.by_processors[0])
            waited = np.zeros(self.frame.pp)
            if zero >= _CUT_PARAMETERS:
                each = self._parameters_waited_ns(gather, gather + reduce, ahead=max(1, prefetch))
                waited = number * np.array([each[stages].sum() for stages in self._stages])
            extra = np.maximum(waited, busy - self._ends_ns) + beside
        extra = extra + self._copies_ns(zero, away)
        alone = float((begin + ends + np.maximum(extra, 0.0)).max()) + self._called_ns
        return max(alone, self._host_ns, self._shared_cores_ns + float((begin + tail).max()))

    def _fetches_waited_ns(self, fetch: Floats, stream: Floats, *, ahead: int) -> Floats:
        """Return how long the backward of a microbatch waits for what it fetches, float64 [stages].

        A fetch hides behind the tasks before its use by which it is made ahead, at most those of a unit.

        Args:
            fetch: float64 [stages].
            stream: float64 [stages], of all that its stream does beside the backward.
            ahead: tasks.
        """
        backward = self.costs.span_ns[0, 1:].sum(axis=0)
        late = np.maximum(fetch - self._hidden(ahead) * backward, stream - backward)
        return np.asarray(np.maximum(late, 0.0))

    def _hidden(self, ahead: int) -> Floats:
        """Return behind which part of a pass its fetches hide, float64 [stages]."""
        units = np.array(self.table.cut(self.frame, "none").counts, dtype=np.float64)
        return np.asarray(np.minimum(1.0, ahead / np.maximum(self.costs.tasks[0] / units, 1.0)))

    def _parameters_waited_ns(self, fetch: Floats, stream: Floats, *, ahead: int) -> Floats:
        """Return the same of both passes, which fetch their parameters."""
        forward = np.maximum(fetch - self._hidden(ahead) * self.costs.span_ns[0, 0], 0.0)
        return np.asarray(forward + self._fetches_waited_ns(fetch, stream, ahead=ahead))

    def _copies_ns(self, zero: int, away: str) -> Floats:
        """Return what copies to and from the host are waited for."""
        each = self.table.network.host_copy_ns_per_byte
        if away == "activations":
            inside = np.maximum(self.costs.kept_bytes - self.costs.border_bytes, 0.0)[0] * each
            forward, waits = self.costs.span_ns[0, 0], self._fetches_waited_ns(inside, inside, ahead=1)
            late = np.maximum(inside - forward, 0.0) + waits
            return self.order.num_microbatches * np.array([late[stages].sum() for stages in self._stages])
        if away == "none":
            return np.zeros(self.frame.pp)
        kept, without = (self._static(zero, 0, kind) for kind in ("none", away))
        once = 2.0 * (kept - without) * each
        if away == "params":  # fetched for every pass of every microbatch
            numel = self.costs.dense[0] + self.costs.expert[0]
            copies = numel * self.table.rules.states.parameter_bytes(zero) * each
            waited = self._parameters_waited_ns(copies, copies, ahead=1)
            late = self.order.num_microbatches * np.array([waited[stages].sum() for stages in self._stages])
            busy = self.order.num_microbatches * 2 * self._by_rank(copies[None])
            once = once + np.maximum(late, busy - self._ends_ns)
        return once

    def _bound_ns(self, messages: tuple[Floats, ...], *, zero: int, away: str, bucket_mb: int) -> float:
        table = self.table
        gather, reduce = messages[2:]
        begun, ended = first_stages(self.frame)
        passes = float(table.passes_ns[self.cell])
        launches = float(table.launches_ns[self.cell])
        if not table.has_barrier:
            return max(passes, launches)
        if self.order.is_exact and table.is_exact(self.cell):
            passes = max(passes, float(self._alone_ns.max()))
        early = (
            float(gather[begun].min()) if zero < _CUT_PARAMETERS and not table.rules.gathers_overlap else 0.0
        )
        late = float(reduce[ended].min()) if zero < _CUT_PARAMETERS and not bucket_mb else 0.0
        first = [rank for rank, stages in enumerate(self._stages) if min(stages) in begun]
        updates = self._share(zero, away) * (
            self._largest(self.costs.least_update_ns)[first].min()
            + self._largest(self.costs.least_norm_ns).min()
        )
        copies = self._late_ns if away == "activations" else 0.0
        return max(launches, passes + copies + early + late + float(updates))

    def _bytes(self, zero: int, hsdp: int, away: str) -> tuple[float, float]:
        """Return what the worst rank needs, estimated and at least."""
        static = self._static(zero, hsdp, away)
        held = np.zeros(self.frame.pp)
        transient = np.zeros(self.frame.pp)
        for rank, stages in enumerate(self._stages):
            each = self.costs.border_bytes if away == "activations" else self.costs.kept_bytes
            if away == "activations":  # those of one microbatch are there while they are copied
                transient[rank] = self.costs.kept_bytes[0, stages].max()
            held[rank] = (each[0, stages] * self.order.held[rank][: len(stages)]).sum()
            transient[rank] += self.costs.transient_bytes[0, stages].max()
        least = static + (0.0 if away == "activations" else held)
        gathered = self._gathered_bytes(zero, away)
        return float((static + held + transient + gathered).max()), float(least.max())

    @cached_property
    def _late_ns(self) -> float:
        """Return what the passes of a step wait for copies of activations, at least."""
        late = waits_for_copies_ns(
            self.costs,
            self.frame,
            capacity_bytes=self.table.capacity_bytes,
            copy_ns_per_byte=self.table.network.host_copy_ns_per_byte,
        )
        layouts = np.array([self.table.layout[self.cell]])
        return float(late[0] * (1 if self.frame.rule.overlaps else self.table.microbatches(layouts)[0]))

    def _gathered_bytes(self, zero: int, away: str) -> float:
        """Return whole parameters of two units, where they are gathered or fetched before use."""
        if zero < _CUT_PARAMETERS and away != "params":
            return 0.0
        units = sum(self.table.cut(self.frame, "none").counts) / self.frame.num_stages
        element = DTYPE_BYTES[self.table.rules.states.compute] + DTYPE_BYTES[self.table.rules.states.gradient]
        return float((self.costs.dense + self.costs.expert).max() / max(units, 1.0) * 2 * element)

    def _static(self, zero: int, hsdp: int, away: str) -> Floats:
        table = self.table
        layouts = np.array([table.layout[self.cell]])
        replicas = replicas_of(table.space, layouts, hsdp=hsdp)
        dense, expert = self._by_rank(self.costs.dense)[None], self._by_rank(self.costs.expert)[None]
        static = table.rules.static_bytes(dense, expert, replicas=replicas, zero=zero, offload=away)
        return np.asarray(static[0] + table.framework_bytes)
