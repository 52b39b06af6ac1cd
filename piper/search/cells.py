"""Cells: layouts with a way of working, whose lower bounds are found by whole columns.

[Note: bounds of cells]
The time of the passes (`piper.search.chain_bounds`) plus the ends of the step under the cheapest way of
keeping state that may fit. Passes are first priced from a probe of the largest microbatch, scaled to smaller
ones, which is no more than they take; `refined` replaces this by a probe of the cell's own size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.ops import DTYPE_BYTES
from cost_models.price import CollectiveKind
from piper.graph import Units
from piper.search.chain_bounds import chains
from piper.search.choices import FRACTION
from piper.search.held import held_at_least, held_microbatches, held_usually
from piper.search.keeping import Replicas, StateRules
from piper.search.network import Network
from piper.search.schedule_rules import RULES, ScheduleRule
from piper.search.space import (
    CUT_GRADIENTS,
    CUT_PARAMETERS,
    NODE,
    WORKINGS,
    Space,
    layers_of_share,
    recompute_text,
)
from piper.search.stage_costs import Cut, StageCosts, cut_of, stage_costs
from piper.search.unit_costs import UnitCosts, UnitCostTable, Working, is_aligned
from piper.strategy.cuts import EVEN

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RECEIVES = 2
"""That wait at a time beside a pass: for the next input and the next gradient."""
_LARGE_BYTES = 2.0**24
"""Of a message between stages, for the processors that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Layouts that are cut alike and run passes of the same kinds.

    Args:
        pp, vp: pipeline ranks, stages on each.
        schedule, cut: indices into the choices.
        rule: of the schedule.
        members: int64 [n], the layouts.
    """

    pp: int
    vp: int
    schedule: int
    cut: int
    rule: ScheduleRule
    members: Ints

    @property
    def num_stages(self) -> int:
        """Return the stages of the model."""
        return self.pp * (self.vp if self.rule.layout != "bidirectional" else 1)

    @property
    def watched(self) -> list[int]:
        """Return the ranks whose memory bounds look at."""
        return sorted({0, min(1, self.pp - 1), self.pp - 1})

    @property
    def ranks(self) -> list[int]:
        """Return the pipeline rank of each stage; of two that hold the same stages the first."""
        found = [0] * self.num_stages
        for rank in reversed(range(self.pp)):
            for stage in self.stages_of_rank(rank):
                found[stage] = rank
        return found

    def stages_of_rank(self, rank: int) -> list[int]:
        """Return the stages of the model on a rank."""
        if self.rule.layout == "bidirectional":
            return sorted({rank, self.pp - 1 - rank})
        if self.rule.layout == "v":
            return [rank, 2 * self.pp - 1 - rank]
        return list(range(rank, self.num_stages, self.pp))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Loads:
    """What microbatches take of watched ranks, float64 [cells, watched ranks] or [cells].

    Args:
        held: bytes, at least.
        late_ns: that passes of a step wait for copies to the host, at least.
        usual, usual_moved: the same with what lives for a moment, as it usually is.
        copied_ns: for which the copies to the host of a step take the link.
        by_processors: part of kernels that processors bound: what messages beside them slow, in estimates.
        shared_ns: for which passes of all ranks take the cores that they share.
    """

    held: Floats
    late_ns: Floats
    usual: Floats
    usual_moved: Floats
    copied_ns: Floats
    by_processors: Floats
    shared_ns: Floats


@dataclass(kw_only=True)
class CellTable:
    """Bounds of all cells of a space.

    Args:
        space: of the search.
        units: of the model.
        counts_of: (cut, pipeline rank of each stage, recompute) -> units of each stage.
        costs: of units, probed on demand.
        rules: of states.
        network: prices of messages.
        capacity_bytes: of a device, for tensors.
        framework_bytes: on every device.
        has_barrier: whether the norm of gradients is awaited in every step.
        global_batch: of the job.

    Attributes:
        layout, working: int64 [cells]: a layout, and a row of its table of workings.
        frame: int64 [cells], index in `frames`.
        passes_ns, launches_ns: float64 [cells], of the passes, and of what hosts launch for them.
        bound_ns: float64 [cells], of the step; infinite where nothing fits.
        likely_ns: float64 [cells], the same of what should fit, with what is gathered waited for: no bound,
            but the order in which cells are looked at.
        least_bytes: float64 [cells], that the worst rank needs; infinite where nothing fits.
        refined: bool [cells].
        too_big: int64 [cells], points of the cell that cannot fit.
    """

    space: Space
    units: Units
    counts_of: Callable[[str, Sequence[int], str], tuple[int, ...]]
    costs: UnitCostTable
    rules: StateRules
    network: Network
    capacity_bytes: float
    framework_bytes: float
    has_barrier: bool
    global_batch: int
    layout: Ints = field(init=False)
    working: Ints = field(init=False)
    frame: Ints = field(init=False)
    passes_ns: Floats = field(init=False)
    launches_ns: Floats = field(init=False)
    bound_ns: Floats = field(init=False)
    likely_ns: Floats = field(init=False)
    least_bytes: Floats = field(init=False)
    refined: npt.NDArray[np.bool_] = field(init=False)
    too_big: Ints = field(init=False)
    _cuts: dict[tuple[object, ...], Cut] = field(default_factory=dict)
    _ends: dict[tuple[object, ...], Ends] = field(default_factory=dict)
    _known: dict[tuple[object, ...], StageCosts] = field(default_factory=dict)
    _factors: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.frames = tuple(self._frames())
        parts = [self._cells(number, frame) for number, frame in enumerate(self.frames)]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else []
        empty = np.zeros(0, dtype=np.int64)
        self.layout, self.working, self.frame = columns or (empty, empty, empty)
        size = len(self.layout)
        names = ("passes_ns", "launches_ns", "bound_ns", "likely_ns", "least_bytes")
        self.passes_ns, self.launches_ns, self.bound_ns, self.likely_ns, self.least_bytes = (
            np.zeros(size) for _ in names
        )
        self.refined, self.too_big = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.int64)
        self._bound_all()

    def __len__(self) -> int:
        return len(self.layout)

    def _frames(self) -> Iterator[Frame]:
        columns = self.space.layouts
        keys = np.stack([columns[name] for name in ("pp", "vp", "schedule", "cut")], axis=1)
        distinct, number = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(number.reshape(-1), kind="stable")
        ends = np.cumsum(np.bincount(number.reshape(-1), minlength=len(distinct)))
        names = self.space.choices.texts("schedule")
        for (pp, vp, schedule, cut), first, last in zip(
            distinct.tolist(), [0, *ends[:-1].tolist()], ends.tolist(), strict=True
        ):
            rule = RULES.get(names[schedule], ScheduleRule(splits=True, overlaps=True))
            members = order[first:last]
            yield Frame(pp=pp, vp=vp, schedule=schedule, cut=cut, rule=rule, members=members)

    def _cells(self, number: int, frame: Frame) -> tuple[Ints, Ints, Ints]:
        tables = self.space.working_of[frame.members]
        layout, working = [], []
        for table in np.unique(tables).tolist():
            mine, rows = frame.members[tables == table], len(self.space.workings[table])
            layout.append(np.repeat(mine, rows))
            working.append(np.tile(np.arange(rows, dtype=np.int64), len(mine)))
        found = np.concatenate(layout)
        return found, np.concatenate(working), np.full(len(found), number, dtype=np.int64)

    def refine(self, cells: Ints) -> None:
        """Bound cells from probes of their own way of working."""
        for number in np.unique(self.frame[cells]).tolist():
            mine = cells[self.frame[cells] == number]
            self._bound(self.frames[number], mine, exact=True)
        self.refined[cells] = True

    def workings(self, cells: Ints, *, split: bool) -> list[Working]:
        """Return how cells work; recompute is "none", "selective" or "full"."""
        columns, layouts = self.space.layouts, self.layout[cells]
        ways = self.ways(cells)
        names = ("sp", "async_tp", "recompute")
        texts = [
            [self.space.choices.texts(n)[i] for i in way.tolist()] for n, way in zip(names, ways, strict=True)
        ]
        degrees = [columns[name][layouts].tolist() for name in ("tp", "cp", "ep", "etp", "micro_batch")]
        return [
            Working(
                tp=tp, cp=cp, ep=ep, etp=etp, micro_batch=size, sp=sp, async_tp=late,
                recompute="full" if again.startswith("full") else again, split=split,
            )
            for tp, cp, ep, etp, size, sp, late, again in zip(*degrees, *texts, strict=True)
        ]  # fmt: skip

    def needed_at_least(self, cell: int) -> tuple[float, int]:
        """Return the bytes that the worst watched rank of a cell needs at least, and that pipeline rank."""
        frame, layouts = self.frames[int(self.frame[cell])], np.array([self.layout[cell]])
        ends, costs = self._ends_of(frame), self.costs_of(cell)
        place = int(np.searchsorted(frame.members, layouts[0]))
        number = self.microbatches(layouts).astype(np.float64)
        held = self._activations(
            frame, costs, np.zeros(1, dtype=np.int64), number=number, held_of=held_microbatches
        )[0]
        found = [
            static[place] + (0.0 * held if away else held)
            for static, away, points in zip(
                ends.static_bytes, ends.moves_activations, ends.points, strict=True
            )
            if points[place]
        ]
        least = min(found, key=lambda needed: float(needed.max()))
        return float(least.max()), frame.watched[int(np.argmax(least))]

    def with_values(self, wanted: Mapping[str, str]) -> Ints:
        """Return the cells with some values; those of how states are kept do not count."""
        keep = np.ones(len(self), dtype=np.bool_)
        ways = dict(zip(WORKINGS, self.ways(np.arange(len(self))), strict=True))
        layers = self.space.layers_of_stage[self.layout]
        for name, value in wanted.items():
            if name == "recompute":
                keys = np.stack([ways[name], layers], axis=1)
                distinct, number = np.unique(keys, axis=0, return_inverse=True)
                texts = self.space.choices.texts(name)
                same = [
                    recompute_text(texts[mode], layers=count) == value for mode, count in distinct.tolist()
                ]
                keep &= np.array(same, dtype=np.bool_)[number.reshape(-1)]
            elif name in ways or name == "schedule":
                column = ways[name] if name in ways else self.space.layouts[name][self.layout]
                same = [text == value for text in self.space.choices.texts(name)]
                keep &= np.array(same, dtype=np.bool_)[column]
            elif name in self.space.layouts:
                keep &= self.space.layouts[name][self.layout] == int(value)
        return np.flatnonzero(keep)

    def costs_of(self, cell: int) -> StageCosts:
        """Return the costs of the stages of one cell, of its own way of working."""
        frame, layout = self.frames[int(self.frame[cell])], int(self.layout[cell])
        columns = self.space.layouts
        sp, late, again = (int(way[0]) for way in self.ways(np.array([cell])))
        degrees = [int(columns[name][layout]) for name in ("tp", "cp", "ep", "etp", "micro_batch")]
        texts = self.space.choices.texts("recompute")
        return self._stage_costs(frame, [[*degrees, sp, late]], texts[again], exact=True)

    def is_exact(self, cell: int) -> bool:
        """Return whether groups of the cell lie alike on all nodes: its exchanges are in its bounds."""
        layout, columns = int(self.layout[cell]), self.space.layouts
        tp, cp, ep, etp = (int(columns[name][layout]) for name in ("tp", "cp", "ep", "etp"))
        return is_aligned(Working(tp=tp, cp=cp, ep=ep, etp=etp), self.space.gpus_per_node)

    def microbatches(self, layouts: Ints) -> Ints:
        """Return the whole microbatches of a replica, int64 [layouts]."""
        columns = self.space.layouts
        number = self.global_batch // columns["dp"][layouts] // columns["micro_batch"][layouts]
        return np.asarray(np.maximum(1, number))

    def _bound_all(self) -> None:
        """Bound every cell from probes of the largest microbatch."""
        starts = np.searchsorted(self.frame, np.arange(len(self.frames) + 1))
        for number, frame in enumerate(self.frames):
            self._bound(frame, np.arange(starts[number], starts[number + 1]), exact=False)

    def ways(self, cells: Ints) -> tuple[Ints, Ints, Ints]:
        """Return sp, async_tp and recompute of cells, as indices into the choices."""
        tables = self.space.working_of[self.layout[cells]]
        found = tuple(np.zeros(len(cells), dtype=np.int64) for _ in range(3))
        for number in np.unique(tables).tolist():
            mine, columns = tables == number, self.space.workings[number].columns
            for column, name in zip(found, ("sp", "async_tp", "recompute"), strict=True):
                column[mine] = columns[name][self.working[cells[mine]]]
        return found[0], found[1], found[2]

    def _bound(self, frame: Frame, cells: Ints, *, exact: bool) -> None:
        """Bound cells of one frame; `exact`: from probes of their own sizes."""
        columns = self.space.layouts
        again_texts = self.space.choices.texts("recompute")
        sp, late, again = self.ways(cells)
        sizes = columns["micro_batch"][self.layout[cells]]
        degrees = [columns[name][self.layout[cells]] for name in ("tp", "cp", "ep", "etp")]
        largest = int(columns["micro_batch"].max(initial=1))
        keys = np.stack([*degrees, sizes if exact else np.full(len(cells), largest), sp, late], axis=1)
        for number in np.unique(again).tolist():
            mine = again == number
            distinct, way = np.unique(keys[mine], axis=0, return_inverse=True)
            costs = self._stage_costs(frame, distinct.tolist(), again_texts[number], exact=exact)
            scale = np.ones(int(mine.sum())) if exact else sizes[mine] / largest
            self._set(frame, cells[mine], costs, way=way.reshape(-1), scale=scale, exact=exact)

    def _stage_costs(
        self, frame: Frame, keys: Sequence[Sequence[int]], again: str, *, exact: bool
    ) -> StageCosts:
        """Return the costs of the stages of a frame; frames of one cut share them."""
        key = (*self._cut_key(frame), frame.rule.splits, again, exact, *map(tuple, keys))
        if key not in self._known:
            self._known[key] = self._new_stage_costs(frame, keys, again, exact=exact)
        return self._known[key]

    def _new_stage_costs(
        self, frame: Frame, keys: Sequence[Sequence[int]], again: str, *, exact: bool
    ) -> StageCosts:
        sps, lates = self.space.choices.texts("sp"), self.space.choices.texts("async_tp")
        plain, twice = [], []
        mode = "full" if again.startswith("full") else again
        for tp, cp, ep, etp, size, sp, late in keys:
            way = Working(
                tp=tp, cp=cp, ep=ep, etp=etp, micro_batch=size, split=frame.rule.splits,
                sp=sps[sp], async_tp=lates[late],
            )  # fmt: skip
            price = self.costs.of if is_aligned(way, self.space.gpus_per_node) else self.costs.kernels_of
            once = more = price(way)
            if mode != "none":
                more = price(replace(way, recompute=mode)) if exact else self._again(way, once, mode=mode)
            plain.append(more if mode == "selective" else once)
            twice.append(more)
        return stage_costs(self.cut(frame, again), plain, twice, tp=[key[0] for key in keys])

    def _again(self, way: Working, once: UnitCosts, *, mode: str) -> UnitCosts:
        """Return no more than units cost that are computed again, by a probe of the usual way of working."""
        usual = replace(way, sp="on", async_tp="off", split=False)
        none, again = self.costs.of(usual), self.costs.of(replace(usual, recompute=mode))
        return once.computed_again(none, again)

    def cut(self, frame: Frame, again: str) -> Cut:
        """Return the default cut of a frame, with the layers that are computed again."""
        key = (*self._cut_key(frame), again)
        if key not in self._cuts:
            text = self.space.choices.texts("cut")[frame.cut]
            counts = self.counts_of(text, frame.ranks, again)
            layers = -(-self.units.layers // frame.num_stages)
            number = max(counts) if again == "full" else 0
            if again.startswith("full:"):
                number = layers_of_share(again, layers) if again.endswith(FRACTION) else int(again[5:])
            self._cuts[key] = cut_of(counts, self.costs.kinds, recomputed=number)
        return self._cuts[key]

    def _cut_key(self, frame: Frame) -> tuple[object, ...]:
        """Return what the units of its stages depend on."""
        even = self.space.choices.texts("cut")[frame.cut] == EVEN
        return (frame.num_stages,) if even else (frame.num_stages, frame.pp, frame.rule.layout)

    def _ends_of(self, frame: Frame) -> Ends:
        key = (*self._cut_key(frame), frame.pp, frame.rule.layout, frame.schedule, frame.vp)
        if key not in self._ends:
            self._ends[key] = Ends.of(self, frame)
        return self._ends[key]

    def _set(
        self, frame: Frame, cells: Ints, costs: StageCosts, *, way: Ints, scale: Floats, exact: bool
    ) -> None:
        layouts = self.layout[cells]
        number = self.microbatches(layouts).astype(np.float64)
        links = chains(
            span=costs.span_ns, lead=costs.lead_ns, trail=costs.trail_ns, busy=costs.busy_ns,
            slowed=costs.slowed_ns, drain=costs.drain_ns, host=costs.host_ns, pp=frame.pp,
            layout=frame.rule.layout, overlaps=frame.rule.overlaps,
        ).take(way)  # fmt: skip
        if self.has_barrier:
            hop = self._hop_ns(frame, layouts, costs.sent_bytes[way] * scale)
            passes = links.bound_ns(number, scale=scale, transfer_ns=hop)
        else:
            passes = links.busiest_ns(number, scale=scale)
        self.passes_ns[cells], self.launches_ns[cells] = passes, links.launches_ns(number)
        loads = self._loads(frame, cells, costs, way=way, scale=scale, exact=exact)
        self._keep(frame, cells, loads, exact=exact)

    def _loads(
        self, frame: Frame, cells: Ints, costs: StageCosts, *, way: Ints, scale: Floats, exact: bool
    ) -> _Loads:
        """Return what the microbatches of cells take of watched ranks."""
        number = self.microbatches(self.layout[cells]).astype(np.float64)
        size, copy = scale[:, None], self.network.host_copy_ns_per_byte
        held_of = held_microbatches if exact else held_at_least
        held = self._activations(frame, costs, way, number=number, held_of=held_of) * size
        usual = held
        if not exact:
            often = self._activations(frame, costs, way, number=number, held_of=held_usually) * size
            usual = np.maximum(often, held)
        passing, whole = (each[way] * size for each in self._passing(frame, costs))
        waits = _taken(costs, way)
        late = waits_for_copies_ns(
            waits, frame, capacity_bytes=self.capacity_bytes, copy_ns_per_byte=copy, scale=scale
        )
        return _Loads(
            held=held,
            late_ns=late * (1.0 if frame.rule.overlaps else number),
            usual=usual + passing,
            usual_moved=whole + passing,
            copied_ns=number * scale * self._moved_bytes(frame, costs)[way] * copy,
            by_processors=costs.by_processors[way],
            shared_ns=number * self._shared_ns(frame, cells, scale * costs.busy_ns.sum(axis=(1, 2))[way]),
        )

    def _shared_ns(self, frame: Frame, cells: Ints, busy_ns: Floats) -> Floats:
        """Return the time of a microbatch on the cores that all ranks share, [cells]; 0: each has its own.

        Args:
            frame, cells: which.
            busy_ns: of the kernels of one replica of all stages, [cells].
        """
        cost_model = self.network.cost_model
        cores = cost_model.cluster.host.cores
        if cores is None or not cost_model.stack.contention:
            return np.zeros(len(cells))
        passes = ("F", "BI", "BW") if frame.rule.splits else ("F", "B")
        called_ns = 1e9 * cost_model.pass_overhead.seconds * frame.num_stages * len(passes)
        columns, layouts = self.space.layouts, self.layout[cells]
        ranks = columns["tp"][layouts] * columns["cp"][layouts] * columns["dp"][layouts]
        return np.asarray((busy_ns + called_ns) * ranks / cores)

    def _keep(self, frame: Frame, cells: Ints, loads: _Loads, *, exact: bool) -> None:
        """Bound cells whose passes are known, under the cheapest way of keeping states."""
        ends = self._ends_of(frame)
        place = np.searchsorted(frame.members, self.layout[cells])
        passes, launches = self.passes_ns[cells], self.launches_ns[cells]
        usual_ns = passes * self._longer(
            frame, self.layout[cells], by_processors=loads.by_processors, exact=exact
        )
        usual_ns = np.maximum(usual_ns, loads.shared_ns)
        bound, smallest, likely = (np.full(len(cells), np.inf) for _ in range(3))
        dead = np.zeros(len(cells), dtype=np.int64)
        for index, away in enumerate(ends.moves_activations):
            static, step_ns = ends.static_bytes[index][place], ends.step_ns[index][place]
            stream_ns, copied_ns = ends.stream_ns[index][place], loads.copied_ns * away
            needed = static + (0.0 if away else loads.held)
            fits = (needed <= self.capacity_bytes).all(axis=1)
            late = passes + loads.late_ns * away + step_ns
            least = np.maximum(np.maximum(late, stream_ns), np.maximum(launches, copied_ns))
            bound = np.minimum(bound, np.where(fits, least, np.inf))
            usual = static + (loads.usual_moved if away else loads.usual) <= self.capacity_bytes
            waited = np.maximum(np.maximum(usual_ns + step_ns, stream_ns), launches) + copied_ns
            beside_ns = ends.held[index][place] * np.minimum(stream_ns, usual_ns)
            waited = waited + loads.by_processors * beside_ns
            likely = np.minimum(likely, np.where(usual.all(axis=1), waited, np.inf))
            has = np.isfinite(step_ns) & fits
            smallest = np.minimum(smallest, np.where(has, needed.max(axis=1), np.inf))
            dead += np.where(fits, 0, ends.points[index][place])
        self.bound_ns[cells], self.too_big[cells] = bound, dead
        self.least_bytes[cells], self.likely_ns[cells] = smallest, likely

    def _longer(self, frame: Frame, layouts: Ints, *, by_processors: Floats, exact: bool) -> Floats:
        """Return by how much passes are longer than their bound; see [Note: likely times]."""
        degrees = [self.space.layouts[name][layouts] for name in ("tp", "cp", "micro_batch", "dp")]
        distinct, number = np.unique(np.stack(degrees, axis=1), axis=0, return_inverse=True)
        waits, sizes = [], []
        for tp, cp, size, dp in distinct.tolist():
            apart = tp * cp * dp if frame.pp > 1 else 0
            waits.append(RECEIVES * self.network.held_by_message(_LARGE_BYTES, apart=apart))
            sizes.append(1.0 if exact else self._size_factor(tp, cp, size))
        way = number.reshape(-1)
        return np.asarray(np.array(sizes)[way] * (1.0 + by_processors * np.array(waits)[way]))

    def _size_factor(self, tp: int, cp: int, size: int) -> float:
        """Return by how much a sequence takes longer in microbatches of a size than in the largest ones."""
        largest = int(self.space.layouts["micro_batch"].max(initial=1))
        if (tp, cp, size) not in self._factors:
            alone = self._size_factor(1, 1, size) if tp > 1 and cp > 1 else 1.0
            pairs = [(tp, 1), (1, cp)] if tp > 1 and cp > 1 else [(tp, cp)]
            found = 1.0 / alone
            for one in pairs if size < largest else ():
                small, large = (
                    self.costs.of(Working(tp=one[0], cp=one[1], micro_batch=count)).busy_ns.sum() / count
                    for count in (size, largest)
                )
                found *= small / large
            self._factors[tp, cp, size] = found
        return self._factors[tp, cp, size]

    def _hop_ns(self, frame: Frame, layouts: Ints, size_bytes: Floats) -> Floats:
        """Return the price of a message to the next rank."""
        columns = self.space.layouts
        apart = columns["tp"][layouts] * columns["cp"][layouts] * columns["dp"][layouts]
        found = np.zeros(len(layouts))
        if frame.pp == 1:
            return found
        keys = np.stack([apart, np.floor(size_bytes)], axis=1)
        distinct, index = np.unique(keys, axis=0, return_inverse=True)
        prices = [self.network.transfer_ns(size, apart=int(step)) for step, size in distinct.tolist()]
        return np.array(prices)[index.reshape(-1)]

    def _passing(self, frame: Frame, costs: StageCosts) -> tuple[Floats, Floats]:
        """Return what lives for a moment, and of a microbatch that is moved away: [ways, watched ranks]."""
        stages = [frame.stages_of_rank(rank) for rank in frame.watched]
        return (
            np.stack([costs.transient_bytes[:, listed].max(axis=1) for listed in stages], axis=1),
            np.stack([costs.kept_bytes[:, listed].max(axis=1) for listed in stages], axis=1),
        )

    def _moved_bytes(self, frame: Frame, costs: StageCosts) -> Floats:
        """Return what the busiest rank copies to its host for a microbatch, at least, float64 [ways]."""
        inside = np.maximum(costs.kept_bytes - costs.border_bytes, 0.0)
        ranks = [inside[:, frame.stages_of_rank(rank)].sum(axis=1) for rank in range(frame.pp)]
        return np.asarray(np.stack(ranks).max(axis=0)) * (
            0.5 if frame.rule.layout == "bidirectional" else 1.0
        )

    def _activations(
        self, frame: Frame, costs: StageCosts, way: Ints, *, number: Floats, held_of: Callable[..., Any]
    ) -> Floats:
        """Return what ranks hold of microbatches, float64 [cells, watched ranks]."""
        schedule = self.space.choices.texts("schedule")[frame.schedule]
        found = np.zeros((len(way), len(frame.watched)))
        for count in np.unique(number).tolist():
            mine = number == count
            held = held_of(schedule, pp=frame.pp, vp=frame.vp, num_microbatches=int(count))
            for place, rank in enumerate(frame.watched):
                stages = frame.stages_of_rank(rank)
                kept = costs.kept_bytes[:, stages] @ held[rank][: len(stages)]
                found[mine, place] = kept[way[mine]]
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ends:
    """What each way of keeping states costs the layouts of a frame, at least.

    Args:
        keepings: (zero, hsdp, index of offload).
        static_bytes: by keeping, float64 [layouts, watched ranks].
        step_ns: by keeping, float64 [layouts], beside the passes; infinite where a layout has it not.
        stream_ns: by keeping, float64 [layouts], for which a stream of messages is busy.
        held: by keeping, float64 [layouts], part of the processors that these messages hold.
        moves_activations: by keeping, whether activations wait on the host.
        points: by keeping, int64 [layouts], how many points have it.
    """

    keepings: tuple[tuple[int, int, int], ...]
    static_bytes: tuple[Floats, ...]
    step_ns: tuple[Floats, ...]
    stream_ns: tuple[Floats, ...]
    held: tuple[Floats, ...]
    moves_activations: tuple[bool, ...]
    points: tuple[Ints, ...]

    @classmethod
    def of(cls, table: CellTable, frame: Frame) -> Ends:
        """Return them from probes of states."""
        space, columns = table.space, table.space.layouts
        members = frame.members
        degrees = np.stack([columns[name][members] for name in ("tp", "cp", "ep", "etp")], axis=1)
        distinct, way = np.unique(degrees, axis=0, return_inverse=True)
        way = way.reshape(-1)
        largest = int(columns["micro_batch"].max(initial=1))
        listed = [
            table.costs.of(
                Working(tp=tp, cp=cp, ep=ep, etp=etp, micro_batch=largest, split=frame.rule.splits)
            )
            for tp, cp, ep, etp in distinct.tolist()
        ]
        costs = stage_costs(table.cut(frame, "none"), listed, listed, tp=distinct[:, 0].tolist())
        ranks = [frame.stages_of_rank(rank) for rank in range(frame.pp)]
        busiest = _Moved.of(frame, costs, listed, cut=table.cut(frame, "none"))
        early, late = first_stages(frame)
        number = table.microbatches(members).astype(np.float64)
        found: dict[str, list[Any]] = {
            name: [] for name in ("static", "step", "stream", "held", "moves", "points")
        }
        keepings, points = _distinct_keepings(space, members)
        known: dict[tuple[int, int], Any] = {}
        for (zero, hsdp, offload), count in zip(keepings, points, strict=True):
            away = space.choices.texts("offload")[offload]
            replicas = replicas_of(space, members, hsdp=hsdp)
            if (zero, hsdp) not in known:
                once = _times(table, costs, way, stages=(early, late), replicas=replicas, zero=zero)
                moved = busiest.stream_ns(table, replicas=replicas, zero=zero, way=way, number=number)
                known[zero, hsdp] = once, moved, held_by_messages(table, costs, replicas=replicas, zero=zero)
            watched = [frame.stages_of_rank(rank) for rank in frame.watched]
            dense, expert, other = (
                np.stack([values[:, stages].sum(axis=1) for stages in watched], axis=1)[way]
                for values in (costs.dense, costs.expert, costs.other_bytes)
            )
            static = table.rules.static_bytes(dense, expert, replicas=replicas, zero=zero, offload=away)
            found["static"].append(static + other * 0 + table.framework_bytes)
            step, stream, held = known[zero, hsdp]
            hidden = space.choices.numbers("bucket_mb") != (0,)
            updates, norms = (
                np.stack([each[:, stages].max(axis=1) for stages in ranks], axis=1)
                for each in (costs.least_update_ns, costs.least_norm_ns)
            )
            update = updates[:, [r for r, stages in enumerate(ranks) if min(stages) in early]].min(axis=1)
            update = update + norms.min(axis=1)
            share = table.rules.update_share(replicas, zero=zero) * (away in {"none", "activations"})
            least = update[way] * share
            if table.has_barrier:
                least = least + step[0] + (0.0 if hidden else step[1])
            found["step"].append(np.where(count > 0, least, np.inf))
            found["stream"].append(stream)
            found["held"].append(held)
            found["moves"].append(away == "activations")
            found["points"].append(count)
        return cls(
            keepings=tuple(keepings),
            static_bytes=tuple(found["static"]),
            step_ns=tuple(found["step"]),
            stream_ns=tuple(found["stream"]),
            held=tuple(found["held"]),
            moves_activations=tuple(found["moves"]),
            points=tuple(found["points"]),
        )


def _taken(costs: StageCosts, way: Ints) -> StageCosts:
    """Return what copies depend on, of several ways of working."""
    names = ("kept_bytes", "border_bytes", "span_ns")
    return replace(costs, **{name: getattr(costs, name)[way] for name in names})


def waits_for_copies_ns(
    costs: StageCosts,
    frame: Frame,
    *,
    capacity_bytes: float,
    copy_ns_per_byte: float,
    scale: Floats | float = 1.0,
) -> Floats:
    """Return how much longer than its kernels F takes on every rank where activations are moved away, [n].

    At the end of F what is not copied yet must fit; copies begin no sooner than the pass. `scale`: on sizes
    and times.
    """
    each = np.asarray(scale)
    inside = np.maximum(costs.kept_bytes - costs.border_bytes, 0.0) * each[..., None]
    longer = (inside - capacity_bytes) * copy_ns_per_byte - costs.span_ns[:, 0] * each[..., None]
    of_rank = [longer[:, frame.stages_of_rank(rank)].max(axis=1) for rank in range(frame.pp)]
    return np.asarray(np.maximum(np.stack(of_rank).min(axis=0), 0.0))


def replicas_of(space: Space, layouts: Ints, *, hsdp: int) -> Replicas:
    """Return over how many ranks the states of layouts may be cut."""
    columns = space.layouts
    tp, cp, dp, ep, etp = (columns[name][layouts] for name in ("tp", "cp", "dp", "ep", "etp"))
    replicas, experts = dp * cp, ep * etp
    node = np.where(space.gpus_per_node % tp == 0, space.gpus_per_node // tp, replicas)
    shards = (
        replicas if not hsdp else np.minimum(node, replicas) if hsdp == NODE else np.full_like(replicas, hsdp)
    )
    return Replicas(
        tp=tp,
        replicas=replicas,
        experts=np.maximum(1, replicas * tp // experts),
        apart=experts,
        shards=shards,
    )


def held_by_messages(table: CellTable, costs: StageCosts, *, replicas: Replicas, zero: int) -> Floats:
    """Return which part of the processors the messages of replicas hold, float64 [layouts]."""
    element = DTYPE_BYTES[table.rules.states.reduce]
    size = float((costs.dense + costs.expert).max(initial=1.0)) * element
    pairs = np.stack([replicas.cut(zero)[0], replicas.tp], axis=1)
    distinct, number = np.unique(pairs, axis=0, return_inverse=True)
    kind = CollectiveKind.REDUCE_SCATTER
    held = [table.network.held(kind, size, ranks=ranks, stride=tp) for ranks, tp in distinct.tolist()]
    return np.array(held)[number.reshape(-1)]


def _distinct_keepings(space: Space, members: Ints) -> tuple[list[tuple[int, int, int]], list[Ints]]:
    """Return the ways of keeping states, and how many points of each layout have them."""
    found: dict[tuple[int, int, int], dict[int, int]] = {}
    tables = space.keeping_of[members]
    for number in np.unique(tables).tolist():
        columns = space.keepings[number].columns
        rows = np.stack([columns[name] for name in ("zero", "hsdp", "offload")], axis=1)
        for row in map(tuple, rows.tolist()):
            counts = found.setdefault(row, {})
            counts[number] = counts.get(number, 0) + 1
    keepings = sorted(found)
    return keepings, [
        np.array([found[key].get(number, 0) for number in tables.tolist()], dtype=np.int64)
        for key in keepings
    ]


def first_stages(frame: Frame) -> tuple[list[int], list[int]]:
    """Return the first stages of the ranks that a step may begin on, and of those that it may end on."""
    firsts = [min(frame.stages_of_rank(rank)) for rank in range(frame.pp)]
    return sorted({0}), sorted(set(firsts))


def _times(
    table: CellTable, costs: StageCosts, way: Ints, *, stages: tuple[list[int], list[int]],
    replicas: Replicas, zero: int,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return lower bounds of what a step begins and ends with: (gather, reduction) of a first stage."""
    rules, network = table.rules, table.network
    early, late = (
        [each[:, listed].min(axis=1)[way] for each in (costs.dense, costs.expert)] for listed in stages
    )
    gather = rules.gather_ns(network, early[0], early[1], replicas=replicas, zero=zero, floor=True)
    reduce = rules.reduce_ns(network, late[0], late[1], replicas=replicas, zero=zero, floor=True)
    once = gather if zero < CUT_PARAMETERS and not rules.gathers_overlap else np.zeros_like(gather)
    return once, reduce if zero < CUT_PARAMETERS else np.zeros_like(reduce)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moved:
    """Elements that the rank with most of them reduces, and gathers, for a microbatch; float64 [ways].

    Of every stage the unit with most is gathered before: a backward may begin with what a forward ended on.
    Two copies of a model (a bidirectional order) reduce, and gather, once per step. Where parameters are
    cut, every unit is a message of its own: float64 [ways] `units` with dense parameters.
    """

    dense: Floats
    expert: Floats
    gathered_dense: Floats
    gathered_expert: Floats
    units: Floats

    @classmethod
    def of(cls, frame: Frame, costs: StageCosts, units: Sequence[UnitCosts], *, cut: Cut) -> _Moved:
        ranks = [frame.stages_of_rank(rank) for rank in range(frame.pp)]
        there = (cut.plain + cut.again > 0)[None]
        found: list[Floats] = []
        busiest = np.stack([(costs.dense + costs.expert)[:, r].sum(axis=1) for r in ranks]).argmax(axis=0)
        rows = np.arange(len(units))
        for name in ("dense", "expert"):
            whole: Floats = getattr(costs, name)
            largest = (np.stack([getattr(unit, name) for unit in units])[:, None] * there).max(axis=2)
            for each in (whole, np.maximum(whole - largest, 0.0)):
                of_rank = np.stack([each[:, stages].sum(axis=1) for stages in ranks], axis=1)
                found.append(of_rank[rows, busiest] * (frame.rule.layout != "bidirectional"))
        counts = np.array([[cut.counts[stage] for stage in stages] for stages in ranks], dtype=np.float64)
        return cls(
            dense=found[0],
            gathered_dense=found[1],
            expert=found[2],
            gathered_expert=found[3],
            units=np.maximum(counts - 1, 0).sum(axis=1)[busiest],
        )

    def stream_ns(
        self, table: CellTable, *, replicas: Replicas, zero: int, way: Ints, number: Floats
    ) -> Floats:
        """Return for how long a rank's stream of messages is busy in a step, at least, float64 [layouts]."""
        rules, network, found = table.rules, table.network, np.zeros(len(way))
        if zero >= CUT_GRADIENTS:
            found += rules.reduce_ns(
                network, self.dense[way], self.expert[way], replicas=replicas, zero=zero, floor=True
            )
        if zero >= CUT_PARAMETERS:  # before the forward, and again before the backward
            found += 2 * rules.gather_ns(
                network, self.gathered_dense[way], self.gathered_expert[way], replicas=replicas, zero=zero,
                floor=True, pieces=self.units[way] * (self.gathered_dense[way] > 0),
            )  # fmt: skip
        return found * number
