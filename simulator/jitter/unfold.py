"""The explicit unfolding: a `Workload` with one device per unit, which every engine runs as it is.

It is the oracle of the kernel (with one unit per rank), the way of the reference engine, and that of all
engines where ranks share links.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simulator.distinct import distinct_rows
from simulator.engines import Engine, EngineRun, Settled
from simulator.jitter import draws
from simulator.jitter.disturbance import Disturbance
from simulator.jitter.unfolded_run import UnfoldedRun
from simulator.jitter.units import Units
from simulator.plan import NONE, IndexLists, Plan
from simulator.sharing import Sharing
from simulator.workload import COMPUTE_VALUES, Workload

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Unfolding:
    """Where every task of every unit comes from, and whom it meets.

    Args:
        plan, workload: what is unfolded.
        units: by what.
    """

    def __init__(self, plan: Plan, workload: Workload, units: Units) -> None:
        self.folded, self.units = workload, units
        self.computes = computes(plan)
        self.group = np.concatenate([device.tasks.group for device in plan.device_plans])
        counts = np.diff(workload.device_starts)[units.device]
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.shift = self.starts[:-1] - workload.device_starts[units.device]
        self.unit = np.repeat(np.arange(units.num_units), counts)
        self.source = np.arange(len(self.unit)) - self.shift[self.unit]
        device_of = np.repeat(np.arange(workload.num_devices), np.diff(workload.device_starts))
        partner = workload.partner[self.source]
        self.met = np.where(partner != NONE, units.peer[self.unit, device_of[partner]], NONE)
        self.met_factor = np.where(partner != NONE, units.peer_factor[self.unit, device_of[partner]], 1.0)
        self.partner = np.where(partner != NONE, partner + self.shift[self.met], NONE)
        self.is_send = workload.is_send[self.source]
        streams = np.diff(workload.stream_starts)[units.device]
        self.stream_starts = np.concatenate([[0], np.cumsum(streams)]).astype(np.int64)
        stream_shift = self.stream_starts[:-1] - workload.stream_starts[units.device]
        self.stream = workload.stream[self.source] + stream_shift[self.unit]
        self.stream_source = np.arange(self.stream_starts[-1]) - np.repeat(stream_shift, streams)
        self._collectives()

    def _collectives(self) -> None:
        """Give every set a collective of its own; members by place of their device plan, then by unit."""
        joins = np.flatnonzero(self.folded.collective[self.source] != NONE)
        source, unit = self.source[joins], self.unit[joins]
        self.set = np.full(len(self.unit), NONE, dtype=np.int64)
        self.set[joins] = self.units.set_of[self.group[source], unit]
        number = distinct_rows([self.folded.collective[source], self.set[joins]])[1]
        self.collective = np.full(len(self.unit), NONE, dtype=np.int64)
        self.collective[joins] = number
        order = np.lexsort((unit, source, number))
        counts = np.bincount(number)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.members = IndexLists(starts=starts, values=joins[order])

    def workload(self, noisy_ns: Ints, shared: tuple[Sharing, Ints] | None = None) -> Workload:
        """Return the unfolded workload.

        Args:
            noisy_ns: int64 [steps, tasks], durations.
            shared: what flows hold, and which row of it each task holds; None: nothing slows anything else.
        """
        old, units, source = self.folded, self.units, self.source
        sharing, row = shared or (None, old.price[source])
        codes = np.array(old.codes, dtype=object)
        return Workload(
            device_starts=self.starts,
            stream_starts=self.stream_starts,
            is_compute=old.is_compute[source],
            is_host_copy=old.is_host_copy[source],
            stream=self.stream,
            duration_ns=noisy_ns[0],
            launch_ns=old.launch_ns[source],
            host_ns=old.host_ns[source],
            host_waits=self._lists(old.host_waits),
            waits=self._lists(old.waits),
            previous_step_waits=self._lists(old.previous_step_waits),
            is_send=self.is_send,
            partner=self.partner,
            eager=old.eager[source],
            collective=self.collective,
            members=self.members,
            price=row,
            prices=old.prices,
            codes=tuple(codes[source].tolist()),
            pipeline_rank=old.pipeline_rank[units.device],
            n_devices=1,
            sharing=sharing,
            noisy_ns=noisy_ns,
        )

    def _lists(self, lists: IndexLists) -> IndexLists:
        """Return lists of tasks; negative ones are less the number of tasks, here as there."""
        counts = np.diff(lists.starts)[self.source]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        place = np.arange(starts[-1]) + np.repeat(lists.starts[self.source] - starts[:-1], counts)
        values = lists.values[place]
        earlier = np.where(values < 0, self.folded.num_tasks - len(self.unit), 0)
        return IndexLists(starts=starts, values=values + earlier + np.repeat(self.shift[self.unit], counts))

    def duration_ns(self, disturbance: Disturbance, *, seed: int, step: int) -> Ints:
        """Return how long every task takes in a step, int64 [tasks]."""
        old, units = self.folded, self.units
        rank = units.first_rank[self.unit]
        driver = drivers(old)[self.source]
        joined = self.set != NONE
        sender = np.where((self.met != NONE) & ~self.is_send, self.met, self.unit)
        draw = np.where(
            joined, np.append(units.set_draw, 0)[self.set], disturbance.draw[units.first_rank[sender]]
        )
        key = np.where(joined, old.num_tasks + old.collective[self.source], driver)
        bits = draws.with_draw(draws.step_key(seed, step), draw.astype(np.uint64))
        bits = draws.mixed(draws.with_task(draws.mixed(bits), key.astype(np.uint64)))
        compute = self.computes[self.source]
        factor = np.where(compute, disturbance.compute_factor[rank], self.met_factor)
        factor = np.where(joined, np.append(units.set_factor, 1.0)[self.set], factor)
        row = draws.table_row(bits).astype(np.int64)
        if len(disturbance.compute_noise):
            drawn = disturbance.compute_noise[row]
            factor = np.where(compute & disturbance.noisy[rank], factor * drawn, factor)
        if len(disturbance.communication_noise):
            factor = np.where(compute, factor, factor * disturbance.communication_noise[row])
        base = old.duration_ns[driver]
        longer = np.where(factor == 1.0, base, draws.longer_ns(base, factor).astype(np.int64))
        chance = draws.chance(draws.mixed(draws.for_chance(bits))).astype(np.int64)
        late = compute & (chance < disturbance.hiccup_chance[rank])
        return np.where(late, longer + disturbance.hiccup_ns[rank], longer).astype(np.int64)

    def blame(self, done: EngineRun) -> tuple[Ints, Ints]:
        """Return how long a rank of each unit waited, and was waited for: int64 [steps, units] each."""
        shape = (len(done.step_end_ns), self.units.num_units)
        waited, caused = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for step, joined in enumerate(done.ready_ns):
            self._blame_collectives(joined, waited[step], caused[step])
            self._blame_transfers(joined, waited[step], caused[step])
        return waited, caused

    def _blame_collectives(self, joined: Ints, waited: Ints, caused: Ints) -> None:
        tasks, starts = self.members.values, self.members.starts
        if not len(tasks):
            return
        number, unit = self.collective[tasks], self.unit[tasks]
        wait = np.maximum.reduceat(joined[tasks], starts[:-1])[number] - joined[tasks]
        place = np.arange(len(tasks)) - starts[number] + self.units.member_starts[self.set[tasks]]
        ranks = self.units.member_ranks[place]
        in_vain = np.add.reduceat(wait * ranks, starts[:-1])
        late = np.add.reduceat(np.where(wait == 0, ranks, 0), starts[:-1])
        np.add.at(waited, unit, wait)
        np.add.at(caused, unit, np.where(wait == 0, (in_vain // late)[number], 0))

    def _blame_transfers(self, joined: Ints, waited: Ints, caused: Ints) -> None:
        ends = np.flatnonzero(self.partner != NONE)
        wait = np.maximum(joined[self.partner[ends]] - joined[ends], 0)
        free = self.folded.eager[self.source[ends]] & self.folded.is_send[self.source[ends]]
        wait = np.where(free, 0, wait)
        np.add.at(waited, self.unit[ends], wait)
        np.add.at(caused, self.met[ends], wait)


def computes(plan: Plan) -> npt.NDArray[np.bool_]:
    """Return which tasks compute, bool [tasks], whether or not their computations flow over shared cores."""
    kind = np.concatenate([device.tasks.kind for device in plan.device_plans])
    found: npt.NDArray[np.bool_] = np.isin(kind, COMPUTE_VALUES)
    return found


def drivers(workload: Workload) -> Ints:
    """Return by task the one whose duration a meeting takes: the send, the first member; else itself."""
    driver = np.arange(workload.num_tasks)
    received = (workload.partner != NONE) & ~workload.is_send
    driver[received] = workload.partner[received]
    joined = workload.collective != NONE
    driver[joined] = workload.members.values[workload.members.starts[workload.collective[joined]]]
    return driver


def run_explicitly(
    plan: Plan,
    workload: Workload,
    units: Units,
    *,
    disturbance: Disturbance,
    engine: Engine,
    seed: int,
    max_steps: int,
    settled: Settled = lambda _: False,
    shared: tuple[Sharing, Ints] | None = None,
    record: Sequence[int] | None = None,
) -> UnfoldedRun:
    """Run the explicit unfolding in an engine.

    Args:
        shared: as in `Unfolding.workload`.
        record: units whose times are kept; None: all.
    """
    unfolding = Unfolding(plan, workload, units)
    noisy = [unfolding.duration_ns(disturbance, seed=seed, step=step) for step in range(max_steps)]
    done = engine(unfolding.workload(np.stack(noisy), shared), max_steps=max_steps, settled=settled)
    waited, caused = unfolding.blame(done)
    borders = list(zip(unfolding.starts[:-1].tolist(), unfolding.starts[1:].tolist(), strict=True))
    kept = range(units.num_units) if record is None else record
    recorded = {unit: _copied(done.tasks(*borders[unit])) for unit in kept}
    return UnfoldedRun(
        units=units,
        step_end_ns=done.step_end_ns,
        unit_end_ns=np.stack([done.end_ns[:, a:b].max(axis=1, initial=0) for a, b in borders], axis=1),
        waited_ns=waited,
        caused_ns=caused,
        recorded=recorded,
    )


def _copied(times: EngineRun) -> EngineRun:
    """Return the times of a unit in memory of their own, so that those of the others can go."""
    return EngineRun(
        dispatch_ns=times.dispatch_ns.copy(),
        ready_ns=times.ready_ns.copy(),
        start_ns=times.start_ns.copy(),
        end_ns=times.end_ns.copy(),
        step_end_ns=times.step_end_ns,
    )
