"""Every text with which the language refuses a strategy file; what only the published system refused.

The golden files show, per group, the entries of each broken file by line, and the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piper.errors import StrategyError
from piper.graph import CapturedModel
from simulator.plan import Plan
from simulator.plan.check import check_plan
from tests.graphs import transformer
from tests.jobs import compiled

Entry = Any


def op(name: str, **fields: Any) -> dict[str, Any]:
    return {"op": name, **fields}


def places(*homes: object) -> list[Entry]:
    """Return a place for each stage: by pipeline rank, or by a list of devices."""
    return [
        op(
            "place",
            filter={"PP": stage},
            **({"devices": home} if isinstance(home, list) else {"at": {"pp": home}}),
        )
        for stage, home in enumerate(homes)
    ]


def slots(*texts: str) -> list[list[dict[str, Any]]]:
    """Return slots of filters: slots("0F1", "0B0 1F2")."""
    return [[_task(text) for text in slot.split()] for slot in texts]


def _task(text: str) -> dict[str, Any]:
    found = re.fullmatch(r"(\d+)([FBIW]+)(\d+)", text)
    assert found is not None
    stage, letters, microbatch = found.groups()
    return {"PP": int(stage), "MB": int(microbatch), "PASS": letters}


def parts(*filters: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return a slot for each filter, all of microbatch 0."""
    return [[{"MB": 0} | which] for which in filters]


MESH = op("mesh", axes={"pp": 2, "dp": 2, "tp": 2})
REPLICATE = op("replicate", filter={})
SPLIT = op("split", filter={}, dim_name="MB", num_microbatches=2)
CUT = (REPLICATE, op("shard_tensor", filter={"TP": "*"}))
ROW = slots("0F0", "0F1", "0B0", "0B1")

GROUPS: dict[str, dict[str, list[Entry]]] = {
    "file": {
        "an entry that is no object": [MESH, "place"],
        "an entry without op": [MESH, {"filter": {}}],
        "an unknown op": [MESH, op("plaice", filter={})],
        "a field that the directive does not have": [MESH, op("replicate", filter={}, shard_gradients=True)],
        "filters in a directive with one filter": [MESH, op("replicate", filters=[{}])],
        "no filter": [MESH, op("replicate")],
        "a filter that is no object": [MESH, op("replicate", filter=[0])],
    },
    "filter": {
        "a tag that the model does not have": [MESH, op("replicate", filter={"LAYR": 0})],
        "an index that the model does not have": [MESH, REPLICATE, op("recompute", filter={"LAYER": 17})],
        "a negative index": [MESH, op("replicate", filter={"PP": -1})],
        "a range that falls": [MESH, op("replicate", filter={"PP": "3-1"})],
        "an unknown negation": [MESH, op("replicate", filter={"PP": {"no": 1}})],
        "an empty list": [MESH, op("replicate", filter={"PP": []})],
        "an unknown pass": [MESH, op("replicate", filter={"PASS": "G"})],
        "any pass": [MESH, op("replicate", filter={"PASS": "*"})],
        "no pass": [MESH, op("replicate", filter={"PASS": None})],
    },
    "mesh": {
        "no axes": [op("mesh")],
        "an unknown axis": [op("mesh", axes={"pq": 2})],
        "an axis twice": [op("mesh", axes=[["pp", 2], ["pp", 4]])],
        "a size that is no number": [op("mesh", axes={"pp": "2"})],
        "sizes of hybrid sharding that are not dp": [
            op("mesh", axes={"dp": 4, "dp_shard": 2, "dp_replicate": 4})
        ],
        "a mesh of something else than stages": [MESH, op("mesh", axes={"tp": 2}, filter={"LAYER": 0})],
        "pp inside a stage": [MESH, op("mesh", axes={"pp": 2}, filter={"PP": 0})],
        "a stage with more ranks than the others": [MESH, op("mesh", axes={"tp": 8}, filter={"PP": 0})],
        "experts on more ranks than there are": [op("mesh", axes={"pp": 2, "dp": 2, "ep": 3}), REPLICATE],
    },
    "stage_meshes": {
        "another cut of sequences": [MESH, op("mesh", axes={"tp": 2, "cp": 2}, filter={"PP": 0}), *CUT],
        "replicas that are no unions of others": [
            op("mesh", axes={"pp": 2, "dp": 2, "tp": 3}),
            op("mesh", axes={"dp": 3, "tp": 2}, filter={"PP": 1}),
            *CUT,
        ],
        "replicas that are no unions of those of a third stage": [
            op("mesh", axes={"pp": 3, "dp": 1, "tp": 6}),
            *(op("mesh", axes={"dp": dp, "tp": 6 // dp}, filter={"PP": dp - 1}) for dp in (2, 3)),
            *CUT,
        ],
        "more replicas than sequences": [
            MESH,
            op("mesh", axes={"dp": 4}, filter={"PP": 1}),
            op("split", filter={}, micro_batch=1),
            *CUT,
        ],
        "two meshes on a pipeline rank": [
            MESH,
            op("mesh", axes={"tp": 4}, filter={"PP": 2}),
            *places(0, 1, 0, 1),
            *CUT,
        ],
        "ranks that would repeat the same work": [
            op("mesh", axes={"pp": 2, "dp": 4}),
            op("mesh", axes={"tp": 4}, filter={"PP": 1}),
            REPLICATE,
        ],
        "experts that nothing distributes": [
            MESH,
            op("mesh", axes={"tp": 2, "dp": 2, "ep": 2}, filter={"PP": 1}),
            *CUT,
        ],
        "shards that are more than the replicas of a stage": [
            op("mesh", axes={"pp": 2, "dp": 4}),
            op("mesh", axes={"tp": 2, "dp": 2}, filter={"PP": 1}),
            op("replicate", filter={}, shard_params=True, shard_ranks=4),
            op("shard_tensor", filter={"TP": "*"}),
        ],
        "shards of a stage that contradict replicate": [
            op("mesh", axes={"pp": 2, "dp": 4}),
            op("mesh", axes={"dp_replicate": 1, "dp_shard": 4}, filter={"PP": 1}),
            op("replicate", filter={}, shard_params=True, shard_ranks=2),
        ],
        "experts of a stage that contradict shard": [
            op("mesh", axes={"pp": 2, "dp": 4}),
            op("mesh", axes={"dp": 4, "ep": 4}, filter={"PP": 1}),
            REPLICATE,
            op("shard", filter={"EP": "*"}, degree=2),
        ],
    },
    "place": {
        "no stage": [op("place", filter={"LAYER": 0}, at={"pp": 0})],
        "neither at nor devices": [op("place", filter={"PP": 0})],
        "both at and devices": [op("place", filter={"PP": 0}, at={"pp": 0}, devices=[0])],
        "devices and its alias": [op("place", filter={"PP": 0}, devices=[0], device=[0])],
        "no device": [op("place", filter={"PP": 0}, devices=[])],
        "a device that is no number": [op("place", filter={"PP": 0}, devices=["a"])],
        "a gap in the stages": [
            op("place", filter={"PP": 0}, devices=[0]),
            op("place", filter={"PP": 2}, devices=[1]),
        ],
        "device lists of two lengths": places([0, 1], [2]),
        "device lists that share a device": places([0, 1], [1, 2]),
        "a list that repeats a device": places([0, 0]),
        "devices on some stages only": [*places([0, 1]), op("place", filter={"PP": 1}, at={"pp": 1})],
        "a position that is not on the axis": [MESH, REPLICATE, *places(0, 2)],
        "a pipeline rank without a stage": [MESH, REPLICATE, *places(0, 0)],
        "half of an axis": [
            MESH,
            REPLICATE,
            op("place", filter={"PP": 0}, at={"pp": 0, "dp": "0"}),
            places(0, 1)[1],
        ],
        "two names for the stream of transfers": [
            op("mesh", axes={"pp": 2}),
            places(0)[0] | {"stream": "a"},
            places(0, 1)[1] | {"stream": "b"},
        ],
        "a stream of gathers": [op("place", filter={"PP": 0}, devices=[0], gather_stream="g")],
        "a stream of reductions": [op("place", filter={"PP": 0}, devices=[0], reduce_stream="r")],
        "units on some stages only": [
            op("mesh", axes={"pp": 2}),
            places(0)[0] | {"units": 4},
            places(0, 1)[1],
        ],
        "units that are not those of the model": [
            op("mesh", axes={"pp": 1}),
            places(0)[0] | {"units": 1},
        ],
        "more stages than units": [op("mesh", axes={"pp": 16})],
    },
    "split": {
        "an empty name": [op("split", filter={}, dim_name="", num_microbatches=2)],
        "a name that filters use": [op("split", filter={}, dim_name="PASS", num_microbatches=2)],
        "a name that is a tag of the model": [op("split", filter={}, dim_name="LAYER", num_microbatches=2)],
        "a placeholder for the number": [op("split", filter={}, dim_name="MB", num_microbatches="NUM_MBS")],
        "no microbatch": [op("split", filter={}, dim_name="MB", num_microbatches=0)],
        "neither number nor size": [op("split", filter={}, dim_name="MB")],
        "number and its alias": [op("split", num_microbatches=2, microbatches=2)],
        "a part of the model": [
            op("mesh", axes={"pp": 2}),
            op("split", filter={"PP": 0}, num_microbatches=2),
        ],
        "number and size that contradict each other": [op("split", num_microbatches=3, micro_batch=4)],
        "more microbatches than samples": [op("split", num_microbatches=64)],
    },
    "replicate": {
        "a stream without a purpose": [MESH, op("replicate", filter={}, stream="dp")],
        "devices that are not those of the stages": [
            *places([0, 1], [2, 3]),
            op("replicate", filter={}, devices=[0, 2]),
        ],
        "an empty bucket": [MESH, op("replicate", filter={}, bucket_size=0)],
        "a bucket that is no number": [MESH, op("replicate", filter={}, bucket_size="25MB")],
        "a flag that is no flag": [MESH, op("replicate", filter={}, shard_params="yes")],
        "a field and its alias that differ": [MESH, op("replicate", filter={}, bucket_mb=2, bucket_size=3)],
        "prefetch of parameters that are not gathered": [
            MESH,
            op("replicate", filter={}, prefetch_distance=2),
        ],
        "a kept parameter that is not gathered": [
            MESH,
            op("replicate", filter={}, shard_grads=True, regather=False),
        ],
        "shards of nothing": [MESH, op("replicate", filter={}, shard_ranks=2)],
        "shards that do not divide the replicas": [
            MESH,
            op("replicate", filter={}, shard_grads=True, shard_ranks=3),
        ],
        "an unknown reduction": [MESH, op("replicate", filter={}, reduce="often")],
        "an unknown dtype": [MESH, op("replicate", filter={}, reduce_dtype="fp8")],
        "another axis": [MESH, op("replicate", filter={}, axis="tp")],
        "a stage on replicas that nothing replicates": [
            op("mesh", axes={"pp": 2, "dp": 2}),
            op("replicate", filter={"PP": 0}),
        ],
    },
    "shard": {
        "devices that are not those of the stages": [
            *places([0, 1], [2, 3]),
            REPLICATE,
            op("shard", filter={"EP": "*"}, devices=[1, 2]),
        ],
        "a single device": [*places([0]), op("shard", filter={"EP": "*"}, devices=[0])],
        "a degree that does not divide the ranks": [
            MESH,
            REPLICATE,
            op("shard", filter={"EP": "*"}, degree=3),
        ],
        "more ranks than experts": [
            op("mesh", axes={"dp": 8}),
            REPLICATE,
            op("shard", filter={"EP": "*"}, degree=8),
        ],
        "a region without experts": [
            op("mesh", axes={"dp": 2}),
            REPLICATE,
            op("shard", filter={"CP": "*"}, degree=2),
        ],
        "less tokens than the mean on the fullest rank": [
            MESH,
            op("shard", filter={"EP": "*"}, imbalance=0.5),
        ],
        "a capacity that is no number": [MESH, op("shard", filter={"EP": "*"}, capacity="all")],
        "another axis": [MESH, op("shard", filter={"EP": "*"}, axis="tp")],
        "a stream of reductions": [MESH, op("shard", filter={"EP": "*"}, reduce_stream="r")],
    },
    "shard_tensor": {
        "devices that are not those of the stages": [
            *places([0, 1], [2, 3]),
            op("shard_tensor", filter={"TP": "*"}, devices=[1, 2]),
        ],
        "a single device": [*places([0]), op("shard_tensor", filter={"TP": "*"}, devices=[0])],
        "an axis with one rank": [
            op("mesh", axes={"dp": 2}),
            REPLICATE,
            op("shard_tensor", filter={"TP": "*"}),
        ],
        "an unknown axis": [MESH, op("shard_tensor", filter={"TP": "*"}, axis="dp")],
        "experts that are not cut": [MESH, REPLICATE, op("shard_tensor", filter={"EP": "*"}, axis="etp")],
    },
    "shard_sequence": {
        "attention that nothing exchanges": [
            op("mesh", axes={"cp": 2}),
            REPLICATE,
            op("shard_sequence", filter={"CP": [0, 1]}),
        ],
        "an axis with one rank": [MESH, REPLICATE, op("shard_sequence", filter={"CP": "*"})],
        "an unknown method": [MESH, op("shard_sequence", filter={"CP": "*"}, method="tree")],
        "a flag that is no flag": [MESH, op("shard_sequence", filter={"CP": "*"}, balanced=1)],
    },
    "order": {
        "neither schedule nor filters": [op("order")],
        "both schedule and filters": [op("order", schedule="1f1b", filters=ROW)],
        "an unknown schedule": [op("mesh", axes={"pp": 2}), op("order", schedule="1f2b")],
        "stages per rank of rows": [op("order", filters=ROW, vp=2)],
        "no slot": [op("order", filters=[])],
        "an empty slot": [op("order", filters=[[]])],
        "a slot that is no list": [op("order", filters=[{"PP": 0}])],
        "a microbatch that does not exist": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            op("order", filters=slots("0F0", "0F7")),
        ],
        "parts with something between": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            op("order", filters=parts({"PASS": "F", "LAYER": [0, 2]}, {"PASS": "F", "LAYER": 1})),
        ],
        "a part twice": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            op("order", filters=parts({"PASS": "F", "LAYER": [0, 1]}, {"PASS": "F", "LAYER": 1})),
        ],
        "a part beside its stage": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            op("order", filters=parts({"PASS": "F"}, {"PASS": "F", "LAYER": 1})),
        ],
        "a part before another one that it needs": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            op("order", filters=parts(*({"PASS": "F", "LAYER": i} for i in (1, 0)))),
        ],
        "a part too early in rows that are complete": [
            op("mesh", axes={"pp": 2}),
            op("split", filter={}, dim_name="MB", num_microbatches=1),
            op(
                "order",
                filters=parts(
                    *({"PP": 0, "PASS": "F", "LAYER": i} for i in ("*", None)), {"PP": 0, "PASS": "B"}
                ),
            ),
            op("order", filters=slots("1F0", "1B0")),
        ],
        "weights of a part before its inputs": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            op(
                "order",
                filters=parts(
                    {"PASS": "F"}, *({"PASS": p, "LAYER": i} for p in ("BW", "BI") for i in (1, 0))
                ),
            ),
        ],
        "a set with something between": [
            op("mesh", axes={"pp": 1}),
            *places(0, 0, 0),
            SPLIT,
            op("order", filters=[[{"PP": [0, 2], "MB": 0, "PASS": "F"}], *slots("1F0")]),
        ],
        "stages of two ranks": [op("mesh", axes={"pp": 2}), SPLIT, op("order", filters=slots("0F0", "1F0"))],
        "a task twice": [op("mesh", axes={"pp": 1}), SPLIT, op("order", filters=slots("0F0", "0F0"))],
        "BI without BW": [op("mesh", axes={"pp": 1}), SPLIT, op("order", filters=slots("0F0", "0BI0"))],
        "BW without BI": [op("mesh", axes={"pp": 1}), SPLIT, op("order", filters=slots("0F0", "0BW0"))],
        "BW before BI": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            op("order", filters=slots("0F0", "0BW0", "0BI0")),
        ],
        "BI twice": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            op("order", filters=slots("0F0", "0BI0", "0BI0", "0BW0")),
        ],
        "B beside its halves": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            op("order", filters=slots("0F0", "0B0", "0BI0", "0BW0")),
        ],
    },
    "recompute": {
        "an unknown mode": [op("recompute", filter={}, mode="half")],
        "kinds of a full recomputation": [op("recompute", filter={}, ops=["attention"])],
        "an unknown kind": [op("recompute", filter={}, mode="selective", ops=["atention"])],
        "no layer": [op("recompute", filter={}, layers=0)],
    },
    "offload": {
        "nothing": [op("offload", filter={})],
        "something unknown": [op("offload", filter={}, what="gradients")],
        "a negative distance": [op("offload", filter={}, what="optimizer", prefetch=-1)],
        "parameters that are cut and gathered": [
            op("mesh", axes={"dp": 2}),
            op("replicate", filter={}, shard_params=True),
            op("offload", filter={}, what="params"),
        ],
    },
    "streams": {
        "no name": [op("priority", level=1)],
        "no level": [op("priority", stream="ep")],
        "a stream that does not exist": [op("mesh", axes={"pp": 1}), op("priority", stream="epp", level=1)],
        "a budget of nothing": [op("sm_budget", stream="ep", sms=0)],
        "a budget of the compute stream": [op("sm_budget", stream="compute", sms=8)],
    },
    "conflicts": {
        "two meshes": [MESH, op("mesh", axes={"pp": 4})],
        "a mesh and device lists": [op("mesh", axes={"pp": 4}), *places([0, 1], [2, 3])],
        "two meshes of a stage": [
            MESH,
            REPLICATE,
            *(op("mesh", axes={"tp": n, "dp": 4 // n}, filter={"PP": 0}) for n in (1, 4)),
        ],
        "two splits": [SPLIT, op("split", filter={}, dim_name="MB", num_microbatches=4)],
        "two replicates of a stage": [MESH, REPLICATE, op("replicate", filter={"PP": 1}, shard_grads=True)],
        "shards of the mesh and of replicate": [
            op("mesh", axes={"dp_replicate": 2, "dp_shard": 2}),
            op("replicate", filter={}, shard_params=True, shard_ranks=4),
        ],
        "experts of the mesh and of shard": [
            op("mesh", axes={"dp": 4, "ep": 4}),
            REPLICATE,
            op("shard", filter={"EP": "*"}, degree=2),
        ],
        "two shards of a region": [
            MESH,
            REPLICATE,
            *(op("shard", filter={"EP": w}, degree=2) for w in ("*", 1)),
        ],
        "two shard_tensors of a region": [
            MESH,
            REPLICATE,
            *(op("shard_tensor", filter={"TP": w}) for w in ("*", 0)),
        ],
        "two shard_sequences of a region": [
            op("mesh", axes={"cp": 2}),
            REPLICATE,
            *(op("shard_sequence", filter={"CP": w}) for w in ("*", 1)),
        ],
        "shard, then shard_tensor of a region": [
            MESH,
            REPLICATE,
            op("shard", filter={"EP": "*"}, degree=2),
            op("shard_tensor", filter={"EP": 0}),
        ],
        "shard_tensor, then shard of a region": [
            MESH,
            REPLICATE,
            op("shard_tensor", filter={"EP": 0}),
            op("shard", filter={"EP": "*"}, degree=2),
        ],
        "two recomputes of a layer": [*(op("recompute", filter={"LAYER": w}) for w in ("0-2", 1))],
        "two offloads of a kind": [
            *(op("offload", filter={"LAYER": w}, what="activations") for w in ("0-2", 1))
        ],
        "two priorities of a stream": [*(op("priority", stream="dp", level=n) for n in (1, 2))],
        "two budgets of a stream": [*(op("sm_budget", stream="dp", sms=n) for n in (8, 16))],
        "two schedules": [*(op("order", schedule=name) for name in ("1f1b", "gpipe"))],
        "a schedule and rows": [op("order", schedule="1f1b"), op("order", filters=ROW)],
        "two orders of a rank": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            *(op("order", filters=slots(t)) for t in ("0F0", "0F1")),
        ],
        "BI and BW in two orders": [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            *(op("order", filters=slots("0F0", t)) for t in ("0BI0", "0BW0")),
        ],
        "a schedule that lays stages otherwise": [
            op("mesh", axes={"pp": 2}),
            *places(0, 1, 0, 1),
            op("order", schedule="zbv"),
        ],
        "a schedule with other stages": [
            op("mesh", axes={"pp": 2}),
            *places(0, 1),
            op("order", schedule="1f1b", vp=2),
        ],
    },
}


def model(micro_batch: int) -> CapturedModel:
    return transformer(layers=6, micro_batch=micro_batch, experts=True)


def plan_of(tmp_path: Path, entries: list[Entry]) -> Plan:
    """Compile a file with one entry per line; the first stands in line 1."""
    path = tmp_path / "strategy.json"
    path.write_text("[" + ",\n".join(json.dumps(entry) for entry in entries) + "]")
    return compiled(str(path), model=model, global_batch=16)


@pytest.mark.parametrize("group", GROUPS)
def test_a_broken_file_is_refused_with_line_field_rule_and_fix(
    group: str, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    shown = []
    for name, entries in GROUPS[group].items():
        with pytest.raises(StrategyError) as caught:
            plan_of(tmp_path, entries)
        found = caught.value
        text = str(found).replace(f"{tmp_path}/", "")
        assert re.match(r"strategy\.json:\d+: ", text), (name, text)
        assert found.field, name
        assert found.rule, name
        assert found.fix, name
        lines = [f"{line:>4}  {json.dumps(entry)}" for line, entry in enumerate(entries, 1)]
        shown.append("\n".join([name, *lines, text]))
    golden(f"piper/strategy/errors/{group}.txt", "\n\n".join(shown) + "\n")


LIFTED: dict[str, tuple[str, list[Entry]]] = {
    "a strategy without place": (
        "the default cut, in the order of the pipeline ranks",
        [MESH, REPLICATE, op("shard_tensor", filter={"TP": "*"})],
    ),
    "a strategy without split": ("microbatches by the size of one", [op("mesh", axes={"pp": 2})]),
    "a pipeline without order": (
        "1F1B, or interleaved 1F1B",
        [op("mesh", axes={"pp": 2}), *places(0, 1), SPLIT],
    ),
    "an order of one slot": (
        "the other tasks are filled in",
        [
            op("mesh", axes={"pp": 2}),
            SPLIT,
            op("order", filters=slots("0F0")),
        ],
    ),
    "an order of some ranks": (
        "the other ranks get the default",
        [
            op("mesh", axes={"pp": 2}),
            SPLIT,
            op("order", filters=slots("1F0", "1B0", "1F1", "1B1")),
        ],
    ),
    "a list, a range and a negation in a filter": (
        "they mean any of several indices, or none of them",
        [
            op("mesh", axes={"pp": 2, "dp": 2}),
            op("replicate", filter={"PP": [0, 1]}),
            op("recompute", filter={"LAYER": "0-2", "EP": {"not": "*"}, "TP": None}),
        ],
    ),
    "several passes in a filter": (
        "a set of them",
        [
            op("mesh", axes={"pp": 1}),
            SPLIT,
            op("order", filters=[[{"PP": 0, "MB": m, "PASS": ["F", "B"]}] for m in (0, 1)]),
        ],
    ),
    "replicas on a part of the devices": (
        "hybrid sharding: copies of shards",
        [
            op("mesh", axes={"dp_replicate": 2, "dp_shard": 2}),
            op("replicate", filter={}, shard_params=True),
        ],
    ),
    "data parallelism of a tensor-parallel region": (
        "axes of their own",
        [
            MESH,
            REPLICATE,
            op("shard_tensor", filter={"TP": "*"}),
        ],
    ),
    "experts on fewer ranks than replicas": (
        "each expert exists several times",
        [
            op("mesh", axes={"dp": 4, "ep": 2}),
            REPLICATE,
            op("shard", filter={"EP": "*"}),
        ],
    ),
    "shard before replicate": (
        "the order in the file says nothing",
        [
            op("mesh", axes={"dp": 2, "ep": 2}),
            op("shard", filter={"EP": "*"}),
            REPLICATE,
        ],
    ),
    "tensors and experts of one stage": (
        "different regions, or etp",
        [
            op("mesh", axes={"dp": 2, "tp": 2, "ep": 2, "etp": 2}),
            REPLICATE,
            op("shard", filter={"EP": "*"}),
            op("shard_tensor", filter={"TP": "*"}),
            op("shard_tensor", filter={"EP": "*"}, axis="etp"),
        ],
    ),
    "buckets of a split backward": (
        "they do not depend on passes",
        [
            op("mesh", axes={"pp": 1, "dp": 2}),
            op("replicate", filter={}, shard_grads=True, bucket_mb=1),
            SPLIT,
            op("order", filters=slots("0F0", "0BI0", "0BW0", "0F1", "0BI1", "0BW1")),
        ],
    ),
    "buckets beside regions of experts": (
        "experts have buckets of their own",
        [
            op("mesh", axes={"dp": 2, "ep": 2}),
            op("replicate", filter={}, shard_params=True, bucket_size=1),
            op("shard", filter={"EP": "*"}),
        ],
    ),
    "tensor parallelism of a model for one device": (
        "the cut of each parameter follows from the model",
        [op("mesh", axes={"tp": 2}), op("shard_tensor", filter={"TP": "*"})],
    ),
    "a pipeline stage of several segments in ZeRO-3": (
        "units are gathered one after the other, and kept where a backward follows its forward",
        [op("mesh", axes={"pp": 2, "dp": 2}), op("replicate", filter={}, shard_params=True)],
    ),
    "recomputation": ("a directive", [op("mesh", axes={"pp": 1}), op("recompute", filter={"LAYER": "*"})]),
    "ZeRO-1": (
        "shard_optimizer",
        [op("mesh", axes={"dp": 2}), op("replicate", filter={}, shard_optimizer=True)],
    ),
}
"""What the published system refuses or ignores, what we make of it, and a file that says so."""


@pytest.mark.parametrize("name", LIFTED)
def test_what_only_the_published_system_refuses_compiles_to_a_legal_plan(name: str, tmp_path: Path) -> None:
    meaning, entries = LIFTED[name]
    assert meaning
    assert [str(violation) for violation in check_plan(plan_of(tmp_path, entries))] == []
