"""The space: columns of layouts and tables of options, with the rules that forbid points, counted by name.

[Note: layouts and options]
A point is a layout (degrees, microbatch size, stages per rank, schedule), a working (sp, async_tp, recompute)
and a keeping (zero, hsdp, offload, buckets, prefetch). Layouts are columns of numbers. Which workings and
keepings are legal, and which say the same, depends on few facts of a layout (is there tp, are there replicas,
how many layers has a stage); there is one small table for each combination of these. So ten billion points
are counted in a second, and none is made before it is looked at.

[Note: canonical form]
Of points that mean the same one is kept, the others are duplicates: options that need replicas, or tensor
parallelism, where there is none; orders of a pipeline of one rank. A pinned value is never replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from piper.schedules import MOST_PASSES
from piper.search.candidate import Candidate, family_of
from piper.search.choices import FRACTION, TP, Choices
from piper.search.schedule_rules import RULES
from piper.strategy.cuts import EVEN

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NODE = -1
"""The choice of hsdp that stands for the ranks of one node."""
LAYOUT_COLUMNS = ("gpus", "tp", "pp", "cp", "ep", "etp", "dp", "vp", "micro_batch", "schedule", "cut")
WORKINGS = ("sp", "async_tp", "recompute")
KEEPINGS = ("zero", "hsdp", "offload", "bucket_mb", "prefetch")
CUT_GRADIENTS, CUT_PARAMETERS = 2, 3
_FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What of a model decides which strategies are legal.

    Args:
        num_units: at which it can be cut into stages.
        num_layers: of these, layers.
        heads: query heads of every attention.
        experts: of every region of experts.
        cuts_tensors, cuts_sequences: whether any region can be cut over tp, over cp.
        balances: (pp, vp, schedule) -> whether a balanced cut into stages is another one than the default.
    """

    num_units: int
    num_layers: int
    heads: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    cuts_tensors: bool = False
    cuts_sequences: bool = False
    balances: Callable[[int, int, str], bool] = lambda pp, vp, schedule: False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """What of a job decides it."""

    global_batch: int
    seq_len: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Workings or keepings of layouts that are alike: legal and distinct ones, and why others are not.

    Args:
        columns: name -> int64 [options], indices into the choices of a dimension (numbers where it is one).
        illegal: (reason, recompute) -> points that a rule forbids.
        duplicates: points that another one stands for.
    """

    columns: Mapping[str, Ints]
    illegal: Mapping[str, int]
    duplicates: int

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """All points of a search; see [Note: layouts and options].

    Args:
        choices: values of every dimension.
        layouts: column -> int64 [layouts], legal and distinct; "schedule" is an index into the choices.
        workings, keepings: tables, and for each layout which is its own.
        size: raw points, before rules and duplicates.
        illegal: (family, reason) -> points that a rule forbids.
        duplicates: points that another one stands for.
    """

    choices: Choices
    layouts: Mapping[str, Ints]
    workings: tuple[Table, ...]
    working_of: Ints
    keepings: tuple[Table, ...]
    keeping_of: Ints
    layers_of_stage: Ints
    gpus_per_node: int
    size: int
    illegal: Mapping[tuple[str, str], int]
    duplicates: int

    @property
    def num_layouts(self) -> int:
        """Return the number of layouts."""
        return len(self.working_of)

    @cached_property
    def num_candidates(self) -> int:
        """Return the number of legal and distinct points."""
        sizes = np.array([len(t) for t in self.workings]), np.array([len(t) for t in self.keepings])
        return int((sizes[0][self.working_of] * sizes[1][self.keeping_of]).sum())

    def candidate(self, layout: int, working: int, keeping: int) -> Candidate:
        """Return a point; `working` and `keeping` are rows of the tables of the layout."""
        values = {name: int(column[layout]) for name, column in self.layouts.items()}
        schedule = self.choices.texts("schedule")[values.pop("schedule")]
        cut = self.choices.texts("cut")[values.pop("cut")]
        work = self.workings[int(self.working_of[layout])].columns
        keep = self.keepings[int(self.keeping_of[layout])].columns
        return Candidate(
            **values,
            schedule=schedule,
            cut=cut,
            sp=self.choices.texts("sp")[int(work["sp"][working])],
            async_tp=self.choices.texts("async_tp")[int(work["async_tp"][working])],
            recompute=recompute_text(
                self.choices.texts("recompute")[int(work["recompute"][working])],
                layers=int(self.layers_of_stage[layout]),
            ),
            zero=int(keep["zero"][keeping]),
            hsdp=self.shard_ranks(layout, int(keep["hsdp"][keeping])),
            offload=self.choices.texts("offload")[int(keep["offload"][keeping])],
            bucket_mb=int(keep["bucket_mb"][keeping]),
            prefetch=int(keep["prefetch"][keeping]),
        )

    def shard_ranks(self, layout: int, choice: int) -> int:
        """Return hsdp of a layout: the ranks of a node for `NODE`."""
        if choice != NODE:
            return choice
        tp = int(self.layouts["tp"][layout])
        return int(_node_shards(np.array([tp]), self.gpus_per_node)[0])

    def __iter__(self) -> Iterator[Candidate]:
        """Yield all legal and distinct points: for small spaces."""
        for layout in range(self.num_layouts):
            work = self.workings[int(self.working_of[layout])]
            keep = self.keepings[int(self.keeping_of[layout])]
            for working in range(len(work)):
                for keeping in range(len(keep)):
                    yield self.candidate(layout, working, keeping)


def recompute_text(choice: str, *, layers: int) -> str:
    """Return the value of the shorthand: a share of a stage's layers as their number."""
    if not choice.endswith(FRACTION):
        return choice
    return f"full:{layers_of_share(choice, layers)}"


def layers_of_share(choice: str, layers: int) -> int:
    """Return how many layers of a stage "full:25%" recomputes."""
    percent = int(choice.removeprefix("full:").removesuffix(FRACTION))
    return max(1, round(layers * percent / 100))


def enumerate_space(choices: Choices, model: ModelLimits, job: JobLimits) -> Space:
    """Return the space of a model and a job.

    Args:
        choices: the values of every dimension.
        model, job: what decides which strategies are legal.
    """
    raw, same = _raw_layouts(choices)
    rules = _layout_rules(raw, choices, model=model, job=job)
    reason = np.zeros(len(raw["tp"]), dtype=np.int64)
    for number, (_, broken) in enumerate(rules, start=1):
        reason[(reason == 0) & broken] = number
    duplicate = (reason == 0) & (same | _says_the_same(raw, choices) | _cut_alike(raw, choices, model))
    legal = (reason == 0) & ~duplicate
    options = choices.num_workings * choices.num_keepings
    illegal: Counter[tuple[str, str]] = Counter()
    for number, (text, _) in enumerate(rules, start=1):
        _count(illegal, raw, reason == number, text=text, weight=options)
    layouts = {name: column[legal] for name, column in raw.items()}
    layers = -(-model.num_layers // (layouts["pp"] * layouts["vp"]))
    workings, working_of = _tables_of_workings(layouts, layers, choices)
    keepings, keeping_of = _tables_of_keepings(layouts, choices, job)
    duplicates = int(duplicate.sum()) * options
    for number, table in enumerate(workings):
        mine = working_of == number
        for text, count in table.illegal.items():
            _count(illegal, layouts, mine, text=text, weight=count * choices.num_keepings)
        duplicates += int(mine.sum()) * table.duplicates * choices.num_keepings
    sizes = np.array([len(table) for table in workings], dtype=np.int64)
    for number, table in enumerate(keepings):
        mine = keeping_of == number
        for text, count in table.illegal.items():
            _count(illegal, layouts, mine, text=text, weight=count * sizes[working_of])
        duplicates += int(sizes[working_of[mine]].sum()) * table.duplicates
    return Space(
        choices=choices,
        layouts=layouts,
        workings=workings,
        working_of=working_of,
        keepings=keepings,
        keeping_of=keeping_of,
        layers_of_stage=layers,
        gpus_per_node=job.gpus_per_node,
        size=len(reason) * options,
        illegal=dict(illegal),
        duplicates=duplicates,
    )


def _raw_layouts(choices: Choices) -> tuple[dict[str, Ints], Bools]:
    """Return all combinations that make the number of GPUs, and which cut experts as another does."""
    degrees = []
    for gpus in choices.numbers("gpus"):
        grid = np.array(
            [
                (gpus, tp, pp, cp, dp)
                for tp in choices.divisors("tp", gpus)
                for pp in choices.divisors("pp", gpus // tp)
                for cp in choices.divisors("cp", gpus // (tp * pp))
                for dp in [gpus // (tp * pp * cp)]
                if choices.allows("dp", dp)
            ],
            dtype=np.int64,
        ).reshape(-1, 5)
        degrees.append(grid)
    grid = np.concatenate(degrees) if degrees else np.zeros((0, 5), dtype=np.int64)
    ep = np.array(choices.numbers("ep"), dtype=np.int64)
    etp = np.array(choices.numbers("etp"), dtype=np.int64)
    sizes = np.array(choices.numbers("micro_batch"), dtype=np.int64)
    orders = np.array(_orders(choices), dtype=np.int64).reshape(-1, 2)
    cuts = np.arange(len(choices.texts("cut")))
    axes = [np.arange(len(grid)), ep, etp, sizes, np.arange(len(orders)), cuts]
    mesh = [part.ravel() for part in np.meshgrid(*axes, indexing="ij")]
    gpus, tp, pp, cp, dp = grid[mesh[0]].T
    schedules, vp = orders[mesh[4]].T
    same = (mesh[2] == TP) & (tp == 1) & (1 in etp)
    columns = {
        "gpus": gpus, "tp": tp, "pp": pp, "cp": cp, "ep": mesh[1],
        "etp": np.where(mesh[2] == TP, tp, mesh[2]),
        "dp": dp, "vp": vp, "micro_batch": mesh[3], "schedule": schedules,
        "cut": mesh[5],
    }  # fmt: skip
    return columns, same


def _orders(choices: Choices) -> list[tuple[int, int]]:
    """Return (schedule, stages per rank): those that go together, or all where none do."""
    everything = [(s, v) for s in range(len(choices.texts("schedule"))) for v in choices.numbers("vp")]
    rules = [RULES.get(name) for name in choices.texts("schedule")]
    legal = [
        (s, v)
        for s, v in everything
        for rule in [rules[s]]
        if rule is None or bool(rule.takes_stages(np.array([v]))[0])
    ]
    return legal or everything


def _layout_rules(
    raw: Mapping[str, Ints], choices: Choices, *, model: ModelLimits, job: JobLimits
) -> list[tuple[str, Bools]]:
    """Return (rule, whether each layout breaks it); the first broken one is what a point is counted under."""
    tp, pp, cp, dp, ep, etp, vp = (raw[name] for name in ("tp", "pp", "cp", "dp", "ep", "etp", "vp"))
    batch = job.global_batch // dp
    number = -(-batch // raw["micro_batch"])
    names = [RULES.get(name) for name in choices.texts("schedule")]
    wrong_stages, refused = np.zeros(len(tp), dtype=np.bool_), np.zeros(len(tp), dtype=np.bool_)
    for index, rule in enumerate(names):
        mine = raw["schedule"] == index
        if rule is not None and mine.any():
            wrong_stages[mine] = ~rule.takes_stages(vp[mine])
            refused[mine] = ~rule.takes(pp[mine], np.maximum(number[mine], 1))
    whole = job.global_batch % dp == 0
    several = len(choices.numbers("micro_batch")) > 1
    uneven = (batch % raw["micro_batch"] != 0) & several
    heads = np.zeros(len(tp), dtype=np.bool_)
    for count in set(model.heads):
        heads |= count % tp != 0
    experts = np.zeros(len(tp), dtype=np.bool_)
    for count in set(model.experts):
        experts |= count % ep != 0
    stages = pp * np.where(_copies(raw, choices) == 1, vp, 1)
    return [
        ("the schedule takes another number of stages per rank", wrong_stages),
        (f"more stages than the model's {model.num_units} units", stages > model.num_units),
        (f"the global batch {job.global_batch} is no multiple of dp", ~whole),
        ("the microbatch is larger than the replica batch", raw["micro_batch"] > batch),
        ("leaves a smaller last microbatch", uneven),
        ("the schedule does not take the number of microbatches", refused),
        ("tp does not divide the heads", heads & (tp > 1)),
        ("no region of the model can be cut over tp", (tp > 1) & (not model.cuts_tensors)),
        ("no region of the model can be cut over cp", (cp > 1) & (not model.cuts_sequences)),
        (f"cp does not divide the {job.seq_len} tokens of a sequence", job.seq_len % cp != 0),
        ("ep does not divide the experts", (ep > 1) & (experts | (not model.experts))),
        ("ep x etp does not divide the ranks of a stage", dp * cp * tp % (ep * etp) != 0),
        ("etp without experts", (etp > 1) & (not model.experts)),
        ("more passes than a plan may have", number * pp * vp > MOST_PASSES),
    ]


def _copies(raw: Mapping[str, Ints], choices: Choices) -> Ints:
    """Return the copies of the model that each layout's schedule holds."""
    found = np.ones(len(raw["tp"]), dtype=np.int64)
    for index, name in enumerate(choices.texts("schedule")):
        if name in RULES and RULES[name].layout == "bidirectional":
            found[raw["schedule"] == index] = 2
    return found


def _says_the_same(raw: Mapping[str, Ints], choices: Choices) -> Bools:
    """Return which layouts another one stands for: orders of one rank."""
    found = np.zeros(len(raw["tp"]), dtype=np.bool_)
    one = raw["pp"] == 1
    if len(choices.texts("schedule")) > 1:
        found |= one & (raw["schedule"] != choices.plainest_schedule)
    if len(choices.numbers("vp")) > 1:
        found |= one & (raw["vp"] > 1)
    return found


def _cut_alike(raw: Mapping[str, Ints], choices: Choices, model: ModelLimits) -> Bools:
    """Return which layouts are cut as those with the default cut, which is a choice, too."""
    texts = choices.texts("cut")
    if EVEN not in texts:
        return np.zeros(len(raw["tp"]), dtype=np.bool_)
    keys = np.stack([raw[name] for name in ("pp", "vp", "schedule")], axis=1)
    distinct, number = np.unique(keys, axis=0, return_inverse=True)
    schedules = choices.texts("schedule")
    alike = [not (pp > 1 and model.balances(pp, vp, schedules[name])) for pp, vp, name in distinct.tolist()]
    same: Bools = np.array(alike, dtype=np.bool_)[number.reshape(-1)]
    return np.asarray(same & (raw["cut"] != texts.index(EVEN)))


def _tables_of_workings(
    layouts: Mapping[str, Ints], layers: Ints, choices: Choices
) -> tuple[tuple[Table, ...], Ints]:
    facts = np.stack([layouts["tp"] > 1, layouts["ep"] * layouts["etp"] > 1, layers], axis=1).astype(np.int64)
    distinct, number = np.unique(facts, axis=0, return_inverse=True)
    tables = tuple(
        _table_of_workings(choices, tensor=bool(row[0]), experts=bool(row[1]), layers=int(row[2]))
        for row in distinct.tolist()
    )
    return tables, number.reshape(-1).astype(np.int64)


def _table_of_workings(choices: Choices, *, tensor: bool, experts: bool, layers: int) -> Table:
    rows, illegal, seen, duplicates = [], Counter[str](), set(), 0
    for sp, sp_text in enumerate(choices.texts("sp")):
        for late in range(len(choices.texts("async_tp"))):
            for again, recompute in enumerate(choices.texts("recompute")):
                text = recompute_text(recompute, layers=layers)
                asked = int(text.removeprefix("full:")) if text.startswith("full:") else 0
                if tensor and experts and sp_text == "off":
                    illegal["experts take tokens that are cut over tp (sp=on)"] += 1
                    continue
                if asked >= layers and not recompute.endswith(FRACTION) and asked > layers:
                    illegal["recompute=full:N has more layers than a stage"] += 1
                    continue
                meaning = (
                    sp if tensor or len(choices.texts("sp")) == 1 else 0,
                    late if tensor or len(choices.texts("async_tp")) == 1 else 0,
                    _FULL if asked >= layers and asked else text,
                )
                if meaning in seen:
                    duplicates += 1
                    continue
                seen.add(meaning)
                rows.append((sp, late, again))
    return Table(columns=_columns(WORKINGS, rows), illegal=dict(illegal), duplicates=duplicates)


def _tables_of_keepings(
    layouts: Mapping[str, Ints], choices: Choices, job: JobLimits
) -> tuple[tuple[Table, ...], Ints]:
    shards = layouts["dp"] * layouts["cp"]
    node = _node_shards(layouts["tp"], job.gpus_per_node)
    by_node = (node > 1) & (node < shards) & (shards % np.maximum(node, 1) == 0)
    stated = [h for h in choices.numbers("hsdp") if h > 0]
    divides = np.stack([by_node, shards > 1, *((shards % h == 0) & (h < shards) for h in stated)], axis=1)
    distinct, number = np.unique(divides.astype(np.int64), axis=0, return_inverse=True)
    tables = tuple(
        _table_of_keepings(
            choices,
            replicas=bool(row[1]),
            legal_shards={
                0,
                *([NODE] if row[0] else []),
                *(h for h, ok in zip(stated, row[2:], strict=True) if ok),
            },
        )
        for row in distinct.tolist()
    )
    return tables, number.reshape(-1).astype(np.int64)


def _table_of_keepings(choices: Choices, *, replicas: bool, legal_shards: set[int]) -> Table:
    rows, illegal, seen, duplicates = [], Counter[str](), set(), 0
    free = {name for name in ("zero", "bucket_mb") if len(choices.numbers(name)) > 1}
    for zero in choices.numbers("zero"):
        for hsdp in choices.numbers("hsdp"):
            for offload, _ in enumerate(choices.texts("offload")):
                for bucket in choices.numbers("bucket_mb"):
                    for prefetch in choices.numbers("prefetch"):
                        row = (zero, hsdp, offload, bucket, prefetch)
                        away = choices.texts("offload")[offload]
                        reason = _keeping_rule(row, away, replicas=replicas, legal_shards=legal_shards)
                        if reason:
                            illegal[reason] += 1
                            continue
                        meaning = (
                            zero if replicas or "zero" not in free else 0,
                            hsdp, offload,
                            bucket if replicas or "bucket_mb" not in free else 0,
                            prefetch if replicas else 0,
                        )  # fmt: skip
                        if meaning in seen:
                            duplicates += 1
                            continue
                        seen.add(meaning)
                        rows.append(row)
    return Table(columns=_columns(KEEPINGS, rows), illegal=dict(illegal), duplicates=duplicates)


def _keeping_rule(row: tuple[int, ...], away: str, *, replicas: bool, legal_shards: set[int]) -> str:
    zero, hsdp, _, _, prefetch = row
    if prefetch and zero < CUT_PARAMETERS:
        return "prefetch is about parameters that are cut (zero=3)"
    if hsdp and not zero:
        return "hsdp cuts no state (zero=0)"
    if hsdp not in legal_shards:
        return "hsdp is not a part of the replicas"
    if away == "params" and zero == CUT_PARAMETERS and replicas:
        return "parameters that are cut (zero=3) do not wait on the host"
    return ""


def _node_shards(tp: Ints, gpus_per_node: int) -> Ints:
    """Return over how many replicas of one node state is cut; 0 where tp does not divide a node."""
    return np.where(gpus_per_node % tp == 0, gpus_per_node // np.maximum(tp, 1), 0)


def _columns(names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> dict[str, Ints]:
    table = np.array(rows, dtype=np.int64).reshape(-1, len(names))
    return {name: table[:, number] for number, name in enumerate(names)}


def _count(
    found: Counter[tuple[str, str]],
    layouts: Mapping[str, Ints],
    which: Bools,
    *,
    text: str,
    weight: int | Ints,
) -> None:
    """Count points that a rule forbids, by family (of any recomputation)."""
    if not which.any():
        return
    keys = np.stack([layouts[name][which] for name in ("pp", "tp", "cp", "ep")], axis=1)
    distinct, number = np.unique(keys, axis=0, return_inverse=True)
    weights = np.broadcast_to(np.asarray(weight), which.shape)[which]
    counts = np.bincount(number.reshape(-1), weights=weights)
    for (pp, tp, cp, ep), count in zip(distinct.tolist(), counts.tolist(), strict=True):
        family = family_of(pp=pp, tp=tp, cp=cp, ep=ep, recompute="any")
        if count:
            found[family, text] += int(count)
