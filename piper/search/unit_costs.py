"""What the units of a model cost one rank: probed once per way of working, added up to stages ever after.

[Note: probes]
A thin model (`piper.search.thin`) is compiled with one unit per pipeline rank and one microbatch, and
priced without contention. From each device plan we read, per pass: the time from its input to its output
along everything that waits for something (`span_ns`); what of this lies before the first and behind the
last kernel (`lead_ns`, `trail_ns`: exchanges that another microbatch may hide); and the kernels alone
(`busy_ns`). Kernels of a pass run in order, so a simulation needs at least that; host, contention and
waiting only add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cost_models.ops import DTYPE_BYTES
from piper.graph import CapturedModel
from piper.predict import Job, compile_resolved
from piper.search.beside import Beside
from piper.search.thin import Kinds, thin_model
from piper.strategy import Shorthand, Strategy, resolve
from simulator import build_workload
from simulator.plan import DevicePlan, Plan, StateDtypes, TaskKind

if TYPE_CHECKING:
    from cost_models.models.cluster import ClusterCostModel
    from piper.strategy.habits import Habits

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FUSED, _SPLIT = "1f1b", "zb_h1"
"""Schedules of probes: backwards that are whole, or in two halves."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Working:
    """All that decides what units cost.

    Args:
        tp, cp, ep, etp, micro_batch, sp, async_tp: as in `Candidate`.
        recompute: "none", "selective" or "full".
        split: whether backwards are in two halves.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    micro_batch: int = 1
    sp: str = "on"
    async_tp: str = "off"
    recompute: str = "none"
    split: bool = False


PASSES = ("F", "B", "W")
"""Rows of the arrays of passes: F; B or BI, with what is computed again; BW."""
F, B, W = range(3)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitCosts:
    """Costs of one unit of each kind for one microbatch; times in ns, float64 [passes, kinds] or [kinds].

    Args:
        span_ns, lead_ns, trail_ns, busy_ns: see [Note: probes].
        processor_ns: of busy_ns, in which processors bound the kernels.
        slowed_ns: by how much kernels take longer, at least, because exchanges run beside them
            (`piper.search.beside`).
        drain_ns: span of B from its gradient to its result, when all that is computed again was ready before.
        host_ns: that the host takes to launch the tasks of each pass.
        launch_ns: of these, the kernels alone.
        kept_bytes: from F to B, the received input included.
        border_bytes: of these, what came from another stage: it stays where activations are offloaded.
        transient_bytes: beyond static and kept ones, at the peak of a microbatch.
        dense, expert: trained elements on a rank, uncut by ZeRO.
        other_bytes: static ones that are neither parameters nor their states.
        update_ns, norm_ns: once per step, of uncut states.
        sent_bytes: message to the next stage.
        tasks: of F that compute: what gathers count by which are made ahead.
    """

    span_ns: Floats
    lead_ns: Floats
    trail_ns: Floats
    busy_ns: Floats
    processor_ns: Floats
    slowed_ns: Floats
    drain_ns: Floats
    host_ns: Floats
    launch_ns: Floats
    kept_bytes: Floats
    border_bytes: Floats
    transient_bytes: Floats
    dense: Floats
    expert: Floats
    other_bytes: Floats
    update_ns: Floats
    norm_ns: Floats
    sent_bytes: Floats
    tasks: Floats

    def kernels_only(self) -> UnitCosts:
        """Return the same without exchanges: no more than they take wherever groups lie."""
        nothing = np.zeros_like(self.busy_ns)
        again = np.minimum(self.span_ns[B] - self.drain_ns, self.busy_ns[B])
        return replace(
            self,
            span_ns=self.busy_ns,
            lead_ns=nothing,
            trail_ns=nothing,
            slowed_ns=nothing,
            drain_ns=self.busy_ns[B] - again,
            host_ns=self.launch_ns,
        )

    def keeping(self, other: UnitCosts) -> UnitCosts:
        """Return the same with what another way of working keeps."""
        return replace(self, kept_bytes=other.kept_bytes)

    def computed_again(self, none: UnitCosts, full: UnitCosts) -> UnitCosts:
        """Return the same with the kernels that another way of working computes again, and what it keeps.

        A span grows by less than its kernels where they run while it would wait for a message; a drain
        becomes shorter, and less slowed, where what was computed again needs no message that the backward
        waited for.
        """
        more, longer = np.zeros_like(self.busy_ns), np.zeros_like(self.span_ns)
        more[B] = np.maximum(full.busy_ns[B] - none.busy_ns[B], 0.0)
        longer[B] = np.clip(full.span_ns[B] - none.span_ns[B], 0.0, more[B])
        launches = np.zeros_like(self.busy_ns)
        launches[B] = np.maximum(full.launch_ns[B] - none.launch_ns[B], 0.0)
        return replace(
            self.keeping(full),
            span_ns=self.span_ns + longer,
            busy_ns=self.busy_ns + more,
            slowed_ns=_lessened(self.slowed_ns, none.slowed_ns - full.slowed_ns),
            drain_ns=_lessened(self.drain_ns, none.drain_ns - full.drain_ns),
            host_ns=self.host_ns + launches,
        )

    def scaled(self, share: float) -> UnitCosts:
        """Return lower bounds for microbatches of `share` <= 1 of the size: smaller kernels are no faster."""
        names = (
            "span_ns",
            "lead_ns",
            "trail_ns",
            "busy_ns",
            "processor_ns",
            "slowed_ns",
            "drain_ns",
            "kept_bytes",
            "border_bytes",
            "transient_bytes",
            "sent_bytes",
        )
        return replace(self, **{name: getattr(self, name) * share for name in names})


@dataclass(kw_only=True)
class UnitCostTable:
    """Unit costs of one job on one cluster, each way of working probed once.

    Args:
        job: of the search.
        cost_model, habits: prices and what the stack does.
        kinds: of the model's units.
        model: returns the model captured at a microbatch size.
    """

    job: Job
    cost_model: ClusterCostModel
    habits: Habits
    kinds: Kinds
    model: Callable[[int], CapturedModel]
    known: dict[Working, UnitCosts] = field(default_factory=dict)
    _bare: dict[Working, UnitCosts] = field(default_factory=dict)

    def of(self, working: Working) -> UnitCosts:
        """Return the costs of one way of working."""
        found = self.known.get(working)
        if found is None:
            found = self.known[working] = self._probe(working)
        return found

    def kernels_of(self, working: Working) -> UnitCosts:
        """Return the same without exchanges."""
        found = self._bare.get(working)
        if found is None:
            found = self._bare[working] = self.of(working).kernels_only()
        return found

    def _probe(self, working: Working) -> UnitCosts:
        thin = thin_model(self.model(working.micro_batch), self.kinds)
        experts, inner = working.ep * working.etp, working.tp * working.cp
        dp = experts // gcd(experts, inner)
        stage, node = inner * dp, self.cost_model.cluster.gpus_per_node
        if not is_aligned(working, node):
            dp *= node // gcd(stage, node)
        resolved = resolve(
            Strategy(
                stated=Shorthand(
                    tp=_many(working.tp), pp=self.kinds.count, cp=_many(working.cp), ep=_many(working.ep),
                    etp=working.etp if working.ep * working.etp > 1 else None, dp=dp, vp=1, zero=0,
                    sp=working.sp if working.tp > 1 else None,
                    async_tp="on" if working.async_tp == "on" else "off",
                    schedule=_SPLIT if working.split else _FUSED,
                    recompute=working.recompute, offload="none", micro_batch=working.micro_batch,
                ),
                where="search",
            ),
            gpus=None,
            gpus_per_node=node,
            global_batch=dp * working.micro_batch,
            micro_batch=None,
            habits=self.habits,
            num_layers=None,
        )  # fmt: skip
        plan = compile_resolved(resolved, [thin], self.job, verified=False)
        return self._read(plan, working)

    def _read(self, plan: Plan, working: Working) -> UnitCosts:
        workload = build_workload(plan, self.cost_model, contention=False)
        overhead_s = self.cost_model.pass_overhead.seconds
        prices = workload.prices.seconds[workload.price] - np.where(
            (workload.price >= 0) & (workload.prices.num_kernels[workload.price] > 0) & workload.is_compute,
            overhead_s,
            0.0,
        )
        time_ns = np.where(workload.price >= 0, np.floor(np.maximum(prices, 0.0) * 1e9), 0.0)
        starts = workload.device_starts.tolist()
        states = self.habits.states(self.job.dtype, optimizer=self.job.optimizer)
        units = [
            _Unit(
                device,
                time_ns[first:last],
                workload.host_ns[first:last],
                states=states,
                optimizer=self.job.optimizer,
            )
            for device, first, last in zip(plan.device_plans, starts, starts[1:], strict=False)
        ]
        passes = np.array([unit.passes() for unit in units])  # [kinds, passes, 6]
        beside = Beside(plan=plan, cost_model=self.cost_model, sequences=working.micro_batch)
        return UnitCosts(
            span_ns=passes[:, :, 0].T,
            lead_ns=passes[:, :, 1].T,
            trail_ns=passes[:, :, 2].T,
            busy_ns=passes[:, :, 3].T,
            processor_ns=np.array([unit.processor_ns(beside) for unit in units]).T,
            slowed_ns=np.array([unit.slowed_ns(beside) for unit in units]).T,
            host_ns=passes[:, :, 4].T,
            launch_ns=passes[:, :, 5].T,
            drain_ns=np.array([unit.drain_ns() for unit in units]),
            kept_bytes=np.array([unit.kept_bytes() for unit in units], dtype=np.float64),
            border_bytes=np.array([unit.border_bytes() for unit in units], dtype=np.float64),
            transient_bytes=np.array([unit.transient_bytes() for unit in units], dtype=np.float64),
            dense=np.array([unit.numel("dense", "sequence") for unit in units], dtype=np.float64),
            expert=np.array([unit.numel("expert") for unit in units], dtype=np.float64),
            other_bytes=np.array([unit.other_bytes() for unit in units], dtype=np.float64),
            update_ns=np.array([unit.total_ns(TaskKind.UPDATE) for unit in units]),
            norm_ns=np.array([unit.total_ns(TaskKind.NORM) for unit in units]),
            sent_bytes=np.array([unit.sent_bytes() for unit in units], dtype=np.float64),
            tasks=np.array([unit.num_tasks for unit in units], dtype=np.float64),
        )


def is_aligned(working: Working, gpus_per_node: int) -> bool:
    """Return whether groups of a stage lie alike on nodes wherever the stage begins."""
    sizes = (working.tp, working.tp * working.cp, working.ep * working.etp)
    return all(gpus_per_node % size == 0 or size % gpus_per_node == 0 for size in sizes)


def _many(degree: int) -> int | None:
    return degree if degree > 1 else None


_AGAIN = int(TaskKind.R)
_OF_PASS = ((TaskKind.F,), (TaskKind.B, TaskKind.BI, TaskKind.R), (TaskKind.BW,))


class _Unit:
    """One device plan of a probe."""

    def __init__(
        self, device: DevicePlan, time_ns: Floats, host_ns: Ints, *, states: StateDtypes, optimizer: str
    ) -> None:
        self.device, self.time_ns, self.host_ns = device, time_ns, host_ns
        self.states, self.optimizer = states, optimizer
        table = device.tasks
        self.kind, self.stream = table.kind.tolist(), table.stream.tolist()
        self.waits = table.waits.to_rows()
        phase = np.where(table.phase >= 0, table.phase, table.kind)
        in_microbatch = (table.microbatch >= 0) & ~np.isin(table.kind, _TRANSFERS)
        self.of_pass = [
            np.flatnonzero(in_microbatch & np.isin(phase, [int(k) for k in kinds])).tolist()
            for kinds in _OF_PASS
        ]
        self.phase = phase

    def passes(self) -> list[tuple[float, ...]]:
        """Return (span, lead, trail, busy, host, launch) of every pass."""
        return [self._pass(tasks) for tasks in self.of_pass]

    def processor_ns(self, beside: Beside) -> list[float]:
        """Return for how long processors bound the kernels of every pass."""
        return [
            sum(beside.processor_ns(self.device, i) for i in tasks if self.stream[i] == 0)
            for tasks in self.of_pass
        ]

    def slowed_ns(self, beside: Beside) -> list[float]:
        """Return what every pass takes longer because of exchanges beside it."""
        times = self.time_ns.tolist()
        return [
            beside.slowed_ns(self.device, tasks, time_ns=times, waits=self.waits) for tasks in self.of_pass
        ]

    def drain_ns(self) -> float:
        """Return the span of B when all that needs no gradient was done before."""
        tasks = self.of_pass[B]
        late = self._late(tasks)
        left = [time if i in late and self.phase[i] != _AGAIN else 0.0 for i, time in enumerate(self.time_ns)]
        return self._output(tasks, self._ends(tasks, left))

    def _late(self, tasks: Sequence[int]) -> set[int]:
        """Return the tasks that wait, at last, for the gradient; all, where none is received."""
        received = {i for i, kind in enumerate(self.kind) if kind == TaskKind.RECV_B}
        if not received:
            return set(tasks)
        late, streams = set(received), set[int]()
        for i in tasks:
            if self.stream[i] in streams or not late.isdisjoint(self.waits[i]):
                late.add(i)
                streams.add(self.stream[i])
        return late

    def _pass(self, tasks: Sequence[int]) -> tuple[float, ...]:
        if not tasks:
            return (0.0,) * 6
        end = self._ends(tasks, self.time_ns)
        computes = [i for i in tasks if self.stream[i] == 0]
        span = self._output(tasks, end)
        busy = float(sum(self.time_ns[i] for i in computes))
        host = float(sum(self.host_ns[i] for i in tasks))
        launch = float(sum(self.host_ns[i] for i in computes))
        if not computes:
            return (span, span, 0.0, 0.0, host, 0.0)
        first, last = computes[0], computes[-1]
        lead = end[first] - self.time_ns[first]
        return (span, lead, max(0.0, span - end[last]), busy, host, launch)

    def _ends(self, tasks: Sequence[int], time_ns: Floats | Sequence[float]) -> dict[int, float]:
        end: dict[int, float] = {}
        free: dict[int, float] = {}
        for i in tasks:
            begin = max([free.get(self.stream[i], 0.0), *(end[w] for w in self.waits[i] if w in end)])
            end[i] = free[self.stream[i]] = begin + float(time_ns[i])
        return end

    def _output(self, tasks: Sequence[int], end: dict[int, float]) -> float:
        """Return when the result of a pass is there: what is sent, else the end of the last kernel."""
        inside = set(tasks)
        sent = [
            end[w] for i, kind in enumerate(self.kind) if kind in _SENDS for w in self.waits[i] if w in inside
        ]
        computed = [end[i] for i in tasks if self.stream[i] == 0]
        return float(max([*sent, *computed[-1:], 0.0]))

    @property
    def num_tasks(self) -> int:
        """Return the tasks of F that compute."""
        return sum(self.stream[i] == 0 for i in self.of_pass[F])

    def kept_bytes(self) -> int:
        """Return what lives from F to B."""
        inside = {*self.of_pass[F], *(i for i, kind in enumerate(self.kind) if kind == TaskKind.RECV_F)}
        done = {*inside, *(i for i, kind in enumerate(self.kind) if kind == TaskKind.SEND_F)}
        born = self._buffers("allocates", inside)
        return self._bytes(born - self._buffers("frees", done))

    def border_bytes(self) -> int:
        """Return what is received before F."""
        received = [i for i, kind in enumerate(self.kind) if kind == TaskKind.RECV_F]
        return self._bytes(self._buffers("allocates", received))

    def transient_bytes(self) -> int:
        """Return the peak of a microbatch beyond what is static and kept, as its tasks are dispatched."""
        table, sizes = self.device.tasks, self.device.buffers.size_bytes
        late = {int(TaskKind.RECV_B)}
        now = most = 0
        for i, kind in enumerate(self.kind):
            now += 0 if kind in late else int(sizes[list(table.allocates.row(i))].sum())
            most = max(most, now)
            now -= int(sizes[list(table.frees.row(i))].sum())
        return max(0, most - self.kept_bytes())

    def numel(self, *kinds: str) -> int:
        """Return the elements of buckets of some kinds."""
        return sum(bucket.numel for bucket in self.device.buckets if bucket.kind in kinds)

    def other_bytes(self) -> int:
        """Return static bytes besides parameters, gradients and optimizer state."""
        states = self.states
        each = (
            states.parameter_bytes(0)
            + DTYPE_BYTES[states.gradient]
            + states.optimizer_bytes(self.optimizer, 0)
        )
        return max(0, self.device.buffers.static_bytes - each * self.numel("dense", "sequence", "expert"))

    def total_ns(self, kind: TaskKind) -> float:
        """Return the time of all tasks of a kind."""
        return float(self.time_ns[self.device.tasks.kind == kind].sum())

    def sent_bytes(self) -> int:
        """Return the bytes that go to the next stage."""
        table = self.device.tasks
        return int(table.size_bytes[table.kind == TaskKind.SEND_F].sum())

    def _buffers(self, column: str, tasks: Iterable[int]) -> set[int]:
        lists = getattr(self.device.tasks, column)
        return {buffer for i in tasks for buffer in lists.row(i)}

    def _bytes(self, buffers: set[int]) -> int:
        table = self.device.buffers
        alive = [b for b in buffers if not table.persistent[b]]
        return int(table.size_bytes[alive].sum())


_TRANSFERS = np.array(
    [int(kind) for kind in (TaskKind.SEND_F, TaskKind.RECV_F, TaskKind.SEND_B, TaskKind.RECV_B)]
)
_SENDS = frozenset({int(TaskKind.SEND_F), int(TaskKind.SEND_B)})


def _lessened(found: Floats, by: Floats) -> Floats:
    """Return figures less what they lose, where they lose anything; none is below 0."""
    return np.maximum(found - np.maximum(by, 0.0), 0.0)
