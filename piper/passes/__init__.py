"""Passes in the order in which they run, between the directives and the emission of plans.

To add one: a new file here with a frozen dataclass that has `apply: Graph -> Graph` and a docstring with
`rewrite: before -> after`, and one line in `PASSES` at the position where it belongs. The graph is verified
after each.
"""

from __future__ import annotations

from piper.graph.graph import Rewrite
from piper.passes.check_order import CheckOrder
from piper.passes.complete_order import CompleteOrder
from piper.passes.copy_stages import CopyStages
from piper.passes.insert_exchanges import InsertExchanges
from piper.passes.insert_offloads import InsertOffloads
from piper.passes.insert_transfers import InsertTransfers
from piper.passes.insert_update import InsertUpdate
from piper.passes.join_segments import JoinSegments
from piper.passes.reduce_gradients import ReduceGradients
from piper.passes.split_backward import SplitBackward

PASSES: dict[str, type[Rewrite]] = {
    "complete_order": CompleteOrder,
    "insert_exchanges": InsertExchanges,
    "join_segments": JoinSegments,
    "split_backward": SplitBackward,
    "copy_stages": CopyStages,
    "insert_transfers": InsertTransfers,
    "reduce_gradients": ReduceGradients,
    "insert_update": InsertUpdate,
    "insert_offloads": InsertOffloads,
    "check_order": CheckOrder,
}
