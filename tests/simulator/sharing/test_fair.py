"""Max-min fair speeds, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.sharing.fair import fair_speeds


def speeds_of(flows: list[tuple[dict[int, float], float]], *, num_links: int) -> list[float]:
    """Return the speed of each (use by link, weight)."""
    loads = [load for load, _ in flows]
    found = np.empty(len(flows))
    fair_speeds(
        np.cumsum([0, *map(len, loads)]),
        np.array([link for load in loads for link in load], dtype=np.int64),
        np.array([use for load in loads for use in load.values()]),
        np.array([weight / max(load.values()) for load, weight in flows]),
        np.empty(num_links),
        np.empty(num_links),
        found,
    )
    return found.tolist()


@pytest.mark.parametrize(
    ("flows", "expected"),
    [
        ([({0: 0.9}, 1.0), ({0: 0.9}, 1.0)], [0.5 / 0.9, 0.5 / 0.9]),
        # a small flow gets all it asks for, and the large one what is left
        ([({0: 0.3}, 1.0), ({0: 0.9}, 1.0)], [1.0, 0.7 / 0.9]),
        # weights 3 : 1
        ([({0: 1.0}, 3.0), ({0: 1.0}, 1.0)], [0.75, 0.25]),
        # who is slowed elsewhere leaves more to the others (Bertsekas and Gallager, section 6.5)
        (
            [({0: 1.0, 1: 1.0}, 1.0), ({0: 1.0}, 1.0), ({1: 1.0}, 1.0), ({1: 1.0}, 1.0)],
            [1 / 3, 2 / 3, 1 / 3, 1 / 3],
        ),
        # more than there is, alone
        ([({0: 1.6}, 1.0)], [1 / 1.6]),
    ],
)  # fmt: skip
def test_a_link_is_shared_max_min_fair(
    flows: list[tuple[dict[int, float], float]], expected: list[float]
) -> None:
    assert speeds_of(flows, num_links=2) == pytest.approx(expected)
