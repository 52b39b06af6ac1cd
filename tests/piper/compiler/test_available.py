"""What the passes do not realise yet is refused by name, with the line of the directive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper.errors import StrategyError
from tests.jobs import compiled


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("dp=2,zero=2", "replicate.shard_grads"),
        ("dp=2,zero=3", "replicate.shard_params"),
        ("dp=2,bucket_mb=25", "replicate.bucket_mb"),
        ("dp=4,zero=1,hsdp=2", "replicate.shard_ranks"),
        ("pp=2,schedule=zb_h1", "schedule"),
        ("recompute=selective", "recompute.mode"),
        ("offload=optimizer", "offload.what"),
    ],
)
def test_a_shorthand_that_states_more_is_refused(text: str, field: str) -> None:
    with pytest.raises(StrategyError, match="is not available in this version") as caught:
        compiled(text, gpus=None, global_batch=8)
    assert caught.value.field == field


def test_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    entries = [
        {"op": "mesh", "axes": {"dp": 2}},
        {"op": "replicate", "filter": {}, "reduce": "microbatch"},
    ]
    path = tmp_path / "s.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]")
    with pytest.raises(StrategyError, match="is not available") as caught:
        compiled(str(path), global_batch=4)
    assert (caught.value.where, caught.value.field) == (f"{path}:3", "replicate.reduce")
