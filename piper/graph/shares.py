"""`Shares`: over how many ranks the facts cut each segment's tensors, tokens and parameters.

[Note: regions]
Facts about tensor, expert and sequence parallelism claim segments. Neighbouring segments of one stage with
the same claim and the same tag index are one region; its borders are where tensors are exchanged.

[Note: partial gradients]
A parameter that every rank of tp holds whole, but uses for its own tokens or heads only, has a part of its
gradient on each: outside of the regions with sequence parallelism; inside of them always (a bias of a
row-parallel matmul counts as added by one rank). Its gradient is summed over tp too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from cost_models.ops import Operation, OpKind
from piper.errors import StrategyError
from piper.graph.facts import ExpertSharding, SequenceSharding, TensorSharding
from piper.graph.graph import Graph
from simulator.plan import NONE

_COLUMNS = 1
"""Position of what is normalised over in the shapes of softmax and cross-entropy."""


GATHER_FEATURES = "fused.gather_features.default"
"""Name of the kernel that stands for the gather of a region's features (`piper.capture.loss_kernels`)."""


def normalises_cut_features(operation: Operation) -> bool:
    """Return whether a kernel normalises over a dimension that tensor parallelism cuts."""
    kinds = {OpKind.SOFTMAX, OpKind.CROSS_ENTROPY}
    return operation.kind in kinds and operation.tensor_dim == _COLUMNS and operation.direction == "fwd"


def gathers_features(operation: Operation) -> bool:
    """Return whether a kernel leaves the cut features of a region whole on every rank."""
    return operation.name == GATHER_FEATURES


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What one rank of each segment's stage holds, as divisors.

    Args:
        graph: with the facts of all directives.
    """

    graph: Graph

    def degree(self, axis: str, segment: int) -> int:
        """Return the size of a mesh axis for the ranks of a segment."""
        return self.graph.axis_size(axis, stage=self.graph.stage_of_segment[segment])

    @cached_property
    def tensor_of(self) -> Mapping[int, TensorSharding]:
        """Return the tensor sharding of each segment that has one."""
        return {
            i: fact for fact in self.graph.tensor_shardings for i in fact.segments if self.degree("tp", i) > 1
        }

    @cached_property
    def expert_of(self) -> Mapping[int, ExpertSharding]:
        """Return the expert sharding of each segment that has one."""
        return {
            i: fact
            for fact in self.graph.expert_shardings
            for i in fact.segments
            if fact.degree * fact.tensor_degree > 1
        }

    @cached_property
    def sequence_of(self) -> Mapping[int, SequenceSharding]:
        """Return the sequence sharding of each attention segment that has one."""
        return {i: fact for fact in self.graph.sequence_shardings for i in fact.segments}

    @cached_property
    def sequence_parallel(self) -> bool:
        """Return whether tokens are cut over tp outside of the tensor-parallel regions."""
        return any(fact.sequence_parallel for fact in self.graph.tensor_shardings)

    @cached_property
    def context_degree(self) -> tuple[int, ...]:
        """Return, per segment, over how many ranks of cp its tokens are cut."""
        used = bool(self.graph.sequence_shardings)
        return tuple(self.degree("cp", i) if used else 1 for i in range(self._count))

    def outside_of_stage(self, stage: int) -> int:
        """Return over how many ranks tokens are cut around the regions of a stage."""
        return self.outside_degree[self.graph.segments_of_stage(stage)[0]]

    @cached_property
    def tensor_degree(self) -> tuple[int, ...]:
        """Return, per segment, over how many ranks of tp its parameters and heads are cut."""
        return tuple(self.degree("tp", i) if i in self.tensor_of else 1 for i in range(self._count))

    @cached_property
    def outside_degree(self) -> tuple[int, ...]:
        """Return, per segment, over how many ranks tokens are cut around the regions of its stage."""
        return tuple(
            cp * (self.degree("tp", i) if self.sequence_parallel else 1)
            for i, cp in enumerate(self.context_degree)
        )

    @cached_property
    def token_degree(self) -> tuple[int, ...]:
        """Return, per segment, over how many ranks its tokens are cut (before experts exchange them)."""
        return tuple(
            self.context_degree[i] if i in self.tensor_of else outside
            for i, outside in enumerate(self.outside_degree)
        )

    def region(self, axis: str, segment: int) -> tuple[int, int] | None:
        """Return first and last segment of the region ("tp", "ep" or "cp") around a segment, or None."""
        return self._regions[axis].get(segment)

    @cached_property
    def _regions(self) -> Mapping[str, Mapping[int, tuple[int, int]]]:
        claims: dict[str, Mapping[int, object]] = {
            "tp": self.tensor_of,
            "ep": self.expert_of,
            "cp": self.sequence_of,
        }
        return {axis: self._runs(axis.upper(), claimed) for axis, claimed in claims.items()}

    def _runs(self, tag: str, claimed: Mapping[int, object]) -> dict[int, tuple[int, int]]:
        keys = {i: self._region_key(tag, i) for i in sorted(claimed)}
        runs: list[list[int]] = []
        for i, key in keys.items():
            if runs and runs[-1][-1] == i - 1 and keys[i - 1] == key:
                runs[-1].append(i)
            else:
                runs.append([i])
        return {i: (run[0], run[-1]) for run in runs for i in run}

    def _region_key(self, tag: str, segment: int) -> tuple[int, int]:
        tags = dict(self.graph.model.segments[segment].tags)
        return self.graph.stage_of_segment[segment], tags.get(tag, NONE)

    def parameter_parts(self, name: str) -> tuple[int, ...]:
        """Return over which degrees a parameter is cut, e.g. (ep, etp); empty: every rank has it whole."""
        return self._parameters.get(name, ((), False, False))[0]

    def is_expert(self, name: str) -> bool:
        """Return whether a parameter belongs to experts that a `shard` distributes."""
        return self._parameters.get(name, ((), False, False))[1]

    def is_partial(self, name: str) -> bool:
        """Return whether each rank of tp has a part of a parameter's gradient ([Note: partial gradients])."""
        return self._parameters.get(name, ((), False, False))[2]

    def local_numel(self, names: Sequence[str]) -> int:
        """Return the elements of some parameters that one rank holds."""
        total = 0
        for name in names:
            numel = self._numel[name]
            for degree in self.parameter_parts(name):
                numel = -(-numel // degree)
            total += numel
        return total

    @cached_property
    def _numel(self) -> Mapping[str, int]:
        return {parameter.name: parameter.numel for parameter in self.graph.model.parameters}

    @cached_property
    def _parameters(self) -> Mapping[str, tuple[tuple[int, ...], bool, bool]]:
        """Per parameter: parts, whether it is an expert's, whether its gradient is partial over tp."""
        found: dict[str, tuple[tuple[int, ...], bool, bool]] = {}
        first: dict[str, int] = {}
        for number, segment in enumerate(self.graph.model.segments):
            layout = dict(segment.tensor_layout)
            for name in segment.parameters:
                share = self._share(number, layout.get(name, NONE))
                before = found.setdefault(name, share)
                if before[:2] != share[:2]:
                    raise self._conflict(name, first[name], number)
                found[name] = (share[0], share[1], share[2] or before[2])
                first.setdefault(name, number)
        return found

    def _share(self, number: int, cut_dim: int) -> tuple[tuple[int, ...], bool, bool]:
        if number in self.expert_of:
            fact = self.expert_of[number]
            return tuple(d for d in (fact.degree, fact.tensor_degree) if d > 1), True, False
        tensor = self.tensor_degree[number]
        if tensor > 1:
            return ((), False, True) if cut_dim == NONE else ((tensor,), False, False)
        return (), False, self.sequence_parallel and self.degree("tp", number) > 1

    def _conflict(self, name: str, one: int, other: int) -> StrategyError:
        names = [self.graph.model.segments[i].name for i in (one, other)]
        fact = next((f[i] for i in (one, other) for f in (self.tensor_of, self.expert_of) if i in f), None)
        return StrategyError(
            where="strategy" if fact is None else fact.where, field="filter", value=name,
            rule=f"is shared by {names[0]} and {names[1]}, but cut in another way in one of them",
            fix="claim both segments, or none of them",
        )  # fmt: skip

    @property
    def _count(self) -> int:
        return len(self.graph.model.segments)
