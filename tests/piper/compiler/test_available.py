"""What the passes realise compiles to a legal plan; what they do not is refused by name, with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper.errors import StrategyError
from simulator.plan.check import check_plan
from tests.jobs import compiled


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,zero=2", "dp=2,zero=3", "dp=2,bucket_mb=25", "dp=4,zero=1,hsdp=2", "pp=2,schedule=zb_h1",
        "recompute=selective", "offload=optimizer", "pp=2,dp=2,zero=3,schedule=zbv",
    ],
)  # fmt: skip
def test_a_shorthand_compiles_to_a_legal_plan(text: str) -> None:
    assert check_plan(compiled(text, gpus=None, global_batch=8)) == []


def test_parameters_on_the_host_come_back_unit_by_unit() -> None:
    plan = compiled("offload=params", layers=4, global_batch=2, gpus=1)
    reloads = [code for code in plan.device_plans[0].codes() if code.startswith("0RELOAD:F0")]
    assert len(reloads) == len(plan.device_plans[0].buckets) > 1


def test_a_mesh_for_some_stages_is_refused_with_its_line(tmp_path: Path) -> None:
    entries = [
        {"op": "mesh", "axes": {"dp": 2, "pp": 2}},
        {"op": "mesh", "axes": {"tp": 2}, "filter": {"PP": 1}},
        {"op": "replicate", "filter": {}},
    ]
    path = tmp_path / "s.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]")
    with pytest.raises(StrategyError, match="is not available") as caught:
        compiled(str(path), global_batch=4)
    assert (caught.value.where, caught.value.field) == (f"{path}:3", "mesh.filter")
