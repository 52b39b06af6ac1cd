"""Every schedule trains as one process does, and holds the bytes that the simulation says.

Each run is `piper run tiny-llama --local N --strategy ... --steps 3 --verify`, with the ledger of every task.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from piper.schedules import SCHEDULES
from simulator.plan import TaskKind
from tests.piper.runtime.jobs import parted_plan_of, plan_of, train
from tests.piper.runtime.ledgers import differences
from tests.piper.runtime.named_runs import BITWISE, compiled_job, require_equal, run_job
from tests.piper.runtime.small_models import small_model
from tests.piper.runtime.toy import SEQ

NAMED = {
    "gpipe": "pp=4,schedule=gpipe",
    "1f1b": "pp=4,schedule=1f1b",
    "interleaved_1f1b": "pp=2,vp=2,schedule=interleaved_1f1b",
    "interleaved_zb": "pp=4,vp=2,schedule=interleaved_zb",
    "zb_h1": "pp=4,schedule=zb_h1",
    "zb_2p": "pp=4,schedule=zb_2p",
    "zbv": "pp=4,schedule=zbv",
    "v_half": "pp=4,schedule=v_half",
    "dualpipe": "pp=4,schedule=dualpipe",
    "dualpipe_v": "pp=4,schedule=dualpipe_v",
}
SMALL = {
    "looped_bfs": "pp=2,vp=4,schedule=looped_bfs",
    "zb_h2": "pp=3,schedule=zb_h2",
    "zb_1p": "pp=3,schedule=zb_1p",
    "v_min": "pp=2,schedule=v_min",
    "synthesized": "pp=3,schedule=synthesized",
    "synthesized_v": "pp=2,schedule=synthesized_v",
    "halves, replicas, zero 1": "pp=2,dp=2,schedule=zb_h1,zero=1",
    "two directions, replicas, zero 1, recompute": "pp=2,dp=2,schedule=dualpipe,zero=1,recompute=full",
    "halves, recompute": "pp=2,schedule=zbv,recompute=full",
    "uneven last microbatch, some recompute": "pp=2,schedule=dualpipe_v,micro_batch=3,recompute=full:3",
    "in pairs": "pp=4,schedule=examples/schedules.py:in_pairs",
}
TOY = "tests.piper.runtime.toy:plain"
UNEVEN = [
    {"op": "mesh", "axes": {"pp": 4}},
    *(
        {"op": "place", "filter": {"PP": stage}, "at": {"pp": stage}, "units": units}
        for stage, units in enumerate((2, 7, 5, 4))
    ),
    {"op": "order", "schedule": "zb_h1"},
]
PARTS = [
    {"op": "split", "filter": {}, "num_microbatches": 4},
    {
        "op": "order",
        "filters": [
            [{"MB": 0, "PASS": "F"}],
            [{"MB": 1, "PASS": "F", "LAYER": 3}, {"MB": 0, "PASS": "B", "TP": 33}],
            [{"MB": 1, "PASS": "BI"}],
            [{"MB": 2, "PASS": "F", "LAYER": 7}],
            [{"MB": 1, "PASS": "BW"}],
        ],
    },
]
ROWS = """
def both_ends(*, num_pipeline_ranks, num_microbatches, **_):
    rows = []
    for rank in range(num_pipeline_ranks):
        every = range(num_microbatches)
        forwards = [f"{rank}F{m}" for m in every]
        rows.append([*forwards, *(f"{rank}BI{m}" for m in every), *(f"{rank}BW{m}" for m in reversed(every))])
    return rows
"""


def check(strategy: str, *, model: str = "tiny-llama", **options: object) -> None:
    job = compiled_job(model, strategy, **{"optimizer": "sgd", **options})
    outcome = run_job(job)
    require_equal(outcome)
    assert differences(job, outcome) == []


def written(path: Path, strategy: object) -> str:
    path.write_text(json.dumps(strategy))
    return str(path)


def test_every_schedule_has_a_run() -> None:
    assert {*NAMED, *SMALL} >= {*SCHEDULES}


@pytest.mark.parametrize("name", NAMED)
def test_a_schedule_trains_like_one_process_in_the_bytes_of_the_simulation(name: str) -> None:
    check(NAMED[name])


@pytest.mark.parametrize("name", SMALL)
def test_so_it_does_with_replicas_shards_and_recomputation(name: str) -> None:
    check(SMALL[name], model=TOY, seq_len=SEQ, global_batch=11 if "uneven" in name else 8)


def test_stages_may_be_uneven(tmp_path: Path) -> None:
    check(written(tmp_path / "uneven.json", UNEVEN), global_batch=4)


def test_a_stage_may_run_in_parts_that_overlap_with_others(tmp_path: Path) -> None:
    check(written(tmp_path / "parts.json", PARTS), gpus=1)


def test_weights_may_be_added_in_another_order_than_gradients_pass(tmp_path: Path) -> None:
    """The file of a user, by function and as a table; sums of gradients go from the last microbatch down."""
    (tmp_path / "mine.py").write_text(ROWS)
    check(f"pp=2,schedule={tmp_path / 'mine.py'}:both_ends", global_batch=2)
    rows = ["0F0,0F1,0I0,0I1,0W1,0W0", "1F0,1F1,1I0,1I1,1W1,1W0"]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    check(f"pp=2,schedule={tmp_path / 'table.csv'}", global_batch=2)


def test_an_embedding_and_a_head_that_share_their_weights_live_on_both_ends(tmp_path: Path) -> None:
    config = json.loads(Path("examples/tiny-llama/config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check("pp=4,schedule=zb_h1", model=str(tmp_path / "config.json"), global_batch=4)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("tiny-moe", "pp=2,schedule=zb_h1"),
        ("tests.piper.runtime.toy:plain_crossing", "pp=3,schedule=zb_h1"),
        ("tests.piper.runtime.toy:plain_crossing", "pp=2,schedule=zbv"),
        ("tests.piper.runtime.toy:frozen", "pp=2,schedule=dualpipe_v"),
    ],
)
def test_halves_of_other_models_are_exact_too(model: str, strategy: str) -> None:
    check(strategy, model=model, **({"global_batch": 4} if model == "tiny-moe" else {"seq_len": SEQ}))


@pytest.mark.parametrize(
    "text", ["pp=2,schedule=zb_h1,recompute=full:1", "pp=2,dp=2,zero=3,schedule=dualpipe_v"]
)
def test_steps_that_nobody_measures_any_more_change_no_bit(text: str) -> None:
    """From the fourth step on autograd runs without hooks [Note: steps alike]."""
    model = {"dropout": 0.1}
    outcome = train(plan_of(text, clip=0.1, **model), model=model, steps=5)
    require_equal(outcome)


def test_the_pipeline_of_the_language_guide_runs_on_eight_ranks() -> None:
    check("examples/strategies/interleaved_zero1.json", gpus=8, global_batch=16)


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v2", "llama with adapters", "falcon"])
def test_halves_of_other_families_are_exact_too(family: str, tmp_path: Path) -> None:
    """Parameters are added to what passes on, outputs read where they are made, layers stand in parallel."""
    check("pp=2,schedule=zb_h1", model=small_model(family, tmp_path), global_batch=4)


PARTED = [
    ("pp=2", {}),
    ("pp=2,dp=2", {"crossing": True, "tied": True}),
    ("pp=1", {"frozen": 2}),
    ("pp=3,recompute=full", {"dropout": 0.1, "crossing": True}),
    ("pp=2,recompute=full:2", {}),
]


def run_in_random_parts(seed: int) -> None:
    text, model = PARTED[seed % len(PARTED)]
    plan = parted_plan_of(text, seed=seed, **model)
    outcome = train(plan, model=model, steps=2)
    assert outcome.differing == ()
    assert outcome.result["max_relative_error"] == BITWISE
    assert outcome.result["verified"] is True


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 71])
def test_stages_in_random_parts_that_take_turns_change_no_bit(seed: int) -> None:
    run_in_random_parts(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_many_stages_in_random_parts_that_take_turns_change_no_bit(seed: int) -> None:
    run_in_random_parts(seed)


def test_some_of_the_random_parts_divide_forwards_and_halves() -> None:
    plans = [parted_plan_of(text, seed=i, **model) for i, (text, model) in enumerate(PARTED)]
    kinds = {
        TaskKind(kind)
        for plan in plans
        for device in plan.device_plans
        for kind in device.tasks.kind[device.tasks.part >= 0].tolist()
    }
    assert {TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.BW} <= kinds
