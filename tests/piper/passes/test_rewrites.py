"""Golden texts of the graph after each directive and pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.jobs import compiled

CASES = {
    "plain": ("pp=2,dp=1", {"layers": 2}),
    "zero1_recompute_tied": ("pp=2,dp=2,zero=1,recompute=full", {"layers": 2, "tied": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_graph_after_every_rewrite(name: str, golden: Callable[[str, str], None]) -> None:
    text, options = CASES[name]
    seen: list[str] = []
    compiled(text, **options, on_pass=lambda step, dump: seen.append(f"== after {step}\n{dump}"))  # type: ignore[arg-type]
    golden(f"passes/{name}.txt", "\n".join(seen))
