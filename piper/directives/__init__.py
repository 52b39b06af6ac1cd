"""Directives by the name they have in a strategy file.

To add one: a new file here with a frozen dataclass that derives from `piper.graph.directive.Directive`
(fields = file syntax, docstring with `rewrite: before -> after`, `apply: Graph -> Graph`), one line in
`DIRECTIVES`, and its place in `PHASES` (meaning never depends on the order in the file). Most directives
only check themselves and state a fact of `piper.graph.facts`; the passes do the rewrite that they describe.
"""

from __future__ import annotations

from piper.directives.mesh import Mesh
from piper.directives.offload import Offload
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.priority import Priority
from piper.directives.recompute import Recompute
from piper.directives.replicate import Replicate
from piper.directives.shard import Shard
from piper.directives.shard_sequence import ShardSequence
from piper.directives.shard_tensor import ShardTensor
from piper.directives.sm_budget import SmBudget
from piper.directives.split import Split
from piper.graph.directive import Directive

DIRECTIVES: dict[str, type[Directive]] = {
    "mesh": Mesh,
    "place": Place,
    "replicate": Replicate,
    "shard": Shard,
    "shard_tensor": ShardTensor,
    "shard_sequence": ShardSequence,
    "split": Split,
    "order": Order,
    "recompute": Recompute,
    "offload": Offload,
    "priority": Priority,
    "sm_budget": SmBudget,
}

PHASES: tuple[type[Directive], ...] = (
    Mesh, Place, Split, Replicate, Shard, ShardTensor, ShardSequence, Recompute, Offload, Priority, SmBudget,
    Order,
)  # fmt: skip
"""The order in which directives are applied, whatever their order in the file."""

__all__ = [
    "DIRECTIVES",
    "PHASES",
    "Mesh",
    "Offload",
    "Order",
    "Place",
    "Priority",
    "Recompute",
    "Replicate",
    "Shard",
    "ShardSequence",
    "ShardTensor",
    "SmBudget",
    "Split",
]
