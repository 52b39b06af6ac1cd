"""Directives by the name they have in a strategy file.

To add one: a new file here with a frozen dataclass that derives from `piper.graph.directive.Directive`
(fields = file syntax, docstring with `rewrite: before -> after`, `apply: Graph -> Graph`), one line in
`DIRECTIVES`, and its place in `PHASES` (meaning never depends on the order in the file).
"""

from __future__ import annotations

from piper.directives.mesh import Mesh
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.recompute import Recompute
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.graph.directive import Directive

DIRECTIVES: dict[str, type[Directive]] = {
    "mesh": Mesh,
    "place": Place,
    "replicate": Replicate,
    "split": Split,
    "recompute": Recompute,
    "order": Order,
}

PHASES: tuple[type[Directive], ...] = (Mesh, Place, Split, Recompute, Replicate, Order)
"""The order in which directives are applied, whatever their order in the file."""

LATER = ("shard", "shard_tensor", "shard_sequence", "offload", "priority", "sm_budget")
"""Directives of the language that this version refuses by name."""

__all__ = ["DIRECTIVES", "LATER", "PHASES", "Mesh", "Order", "Place", "Recompute", "Replicate", "Split"]
