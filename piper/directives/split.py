"""`split`: cut the batch of a replica into microbatches.

[Note: microbatch sizes]
With a replica batch R: `micro_batch` b gives ceil(R/b) microbatches of b, the last takes the rest;
`num_microbatches` n alone gives sizes that differ by at most one, larger first; both given must agree.
Every sample weighs the same: each microbatch contributes its sum / (all tokens of the step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from cost_models.errors import check_invariant
from piper.errors import StrategyError
from piper.graph.directive import Directive, read_name, read_whole_number, refuse_unknown_keys, require_tags
from piper.graph.filters import Filter
from piper.graph.graph import Graph

DIMENSION = "MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Directive):
    """Run the graph once per microbatch; the batch is really cut, gradients equal the unsplit step.

    rewrite: F -> B -> update  ->  (F -> B) x n -> update, with a template per node and a dimension MB

    Args:
        filter: what is split; it must mean the whole model.
        dim_name: the tag by which filters of `order` name a microbatch.
        num_microbatches: how many, or None (follows from `micro_batch`).
        micro_batch: sequences of each, or None (follows from `num_microbatches`).
    """

    op: ClassVar[str] = "split"
    keys: ClassVar[tuple[str, ...]] = (
        "filter",
        "dim_name",
        "num_microbatches",
        "microbatches",
        "micro_batch",
    )

    filter: Filter = field(default_factory=Filter)
    dim_name: str = DIMENSION
    num_microbatches: int | None = None
    micro_batch: int | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 8}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        which = Filter.parse(entry.get("filter", {}), where=where, field="split.filter")
        dim_name = read_name(entry.get("dim_name", DIMENSION), where=where, name="split.dim_name")
        if dim_name in {"PASS", "PP"}:
            raise StrategyError(
                where=where, field="split.dim_name", value=dim_name, rule="means something else in filters",
                fix='write "dim_name": "MB"',
            )  # fmt: skip
        if "num_microbatches" in entry and "microbatches" in entry:
            raise StrategyError(
                where=where, field="split.microbatches", value=entry["microbatches"],
                rule="is an alias of num_microbatches, which is given too", fix="keep num_microbatches only",
            )  # fmt: skip
        number = entry.get("num_microbatches", entry.get("microbatches"))
        size = entry.get("micro_batch")
        if number is None and size is None:
            raise StrategyError(
                where=where, field="split.num_microbatches", value=None, rule="or micro_batch must be given",
                fix='write "num_microbatches": 8',
            )  # fmt: skip
        return cls(
            filter=which,
            dim_name=dim_name,
            num_microbatches=None
            if number is None
            else read_whole_number(number, where=where, name="split.num_microbatches"),
            micro_batch=None
            if size is None
            else read_whole_number(size, where=where, name="split.micro_batch"),
            where=where,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the file form."""
        given = {"num_microbatches": self.num_microbatches, "micro_batch": self.micro_batch}
        head = {"op": self.op, "filter": self.filter.to_json(), "dim_name": self.dim_name}
        return head | {name: value for name, value in given.items() if value}

    def number_of(self, replica_batch: int) -> int:
        """Return how many microbatches the batch is cut into, without listing them."""
        if self.micro_batch is None:
            return self.num_microbatches or 1
        return -(-replica_batch // self.micro_batch)

    def sizes(self, replica_batch: int) -> tuple[int, ...]:
        """Return the sequences of each microbatch; raises StrategyError when there are more than samples."""
        if self.micro_batch is None:
            number = self.num_microbatches or 1
            if number > replica_batch:
                raise StrategyError(
                    where=self.where, field="split.num_microbatches", value=number,
                    rule=f"is more than the replica batch of {replica_batch} samples",
                    fix=f"use 1..{replica_batch}, or raise the global batch",
                )  # fmt: skip
            each, rest = divmod(replica_batch, number)
            return (each + 1,) * rest + (each,) * (number - rest)
        full, rest = divmod(replica_batch, self.micro_batch)
        sizes = (self.micro_batch,) * full + ((rest,) if rest else ())
        if self.num_microbatches not in {None, len(sizes)}:
            raise StrategyError(
                where=self.where, field="split.num_microbatches", value=self.num_microbatches,
                rule=f"contradicts micro_batch = {self.micro_batch}: a replica batch of {replica_batch} "
                f"gives {len(sizes)} microbatches",
                fix="give one of the two, or make them agree",
            )  # fmt: skip
        return sizes

    def apply(self, graph: Graph) -> Graph:
        """Set the microbatch sizes."""
        require_tags(graph, self.filter, where=self.where, field="split.filter")
        left = next((n for n in graph.nodes if not self.filter.matches(dict(n.tags), n.kind.name)), None)
        if left is not None:
            raise StrategyError(
                where=self.where, field="split.filter", value=self.filter.source,
                rule=f"leaves out {left.uid} of stage {left.stage}: the whole model is split",
                fix='write "filter": {}',
            )  # fmt: skip
        if any(tag == self.dim_name for node in graph.nodes for tag, _ in node.tags):
            raise StrategyError(
                where=self.where, field="split.dim_name", value=self.dim_name, rule="is a tag of the model",
                fix='write "dim_name": "MB"',
            )  # fmt: skip
        sizes = self.sizes(graph.replica_batch)
        captured = {model.micro_batch for model in graph.models}
        check_invariant(set(sizes) <= captured, f"microbatch sizes {set(sizes)} captured {captured}")
        return replace(graph, micro_batch_sizes=sizes)
