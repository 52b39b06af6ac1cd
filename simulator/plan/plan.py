"""`Plan`: the compiled step of a job, one `DevicePlan` per pipeline rank, shared by its replicas.

Frozen, free of torch, serialisable (`simulator.plan.codec`). The compiler writes it; the simulator and
the runtime only read it. Nothing in it says *why* a task exists: readers look at fields, not at tags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.ops import Operation
from simulator.distinct import distinct_rows
from simulator.plan.buffers import Bucket, BufferTable
from simulator.plan.cuts import Cuts
from simulator.plan.mesh import Group, Mesh
from simulator.plan.states import StateDtypes
from simulator.plan.task import NONE, Task, TaskKind, TaskName

SCHEMA_VERSION = 5

_SCALARS = (
    "kind", "stage", "microbatch", "first_segment", "last_segment", "part", "phase", "stream",
    "work", "peer", "edge", "group", "bucket", "size_bytes",
)  # fmt: skip
_LISTS = ("waits", "previous_step_waits", "allocates", "reads", "frees")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexLists:
    """A list of whole numbers per row, flat: row i is `values[starts[i]:starts[i + 1]]`."""

    starts: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> IndexLists:
        """Pack one sequence per row."""
        starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        flat = [value for row in rows for value in row]
        return cls(starts=starts, values=np.array(flat, dtype=np.int64))

    def row(self, index: int) -> tuple[int, ...]:
        """Return row `index`."""
        return tuple(self.values[self.starts[index] : self.starts[index + 1]].tolist())

    def to_rows(self) -> list[list[int]]:
        """Return all rows as lists (one conversion, for loops over the whole table)."""
        flat, starts = self.values.tolist(), self.starts.tolist()
        return [flat[a:b] for a, b in pairwise(starts)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskTable:
    """The tasks of one device in host dispatch order, as columns; the fields are those of `Task`."""

    kind: npt.NDArray[np.int64]
    stage: npt.NDArray[np.int64]
    microbatch: npt.NDArray[np.int64]
    first_segment: npt.NDArray[np.int64]
    last_segment: npt.NDArray[np.int64]
    part: npt.NDArray[np.int64]
    phase: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int64]
    work: npt.NDArray[np.int64]
    peer: npt.NDArray[np.int64]
    edge: npt.NDArray[np.int64]
    group: npt.NDArray[np.int64]
    bucket: npt.NDArray[np.int64]
    size_bytes: npt.NDArray[np.int64]
    waits: IndexLists
    previous_step_waits: IndexLists
    allocates: IndexLists
    reads: IndexLists
    frees: IndexLists

    @classmethod
    def from_tasks(cls, tasks: Sequence[Task]) -> TaskTable:
        """Lay tasks out as columns; `table.task(i)` is the inverse."""
        columns: dict[str, Any] = {
            name: np.array([getattr(task, name) for task in tasks], dtype=np.int64) for name in _SCALARS
        }
        for name in _LISTS:
            columns[name] = IndexLists.from_rows([getattr(task, name) for task in tasks])
        return cls(**columns)

    def __len__(self) -> int:
        return len(self.kind)

    def task(self, index: int) -> Task:
        """Return the task at dispatch position `index`."""
        scalars: dict[str, Any] = {name: int(getattr(self, name)[index]) for name in _SCALARS}
        lists: dict[str, Any] = {name: getattr(self, name).row(index) for name in _LISTS}
        return Task(**(scalars | lists | {"kind": TaskKind(scalars["kind"])}))

    def __iter__(self) -> Iterator[Task]:
        return (self.task(index) for index in range(len(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a compute task computes: the price key shared by all equal tasks.

    Args:
        label: pass and stage kind for people, e.g. "F layers 1-8".
        operations: kernels in order, equal ones joined.
    """

    label: str
    operations: tuple[Operation, ...]

    @property
    def num_kernels(self) -> int:
        """Return how many kernels the host launches."""
        return sum(operation.count for operation in self.operations)

    @property
    def flops(self) -> int:
        """Return the FLOPs executed."""
        return sum(operation.flops * operation.count for operation in self.operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor at a segment boundary; dimension `batch_dim` is the microbatch (None: no such dimension)."""

    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None = 0
    requires_grad: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of the model with one tag stack: the smallest piece that can be scheduled.

    Args:
        name: for people, e.g. "layers.3".
        tags: tag name -> index, e.g. (("LAYER", 3), ("PP", 1)).
        stage: the stage it was cut into.
        parameters: fully qualified names, in order of first use.
        inputs: (segment, output) pairs; segment -1 is the model's input of that number.
        outputs: what later segments (or the loss) take from it, for the first microbatch size.
    """

    name: str
    tags: tuple[tuple[str, int], ...]
    stage: int
    parameters: tuple[str, ...]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Tensors that cross from one stage to another, sent together: activations down, gradients up.

    Args:
        source_stage, target_stage: producer and consumer in the forward pass.
        values: (segment, output) pairs, in the order in which they are sent.
        grad_values: those of `values` that need a gradient: what travels back.
    """

    source_stage: int
    target_stage: int
    values: tuple[tuple[int, int], ...]
    grad_values: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the model: name, shape, whether it is trained."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What conventions for model FLOPs need of equal layers; weights are elements of matrices, no biases.

    Args:
        count: how many equal layers.
        attention_weights: of the projections of attention.
        ffn_weights: that one token meets in the feed-forward part: with experts `top_k` of them and shared
            ones, without the router.
        heads, score_dim, value_dim: of attention; features of queries and of values per head.
        window: how many tokens a query sees, 0: all.
    """

    count: int
    attention_weights: int
    ffn_weights: int
    heads: int
    score_dim: int
    value_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What reports and the MFU formula need of the model (counts, not tensors).

    `heads` and `head_dim` are 0 where the model has no such thing or we do not know, and so are the last
    three fields: layers in order of first appearance, parameters that are only looked up, and weights between
    the last layer and the logits (and of modules that predict further tokens).
    """

    name: str
    n_parameters: int
    n_active_parameters: int
    layers: int
    hidden: int
    heads: int
    head_dim: int
    vocabulary: int
    layer_facts: tuple[LayerFacts, ...] = ()
    embedding_parameters: int = 0
    head_weights: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """The job around the model: sizes, dtypes, optimizer.

    Args:
        seq_len: tokens per sequence.
        global_batch: sequences per optimizer step, over all replicas.
        micro_batch_sizes: sequences of microbatch 0, 1, ... of every replica; they sum to its batch. A device
            with a mesh of its own takes this x dp of the plan's mesh / its dp.
        dtype: compute dtype ("bf16", "fp16", "fp32").
        optimizer: "adamw", "adamw8bit", "momentum" or "sgd".
        clip_grad_norm: largest global gradient norm, or None (no clipping, no barrier).
        states: dtypes of gradients, masters, moments and messages.
    """

    seq_len: int
    global_batch: int
    micro_batch_sizes: tuple[int, ...]
    dtype: str
    optimizer: str
    clip_grad_norm: float | None
    states: StateDtypes

    @property
    def num_microbatches(self) -> int:
        """Return the microbatches per step of each replica."""
        return len(self.micro_batch_sizes)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one optimizer step over all replicas."""
        return self.global_batch * self.seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRuleFacts:
    """Which stream wins, and how much of the device its kernels may take.

    Carried for engines in which streams contend; no engine reads it yet.

    Args:
        stream: index in `DevicePlan.streams`.
        priority: higher wins; None: not stated.
        sms: streaming multiprocessors that a collective on it takes, >= 1; None: not stated.
    """

    stream: int
    priority: int | None = None
    sms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DevicePlan:
    """What every rank of one pipeline rank does in a step.

    Args:
        pipeline_rank: its position on the pipeline axis.
        stages: the stages it hosts, rising.
        streams: names; stream 0 is "compute". A stream runs its tasks one after another.
        buffers: everything that takes memory.
        buckets: parameters by reduction group.
        tasks: in host dispatch order.
        stream_rules: what is stated about streams, at most one rule each.
        mesh: axes tp, cp and dp over its ranks, or None: as the plan's mesh says.
    """

    pipeline_rank: int
    stages: tuple[int, ...]
    streams: tuple[str, ...]
    buffers: BufferTable
    buckets: tuple[Bucket, ...]
    tasks: TaskTable
    stream_rules: tuple[StreamRuleFacts, ...] = ()
    mesh: Mesh | None = None

    def codes(self) -> tuple[str, ...]:
        """Return `TaskName.code` of every task, in dispatch order."""
        table = self.tasks
        columns = (table.kind, table.stage, table.phase, table.part, table.bucket, table.group)
        first, number = distinct_rows(columns)
        rows = zip(*(column[first].tolist() for column in columns), strict=True)
        texts = [self._before_and_after_microbatch(*row) for row in rows]
        before, after = [text[0] for text in texts], [text[1] for text in texts]
        shown = [*map(str, range(int(table.microbatch.max(initial=NONE)) + 1)), ""]  # of NONE: the last
        pairs = zip(number.tolist(), table.microbatch.tolist(), strict=True)
        return tuple([before[row] + shown[microbatch] + after[row] for row, microbatch in pairs])

    def _before_and_after_microbatch(self, *row: int) -> tuple[str, str]:
        """Return what stands before and after the microbatch in the code of a task."""
        kind, stage, phase, part, bucket, group = row
        name = self.buckets[bucket].name if bucket != NONE else _norm(group, phase)
        return _around_microbatch(kind, stage, phase, part, name)


@lru_cache(maxsize=2**15)
def _around_microbatch(  # noqa: PLR0917 (remembered by what it is called with)
    kind: int, stage: int, phase: int, part: int, bucket: str
) -> tuple[str, str]:
    before = TaskName(kind=TaskKind(kind), stage=stage, phase=phase)
    whole = TaskName(kind=before.kind, stage=stage, phase=phase, part=part, bucket=bucket)
    return before.code, whole.code.removeprefix(before.code)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Plan:
    """The compiled step of a whole job.

    Args:
        strategy: canonical shorthand of what was asked, for people.
        directives: the directives as JSON objects, in order.
        directive_places: where each was written, as "strategy.json:14" (empty: unknown); for messages only.
        schedule: the schedule's name.
        model, training: facts for reports.
        mesh: axes over the ranks.
        parameters, segments, edges: the model as it was cut.
        works: price keys of compute tasks.
        groups: rank groups of collectives.
        device_plans: one per pipeline rank, in order.
        cuts: how the ranks of a stage cut tensors, tokens and experts among them.
        notices: what the compiler assumed or wants the user to know.
    """

    strategy: str
    directives: tuple[dict[str, Any], ...]
    schedule: str
    model: ModelFacts
    training: TrainingFacts
    mesh: Mesh
    parameters: tuple[Parameter, ...]
    segments: tuple[Segment, ...]
    edges: tuple[Edge, ...]
    works: tuple[Work, ...]
    groups: tuple[Group, ...]
    device_plans: tuple[DevicePlan, ...]
    notices: tuple[str, ...] = ()
    directive_places: tuple[str, ...] = ()
    cuts: Cuts = field(default_factory=Cuts)
    schema_version: int = field(default=SCHEMA_VERSION)

    def __repr__(self) -> str:
        """Name the plan in one line; its tables run to megabytes."""
        tasks = sum(len(plan.tasks.kind) for plan in self.device_plans)
        ranks = f"{self.num_ranks} ranks ({self.num_pipeline_ranks} device plans, {tasks} tasks)"
        return f"Plan({self.model.name!r}, {self.strategy!r}, {ranks})"

    @property
    def num_ranks(self) -> int:
        """Return the ranks of the job."""
        return self.mesh.num_ranks

    @property
    def num_pipeline_ranks(self) -> int:
        """Return the number of distinct device plans."""
        return len(self.device_plans)

    @property
    def replicas(self) -> int:
        """Return how many ranks share each device plan."""
        return self.num_ranks // self.num_pipeline_ranks

    @property
    def batch_shares(self) -> int:
        """Return over how many ranks of a pipeline rank the batch is cut; those of tp and cp share one."""
        return self.replicas // (self.mesh.size("tp") * self.mesh.size("cp"))

    def axis_size(self, axis: str, *, pipeline_rank: int) -> int:
        """Return the size of an axis for the ranks of a pipeline rank."""
        return (self.device_plans[pipeline_rank].mesh or self.mesh).size(axis)

    def pipeline_rank_of(self, rank: int) -> int:
        """Return the device plan that `rank` executes."""
        return self.mesh.coordinate(rank, "pp")

    def stage_segments(self, stage: int) -> tuple[int, ...]:
        """Return the segment numbers of `stage`, rising."""
        return tuple(i for i, segment in enumerate(self.segments) if segment.stage == stage)

    def peer_rank(self, rank: int, peer: int) -> int:
        """Return the rank on pipeline rank `peer` with the same other coordinates as `rank`."""
        others = {name: self.mesh.coordinate(rank, name) for name, _ in self.mesh.axes}
        return self.mesh.ranks(**(others | {"pp": peer}))[0]


def _norm(group: int, phase: int) -> str:
    """Return the suffix of a collective without a bucket: the gradient norm, or none."""
    return "norm" if group != NONE and phase == NONE else ""


TASK_COLUMNS = tuple(column.name for column in fields(TaskTable))
