"""Random legal strategies: every feature of the language on its own, drawn one after another from a seed.

To add a feature: a function that adds to a `Draft`, and one line in `FEATURES` at the place where what it
reads is known. A draft is directives (as a strategy file has them) and the options of a job; all that is
drawn must be legal, so that any violation in the compiled plan is a fault of ours.

`compile_drawn` takes some milliseconds: models are made by hand (`tests.models`) and made once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from piper.compiler import compile_graph
from piper.directives import Order
from piper.errors import StrategyError
from piper.graph import CapturedModel, Graph, build_graph, default_cut, units_of
from piper.schedules import SCHEDULES, Rows, copies_of, find_schedule, schedule_rows
from piper.strategy import Strategy, complete, resolve
from piper.strategy.files import parse_directive
from piper.strategy.places import with_places
from piper.strategy.strategy import facts
from simulator.plan import Plan
from tests.facts import with_tied_head
from tests.graphs import HEADS, transformer
from tests.models import captured
from tests.random_parts import with_random_parts

Slot = list[tuple[str, int, int]]
"""Passes that may overlap: (letter, stage, microbatch)."""


@lru_cache(maxsize=512)
def _model(regions: str, layers: int, *, micro_batch: int, tied: bool, dtype: str) -> CapturedModel:
    """Return the toy model, or ("dense", "experts") a transformer with regions that can be cut."""
    if not regions:
        return captured(layers=layers, tied=tied, micro_batch=micro_batch, dtype=dtype)
    model = transformer(layers=layers, micro_batch=micro_batch, experts=regions == "experts")
    return with_tied_head(model) if tied else model


@dataclass(kw_only=True)
class Draft:
    """A strategy that is being drawn.

    Args:
        choose: the source of randomness.
        directives: as a strategy file has them.
        homes: by stage its pipeline rank.
        microbatches: of a replica.
        regions: "": the toy model; "dense", "experts": a transformer with regions that can be cut.
        split_backwards: share of backwards that random rows split into BI and BW.
        in_order: whether random rows use values in the order in which they are sent.
        meshes: by pipeline rank (tp, dp), where they are not those of the job.
        parts: seed of rows that order parts of stages, or None: rows order whole stages.
        features: names of what was drawn, for messages.
    """

    choose: random.Random
    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    regions: str = ""
    layers: int = 4
    tied: bool = False
    homes: tuple[int, ...] = (0,)
    microbatches: int = 1
    global_batch: int = 1
    dtype: str = "bf16"
    optimizer: str = "adamw"
    clip: float | None = 1.0
    split_backwards: float = 0.0
    in_order: bool = True
    meshes: dict[int, tuple[int, int]] = field(default_factory=dict)
    parts: int | None = None
    directives: list[dict[str, Any]] = field(default_factory=list)
    features: list[str] = field(default_factory=list)

    @property
    def stages(self) -> int:
        return len(self.homes)

    @property
    def replicas(self) -> list[int]:
        """Return how many replicas stages have: those of the job's mesh first."""
        return [dp * self.cp for dp in (self.dp, *(dp for _, dp in self.meshes.values()))]

    @property
    def is_looped(self) -> bool:
        """Tell whether a named schedule can run it: one stage for each pipeline rank."""
        return self.homes == tuple(range(self.pp))

    def model(self, micro_batch: int) -> CapturedModel:
        """Return what capture would say at a microbatch size."""
        return _model(self.regions, self.layers, micro_batch=micro_batch, tied=self.tied, dtype=self.dtype)

    def add(self, op: str, **fields: Any) -> None:
        self.directives.append({"op": op, **fields})

    def __str__(self) -> str:
        return f"{', '.join(self.features)}: {self.directives}"


def drawn(seed: int) -> Draft:
    """Return the strategy of a seed, always the same."""
    draft = Draft(choose=random.Random(seed))
    for name, feature in FEATURES.items():
        before = (len(draft.directives), draft.tied, draft.parts)
        feature(draft)
        if before != (len(draft.directives), draft.tied, draft.parts):
            draft.features.append(name)
    return draft


def compile_drawn(draft: Draft, *, verified: bool = True) -> Plan:
    """Compile the toy model under a drawn strategy."""
    listed = tuple(
        parse_directive(entry, where=f"drawn.json:{line}") for line, entry in enumerate(draft.directives, 1)
    )
    directives = with_places(listed)
    strategy = Strategy(
        stated=facts(directives, where="drawn.json"), directives=directives, where="drawn.json"
    )
    resolved = resolve(
        strategy, gpus=None, gpus_per_node=8, global_batch=draft.global_batch, micro_batch=None
    )
    models = [draft.model(size) for size in resolved.captured_sizes]
    stages, complete_directives = complete(resolved, models[0])
    graph = build_graph(
        models,
        stages,
        replica_batch=resolved.replica_batch,
        dtype=draft.dtype,
        optimizer=draft.optimizer,
        clip_grad_norm=draft.clip,
    )
    if draft.parts is not None:
        others = (one for one in complete_directives if not isinstance(one, Order))
        complete_directives = (*others, OrderOfParts(seed=draft.parts))
    return compile_graph(
        graph, complete_directives, strategy=str(resolved.shorthand), notices=resolved.notices,
        verified=verified,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OrderOfParts(Order):
    """Random rows that divide stages and order their parts.

    Args:
        seed: of the rows.
    """

    seed: int

    def apply(self, graph: Graph) -> Graph:
        return with_random_parts(graph, random.Random(self.seed))


def _job(draft: Draft) -> None:
    draft.dtype = draft.choose.choice(["bf16", "fp32"])
    draft.optimizer = draft.choose.choice(["adamw", "sgd"])
    draft.clip = draft.choose.choice([None, 1.0])


def _model_shape(draft: Draft) -> None:
    draft.layers = draft.choose.randint(4, 10)
    draft.tied = draft.choose.random() < 0.4


def _regions(draft: Draft) -> None:
    """Take the transformer, whose regions can be cut, now and then; it has one dtype."""
    draft.regions = draft.choose.choice(["", "", "dense", "experts"])
    if draft.regions:
        draft.dtype, draft.layers = "bf16", min(draft.layers, 5)


def _cuts(draft: Draft) -> None:
    """Cut regions over tensor or context parallel ranks, and experts over the ranks of a stage."""
    if not draft.regions:
        return
    if draft.regions == "dense" and draft.choose.random() < 0.5:
        draft.tp = 2
        flags = {name: draft.choose.random() < 0.5 for name in ("sequence_parallel", "asynchronous")}
        draft.add("shard_tensor", filter={"TP": "*"}, **flags)
    if draft.choose.random() < 0.4:
        draft.cp = 2
        draft.add("shard_sequence", filter={"CP": "*"}, method=draft.choose.choice(["ring", "all_to_all"]))
    if draft.regions == "experts" and draft.dp * draft.cp % 2 == 0:
        draft.add("shard", filter={"EP": "*"}, degree=2, imbalance=draft.choose.choice([1.0, 1.5]))


def _degrees(draft: Draft) -> None:
    degrees = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2)]
    draft.pp, draft.dp = draft.choose.choice(degrees)


def _stages(draft: Draft) -> None:
    """Place one stage on each pipeline rank, or several: in a loop, down and up, or anyhow."""
    loop = tuple(range(draft.pp))
    most = (draft.layers + 2) // draft.pp
    layouts = [loop, loop]
    if most > 1:
        layouts += [loop * 2, loop + loop[::-1], _any_homes(draft, draft.choose.randint(1, draft.pp))]
    draft.homes = draft.choose.choice(layouts)


def _any_homes(draft: Draft, more: int) -> tuple[int, ...]:
    homes = [*range(draft.pp), *(draft.choose.randrange(draft.pp) for _ in range(more))]
    draft.choose.shuffle(homes)
    return tuple(homes)


def _units(draft: Draft) -> list[int] | None:
    """Return units of the model for each stage, uneven, or None: the default cut."""
    if draft.choose.random() < 0.6:
        return None
    cuts = sorted(draft.choose.sample(range(1, draft.layers + 2), draft.stages - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, draft.layers + 2], strict=True)]


def _place(draft: Draft) -> None:
    """Place by position on named axes, or by the reference's device lists."""
    units = _units(draft)
    listed = draft.choose.random() < 0.3 and draft.tp * draft.cp == 1
    if not listed:
        axes = {"pp": draft.pp, "dp": draft.dp, "tp": draft.tp, "cp": draft.cp}
        draft.add("mesh", axes=dict(draft.choose.sample(list(axes.items()), len(axes))))
    for stage, home in enumerate(draft.homes):
        where = {"at": {"pp": home}}
        if listed:
            where = {"devices": list(range(home * draft.dp, (home + 1) * draft.dp))}
        size = {} if units is None else {"units": units[stage]}
        draft.add("place", filter={"PP": stage}, **where, **size)


def _split(draft: Draft) -> None:
    """Cut the batch evenly or not, by the number or by the size of microbatches."""
    number, size = draft.choose.randint(1, 7), draft.choose.randint(1, 3)
    short = draft.choose.randrange(size)
    batch = number * size - short
    if draft.choose.random() < 0.5 and number <= batch:
        draft.add("split", filter={}, dim_name="MB", num_microbatches=number)
        draft.microbatches = number
    else:
        draft.add("split", filter={}, dim_name="MB", micro_batch=size)
        draft.microbatches = -(-batch // size)
    draft.global_batch = batch * draft.dp


def _stage_meshes(draft: Draft) -> None:
    """Arrange the ranks of some pipeline ranks in another way, where tensors can be cut over tp."""
    placed = any(entry["op"] == "mesh" for entry in draft.directives)
    if not draft.regions or not placed or draft.pp == 1 or draft.tp * draft.dp == 1:
        return
    cuts = [entry for entry in draft.directives if entry["op"] == "shard_tensor"]
    (split,) = (entry for entry in draft.directives if entry["op"] == "split")
    sizes = parse_directive(split, where="drawn.json").sizes(draft.global_batch // draft.dp)
    others = [
        (tp, draft.tp * draft.dp // tp)
        for tp in (1, 2, 4)
        if draft.tp * draft.dp % tp == 0
        and (tp == 1 or tp * draft.cp <= HEADS)
        and all(size * draft.dp * tp % (draft.tp * draft.dp) == 0 for size in sizes)
    ]
    others = [(tp, dp) for tp, dp in others if max(dp, draft.dp) % min(dp, draft.dp) == 0 and tp != draft.tp]
    if not others or draft.choose.random() < 0.3:
        return
    mesh = draft.choose.choice(others)
    ranks = draft.choose.sample(range(draft.pp), draft.choose.randint(1, draft.pp - 1))
    if draft.tied and len({homes in ranks for homes in (draft.homes[0], draft.homes[-1])}) > 1:
        return
    stages = [stage for stage, home in enumerate(draft.homes) if home in ranks]
    cuttable = [_has_layer(draft, stage) for stage in range(draft.stages)]
    kept = [stage for stage in range(draft.stages) if stage not in stages]
    if not any(cuttable[stage] for stage in (stages if mesh[0] > 1 else kept)):
        return
    draft.meshes = dict.fromkeys(ranks, mesh)
    draft.add("mesh", axes={"tp": mesh[0], "dp": mesh[1], "cp": draft.cp}, filter={"PP": stages})
    if not cuts:
        draft.add("shard_tensor", filter={"TP": "*"})


def _has_layer(draft: Draft, stage: int) -> bool:
    """Return whether a stage has a layer, not only the embedding or the head."""
    stated = [entry["units"] for entry in draft.directives if "units" in entry]
    counts = stated or default_cut(units_of(draft.model(1)), draft.stages)
    first = sum(counts[:stage])
    return first + counts[stage] > 1 and first <= draft.layers


def _replicate(draft: Draft) -> None:
    """Replicate all stages alike, or some in another way than the others."""
    if max(draft.replicas) == 1 and draft.choose.random() < 0.7:
        return
    some = {stage for stage in range(draft.stages) if draft.choose.random() < 0.5}
    others = set(range(draft.stages)) - some
    if draft.choose.random() < 0.5 or not some or not others:
        draft.add("replicate", filter={"PP": "*"}, **_state(draft))
        return
    draft.add("replicate", filter={"PP": sorted(some)}, **_state(draft))
    draft.add("replicate", filter={"PP": sorted(others)}, **_state(draft))


def _state(draft: Draft) -> dict[str, Any]:
    """Return how state is cut over replicas, and when gradients are reduced and parameters gathered."""
    zero = draft.choose.choice([{}, *({name: True} for name in ZERO_FLAGS)])
    found: dict[str, Any] = dict(zero)
    shards = [n for n in range(2, min(draft.replicas) + 1) if all(r % n == 0 for r in draft.replicas)]
    shards = [n for n in shards if n < max(draft.replicas)]
    if zero and shards and draft.choose.random() < 0.4:
        found["shard_ranks"] = draft.choose.choice(shards)
    if draft.choose.random() < 0.3:
        found["reduce"] = "microbatch"
    if "shard_params" in zero:
        found["prefetch"] = draft.choose.randint(0, 3)
        found["reshard"] = draft.choose.random() < 0.7
    if draft.choose.random() < 0.2:
        found["reduce_stream"] = "reducing"
    return found


RARE = 8
"""How often a schedule in two directions is listed: few counts suit it."""
ZERO_FLAGS = ("shard_optimizer", "shard_grads", "shard_params")


def _recompute(draft: Draft) -> None:
    """Recompute all layers, some layers, whole stages, or kinds of operations."""
    which = draft.choose.choice(["none", "none", "all", "layers", "stage", "kinds"])
    if which == "kinds":
        draft.add(
            "recompute",
            filter={"LAYER": "*"},
            mode="selective",
            ops=[draft.choose.choice(["attention", "norm"])],
        )
        return
    layers = sorted(draft.choose.sample(range(draft.layers), draft.choose.randint(1, draft.layers)))
    filters = {
        "all": {"LAYER": "*"}, "layers": {"LAYER": layers},
        "stage": {"PP": draft.choose.randrange(draft.stages)},
    }  # fmt: skip
    if which != "none":
        draft.add("recompute", filter=filters[which])


def _offload(draft: Draft) -> None:
    """Let optimizer state, parameters (unless ZeRO-3 cuts them) or activations wait on the host."""
    cut = any("shard_params" in entry for entry in draft.directives)
    for what in ("optimizer", "activations") if cut else ("optimizer", "params", "activations"):
        if draft.choose.random() < 0.15:
            layers = sorted(draft.choose.sample(range(draft.layers), draft.choose.randint(1, draft.layers)))
            where = (
                {"LAYER": layers} if what == "activations" else {"PP": draft.choose.randrange(draft.stages)}
            )
            draft.add("offload", filter=where, what=what, prefetch=draft.choose.randint(1, 3))


def _streams(draft: Draft) -> None:
    """Say which stream wins, and how many multiprocessors its collectives take."""
    if draft.choose.random() < 0.2:
        draft.add("priority", stream="dp", level=draft.choose.randint(0, 2))
    if draft.choose.random() < 0.2:
        draft.add("sm_budget", stream="dp", sms=draft.choose.randint(1, 32))


def _split_backward(draft: Draft) -> None:
    """Split some backwards of rows into gradients of inputs and of weights."""
    draft.split_backwards = draft.choose.choice([0.0, 0.5, 1.0])


def _order(draft: Draft) -> None:
    """Name a schedule, leave the order out, or write rows that no schedule has."""
    named = [None, *_schedules(draft)] if draft.is_looped else _schedules(draft)
    schedule = draft.choose.choice([*named, "rows"])
    if schedule == "rows":
        for row in random_rows(draft):
            names = [[{"PP": s, "MB": m, "PASS": letter} for letter, s, m in slot] for slot in row]
            draft.add("order", filters=names)
    elif schedule is not None:
        draft.add("order", schedule=schedule)


def _schedules(draft: Draft) -> list[str]:
    """Return the schedules that have rows for these stages, where they are placed, and microbatches."""
    held = draft.stages // draft.pp
    found = []
    for schedule in SCHEDULES if draft.stages == held * draft.pp else ():
        copies = copies_of(find_schedule(schedule))
        if copies > 1 and draft.meshes:
            continue
        rows = _rows(schedule, draft.pp, draft.microbatches, held * copies)
        places = {(task.stage, rank) for rank, row in enumerate(rows) for slot in row for task in slot}
        passes = {(task.stage, task.microbatch) for row in rows for slot in row for task in slot}
        once = places == set(enumerate(draft.homes)) and len(passes) == draft.stages * draft.microbatches
        if once or (copies > 1 and rows and draft.is_looped):
            found += [schedule] * (RARE if copies > 1 else 1)
    return found


@lru_cache(maxsize=1024)
def _rows(schedule: str, ranks: int, microbatches: int, held: int) -> Rows:
    """Return the rows of a schedule, none where it has none for these counts."""
    try:
        return schedule_rows(
            schedule, num_pipeline_ranks=ranks, num_microbatches=microbatches, virtual_stages_per_rank=held
        )
    except StrategyError:
        return ()


def random_rows(draft: Draft) -> list[list[Slot]]:
    """Return rows that can run: passes in any order in which their inputs are there, by pipeline rank.

    In half of them each pair of ranks hands over values in the order in which they are used.
    """
    rows: list[list[Slot]] = [[] for _ in range(draft.pp)]
    ready: list[list[tuple[str, int, int]]] = [[] for _ in range(draft.pp)]
    arriving: dict[tuple[int, int, str], deque[tuple[str, int, int]]] = {}
    for microbatch in range(draft.microbatches):
        ready[draft.homes[0]].append(("F", 0, microbatch))
    eager = draft.choose.choice([0.2, 0.5, 0.8])
    draft.in_order = draft.choose.random() < 0.5
    while True:
        choices = [(rank, task) for rank, tasks in enumerate(ready) for task in tasks]
        choices += [(target, queue[0]) for (_, target, _), queue in arriving.items() if queue]
        if not choices:
            overlapped = [_with_overlap(draft, row) for row in rows]
            return overlapped if can_run(draft, overlapped) else rows
        backward = [choice for choice in choices if choice[1][0] != "F"]
        rank, task = draft.choose.choice(backward if backward and draft.choose.random() < eager else choices)
        rows[rank].append([task])
        for tasks in (ready[rank], *arriving.values()):
            if task in tasks:
                tasks.remove(task)
        _hand_over(draft, task, ready=ready, arriving=arriving)


def _hand_over(
    draft: Draft,
    task: tuple[str, int, int],
    *,
    ready: list[list[tuple[str, int, int]]],
    arriving: dict[tuple[int, int, str], deque[tuple[str, int, int]]],
) -> None:
    """Note what a pass makes possible: the next pass of its microbatch, and the rest of a split backward."""
    letter, stage, microbatch = task
    if letter == "BI":
        ready[draft.homes[stage]].append(("BW", stage, microbatch))
    turns = letter == "F" and stage + 1 == draft.stages
    goal = stage if turns else stage + 1 if letter == "F" else stage - 1
    if letter == "BW" or goal < 0:
        return
    following = "F" if letter == "F" and not turns else "B"
    if following == "B" and draft.choose.random() < draft.split_backwards:
        following = "BI"
    source, target = draft.homes[stage], draft.homes[goal]
    if source == target or not draft.in_order:
        ready[target].append((following, goal, microbatch))
    else:
        arriving.setdefault((source, target, letter[0]), deque()).append((following, goal, microbatch))


def can_run(draft: Draft, rows: Sequence[Sequence[Slot]]) -> bool:
    """Return whether slots can run one after another, each starting when all its inputs are there."""
    done: set[tuple[str, int, int]] = set()
    place = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while place[rank] < len(row) and all(_inputs(draft, task) <= done for task in row[place[rank]]):
                done.update(("B" if task[0] == "BI" else task[0], *task[1:]) for task in row[place[rank]])
                place[rank] += 1
                moved = True
    return place == [len(row) for row in rows]


def _inputs(draft: Draft, task: tuple[str, int, int]) -> set[tuple[str, int, int]]:
    """Return what a pass needs; B and BI of one stage and microbatch count as one."""
    letter, stage, microbatch = task
    if letter == "F":
        return {("F", stage - 1, microbatch)} if stage else set()
    if letter == "BW":
        return {("B", stage, microbatch)}
    later = {("B", stage + 1, microbatch)} if stage + 1 < draft.stages else set()
    return {("F", stage, microbatch), *later}


def _with_overlap(draft: Draft, row: list[Slot]) -> list[Slot]:
    """Join some neighbours, a forward and a backward of two microbatches, into slots that may overlap."""
    joined: list[Slot] = []
    for slot in row:
        last = joined[-1] if joined else []
        letters = {last[0][0], slot[0][0]} if last else set()
        apart = len(last) == 1 and letters == {"F", "B"} and last[0][2] != slot[0][2]
        if apart and draft.choose.random() < 0.2:
            last.extend(slot)
        else:
            joined.append(list(slot))
    return joined


def _shuffle(draft: Draft) -> None:
    """Write the directives in any order of the file."""
    if draft.choose.random() < 0.3:
        draft.choose.shuffle(draft.directives)


def _parts(draft: Draft) -> None:
    """Order parts of stages, where every stage has one home; drawn last, so that nothing else changes."""
    if draft.choose.random() < 0.2 and not _goes_both_ways(draft):
        draft.parts = draft.choose.randrange(10**6)


def _goes_both_ways(draft: Draft) -> bool:
    named = [entry["schedule"] for entry in draft.directives if "schedule" in entry]
    return any(copies_of(find_schedule(name)) > 1 for name in named)


FEATURES: dict[str, Callable[[Draft], None]] = {
    "job": _job,
    "tied": _model_shape,
    "regions": _regions,
    "degrees": _degrees,
    "cuts": _cuts,
    "stages": _stages,
    "place": _place,
    "split": _split,
    "stage meshes": _stage_meshes,
    "replicate": _replicate,
    "recompute": _recompute,
    "offload": _offload,
    "streams": _streams,
    "split backward": _split_backward,
    "order": _order,
    "shuffled": _shuffle,
    "parts": _parts,
}
