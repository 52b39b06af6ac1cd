"""Rounds of a search come to an end whatever simulations say of estimates."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from piper.search import SearchRequest
from piper.search.corrections import Corrections
from piper.search.frontier import Point
from piper.search.rounds import Rounds


@dataclass
class OneCell:
    """A frontier with one cell that was not estimated yet."""

    lowest: float
    asked: list[float] = field(default_factory=list)
    expanded: set[int] = field(default_factory=set)
    room_bytes: float = 1.0

    def grow(self, limit: float) -> list[Point]:
        self.asked.append(limit)
        assert len(self.asked) < 9, "asks for the same cells again and again"
        if self.lowest < limit:
            self.expanded.add(0)
            self.lowest = float("inf")
        return []


@pytest.mark.parametrize("typical", [0.8, 0.95, 1.0, 1.2])
def test_cells_grow_until_their_corrected_times_are_no_better(
    typical: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Corrections, "typical", property(lambda _: typical))
    monkeypatch.setattr(Rounds, "best", property(lambda _: 9.0))
    monkeypatch.setattr(Rounds, "_is_full", lambda _: True)
    frontier = OneCell(lowest=9.3)
    Rounds(
        request=SearchRequest(model="tiny-llama", gap=0.0), frontier=frontier, started_s=0.0, on_progress=None
    )._grow()  # type: ignore[arg-type]
    assert bool(frontier.expanded) is (9.3 * typical < 9.0)
