"""Orders that are found for one job: what its stages cost and hold is measured in a simulation.

`measure` makes a pipeline of a simulated plan; `order` finds the order, and simulates the whole job with it.
"""

from __future__ import annotations

from piper.search.synthesis.order import FoundOrder, OrderRequest, find_order

__all__ = ["FoundOrder", "OrderRequest", "find_order"]
