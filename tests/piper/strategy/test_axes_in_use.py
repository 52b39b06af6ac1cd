"""An axis over which nothing is cut is refused: its ranks would repeat the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper.errors import StrategyError
from tests.jobs import compiled


@pytest.mark.parametrize(
    ("axis", "op"), [("tp", "shard_tensor"), ("cp", "shard_sequence"), ("ep", "shard"), ("etp", "shard")]
)
def test_an_axis_that_nothing_uses_is_refused_with_its_line(tmp_path: Path, axis: str, op: str) -> None:
    path = tmp_path / "s.json"
    axes = {axis: 2, "dp": 2}
    entries = [
        {"op": "split", "num_microbatches": 2},
        {"op": "mesh", "axes": axes},
        {"op": "replicate", "filter": {}},
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]")
    with pytest.raises(StrategyError, match=f'"op": "{op}"') as caught:
        compiled(str(path), global_batch=4)
    assert (caught.value.where, caught.value.field) == (f"{path}:3", f"mesh.axes.{axis}")
