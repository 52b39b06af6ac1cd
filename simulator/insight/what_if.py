"""What if: the plan simulated again with scaled prices, each change beside what the critical path promises.

[Note: promise of the path]  A change cannot gain more of one step than it takes from its critical path,
    since the path is still there afterwards; it gains less where another path takes over. Of a window in the
    middle of several steps this is an estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cost_models.ops import Operation, OpKind
from cost_models.price import CollectiveKind, CostModel, Price
from cost_models.use import CommunicationUse, LinkKind, Machine, OperationUse
from simulator.insight.critical_path import CriticalPath, critical_path
from simulator.plan import NONE, Plan, TaskKind
from simulator.simulation import simulate
from simulator.timeline.attribution import BUSY, Label, communication_labels
from simulator.timeline.timeline import Timeline
from simulator.workload import Workload, build_workload

Ints = npt.NDArray[np.int64]

TWICE_AS_FAST = 0.5
TENTH_FASTER = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """By how much times are multiplied; what is not named stays.

    Args:
        operations: by kind of kernel.
        inside_nodes, between_nodes: transfers and collectives whose ranks share a node, and all others.
        host_copies: copies between device and host.
        launch: of every kernel.
        labels: communication by the axis it belongs to.
    """

    operations: Mapping[OpKind, float] = field(default_factory=dict)
    inside_nodes: float = 1.0
    between_nodes: float = 1.0
    host_copies: float = 1.0
    launch: float = 1.0
    labels: Mapping[Label, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change and what it gains.

    Args:
        change: in words.
        step_time_ns: simulated again.
        gain_ns: by which the step is shorter.
        promised_ns: what the change takes from the critical path; see the note above.
    """

    change: str
    step_time_ns: int
    gain_ns: int
    promised_ns: int


class ScaledCostModel:
    """The prices of another cost model, scaled.

    Args:
        inner: what is scaled.
        scales: how much.
        node_of: the node of a rank (the NVLink domain, where it holds several nodes).
    """

    def __init__(self, inner: CostModel, scales: Scales, *, node_of: Callable[[int], int]) -> None:
        self._inner = inner
        self._scales = scales
        self._node_of = node_of
        self.name = f"{inner.name}, scaled"
        self.launch_overhead_s = inner.launch_overhead_s * scales.launch
        self.pass_overhead = _scaled(inner.pass_overhead, scales.launch)
        self.communication_overhead_s = inner.communication_overhead_s * scales.launch
        self.pass_wait_s = inner.pass_wait_s
        self.step_wait_s = inner.step_wait_s
        self.step_error = inner.step_error
        self.run_ahead_kernels = inner.run_ahead_kernels
        self.blocking = inner.blocking
        self.awaited = inner.awaited
        self.eager_limit_bytes = inner.eager_limit_bytes
        self.device_memory_bytes = inner.device_memory_bytes
        self.context_bytes = inner.context_bytes
        self.expandable_segments = inner.expandable_segments
        self.peak_flops_per_s = inner.peak_flops_per_s

    def communicator_bytes(self, num_ranks: int) -> int:
        """Return what the inner model says."""
        return self._inner.communicator_bytes(num_ranks)

    def operation(self, operation: Operation) -> Price:
        """Price one kernel."""
        return _scaled(self._inner.operation(operation), self._scales.operations.get(operation.kind, 1.0))

    def transfer(self, *, size_bytes: int, source_rank: int, target_rank: int) -> Price:
        """Price a point-to-point transfer."""
        price = self._inner.transfer(size_bytes=size_bytes, source_rank=source_rank, target_rank=target_rank)
        return _scaled(price, self._link([source_rank, target_rank]))

    def collective(self, kind: CollectiveKind, *, size_bytes: int, ranks: Sequence[int]) -> Price:
        """Price a collective."""
        price = self._inner.collective(kind, size_bytes=size_bytes, ranks=ranks)
        return _scaled(price, self._link(ranks))

    def host_copy(self, *, size_bytes: int) -> Price:
        """Price a copy between a device and its host."""
        return _scaled(self._inner.host_copy(size_bytes=size_bytes), self._scales.host_copies)

    def distinct(self, members: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return what the inner model says: sets that lie alike span equally many nodes."""
        return self._inner.distinct(members)

    def machine(self, num_ranks: int) -> Machine | None:
        """Return the inner model's machine: what takes longer runs over slower links."""
        machine = self._inner.machine(num_ranks)
        if machine is None:
            return None
        rates = machine.link_bytes_per_s.copy()
        for kind, links in machine.links.items():
            rates[links.start : links.stop] /= self._scale_of(kind)
        return replace(machine, link_bytes_per_s=rates)

    def operation_use(self, operation: Operation) -> OperationUse:
        """Return what bounds one kernel."""
        use, scale = self._inner.operation_use(operation), self._scales.operations.get(operation.kind, 1.0)
        return replace(use, processor_s=use.processor_s * scale, memory_s=use.memory_s * scale)

    def transfer_use(
        self, *, size_bytes: int, pairs: Ints, num_ranks: int, communicators: Ints | None = None
    ) -> CommunicationUse:
        """Return what transfers hold."""
        use = self._inner.transfer_use(
            size_bytes=size_bytes, pairs=pairs, num_ranks=num_ranks, communicators=communicators
        )
        return replace(use, latency_s=use.latency_s * self._latency_scale(pairs))

    def collective_use(
        self, kind: CollectiveKind, *, size_bytes: int, members: Ints, num_ranks: int
    ) -> CommunicationUse:
        """Return what a collective holds."""
        use = self._inner.collective_use(kind, size_bytes=size_bytes, members=members, num_ranks=num_ranks)
        return replace(use, latency_s=use.latency_s * self._latency_scale(members))

    def host_copy_use(
        self, *, size_bytes: int, ranks: Ints, to_host: bool, num_ranks: int
    ) -> CommunicationUse:
        """Return what copies between devices and their host hold."""
        use = self._inner.host_copy_use(
            size_bytes=size_bytes, ranks=ranks, to_host=to_host, num_ranks=num_ranks
        )
        return replace(use, latency_s=use.latency_s * self._scales.host_copies)

    def _latency_scale(self, members: Ints) -> float:
        """Return the scale of a latency: the smaller one where some sets span nodes and others not."""
        return min(self._link(ranks) for ranks in self._inner.distinct(members.tolist()))

    def _scale_of(self, kind: LinkKind) -> float:
        if kind in {LinkKind.PORT_OUT, LinkKind.PORT_IN, LinkKind.BUS_OUT, LinkKind.BUS_IN}:
            return self._scales.inside_nodes
        host = kind in {LinkKind.HOST_OUT, LinkKind.HOST_IN}
        return self._scales.host_copies if host else self._scales.between_nodes

    def _link(self, ranks: Sequence[int]) -> float:
        inside = len({self._node_of(rank) for rank in ranks}) == 1
        return self._scales.inside_nodes if inside else self._scales.between_nodes


def _scaled(price: Price, scale: float) -> Price:
    return replace(
        price, seconds=price.seconds * scale, low_s=price.low_s * scale, high_s=price.high_s * scale
    )


def try_changes(
    plan: Plan,
    cost_model: CostModel,
    *,
    workload: Workload,
    timeline: Timeline,
    node_of: Callable[[int], int],
) -> list[WhatIf]:
    """Simulate every change that can matter to this plan; those with the largest gain first.

    Args:
        plan, cost_model: what was simulated.
        workload: `build_workload(plan, cost_model)`.
        timeline: what came out, of any number of steps: the changes are simulated for as many.
        node_of: the node of a rank (the NVLink domain, where it holds several nodes).
    """
    path = critical_path(workload, timeline)
    labels = [label for device in plan.device_plans for label in communication_labels(plan, device)]
    found = []
    for change, scales in changes(plan, labels, node_of=node_of):
        scaled = ScaledCostModel(cost_model, scales, node_of=node_of)
        priced = build_workload(plan, scaled, contention=workload.sharing is not None)
        work = _with_labels(priced, labels, scales.labels)
        again = simulate(plan, scaled, steps=timeline.num_steps, workload=work)
        found.append(
            WhatIf(
                change=change,
                step_time_ns=again.step_time_ns,
                gain_ns=timeline.step_time_ns - again.step_time_ns,
                promised_ns=_promised_ns(path, workload, work),
            )
        )
    return sorted(found, key=lambda what_if: (-what_if.gain_ns, what_if.change))


def changes(
    plan: Plan, labels: Sequence[Label], *, node_of: Callable[[int], int]
) -> list[tuple[str, Scales]]:
    """Return (change in words, scales) for everything that occurs in the plan."""
    kinds = {operation.kind for work in plan.works for operation in work.operations}
    found = [
        (f"{kind.value} kernels 10 % faster", Scales(operations={kind: TENTH_FASTER}))
        for kind in OpKind
        if kind in kinds
    ]
    for label in Label:
        if label in labels and label not in BUSY:
            name = label.name.lower().removeprefix("exposed_")
            found.append((f"{name} communication 2x as fast", Scales(labels={label: TWICE_AS_FAST})))
    spans = _spans(plan, node_of)
    if True in spans:
        found.append(("links inside a node 2x", Scales(inside_nodes=TWICE_AS_FAST)))
    if False in spans:
        found.append(("network between nodes 2x", Scales(between_nodes=TWICE_AS_FAST)))
    return [*found, ("no launch cost", Scales(launch=0.0))]


def _spans(plan: Plan, node_of: Callable[[int], int]) -> set[bool]:
    """Return whether communication stays inside nodes (True), leaves them (False), or both."""
    found: set[bool] = set()
    for device in plan.device_plans:
        table = device.tasks
        for number in np.unique(table.group[table.group != NONE]).tolist():
            members = plan.groups[number].members
            found |= {len({node_of(rank) for rank in ranks}) == 1 for ranks in members if len(ranks) > 1}
        here = plan.mesh.ranks(pp=device.pipeline_rank)
        is_transfer = np.isin(table.kind, [TaskKind.SEND_F, TaskKind.SEND_B])
        for peer in np.unique(table.peer[is_transfer]).tolist():
            pairs = zip(here, plan.mesh.ranks(pp=peer), strict=True)
            found |= {node_of(source) == node_of(target) for source, target in pairs}
    return found


def _with_labels(workload: Workload, labels: Sequence[Label], scales: Mapping[Label, float]) -> Workload:
    """Return a workload with the communication of some labels scaled, rounded up to whole ns."""
    if not scales:
        return workload
    factor = np.array([scales.get(label, 1.0) for label in labels])
    duration = np.ceil(workload.duration_ns * factor).astype(np.int64)
    return replace(workload, duration_ns=np.where(factor == 1, workload.duration_ns, duration))


def _promised_ns(path: CriticalPath, before: Workload, after: Workload) -> int:
    """Return what the last step's part of the path loses when all on it get their new times."""
    host_ns = max(int(before.host_ns.sum()), 1)
    launches = 1 - int(after.host_ns.sum()) / host_ns
    saved = 0.0
    for part in path.parts:
        task, here = part.instance % path.num_tasks, part.within(path.window_ns)
        if part.is_host:
            saved += here * launches
        elif here:
            lasted = int(before.duration_ns[task])
            saved += here * (lasted - int(after.duration_ns[task])) / max(lasted, 1)
    return round(saved)
