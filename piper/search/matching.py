"""Which cells hold a strategy with some values."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from piper.search.candidate import has_values
from piper.search.cells import CellTable
from piper.search.space import KEEPINGS


def cells_with(table: CellTable, wanted: Mapping[str, str]) -> npt.NDArray[np.int64]:
    """Return the cells that have a point with some values, written as text.

    Args:
        table: all cells.
        wanted: dimension -> value.
    """
    cells, space = table.with_values(wanted), table.space
    kept = {name: value for name, value in wanted.items() if name in KEEPINGS}
    if not kept or not len(cells):
        return cells
    layouts = table.layout[cells]
    # How states may be kept depends on the table of a layout, and on its tp where "of a node" is a number.
    facts = np.stack([space.keeping_of[layouts], space.layouts["tp"][layouts]], axis=1)
    _, first, number = np.unique(facts, axis=0, return_index=True, return_inverse=True)
    found = [
        any(
            has_values(space.candidate(layout, 0, row), kept)
            for row in range(len(space.keepings[int(space.keeping_of[layout])]))
        )
        for layout in layouts[first].tolist()
    ]
    return cells[np.array(found, dtype=np.bool_)[number.reshape(-1)]]
