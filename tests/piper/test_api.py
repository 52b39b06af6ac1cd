"""The public verbs of `import piper` do what the commands do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import piper
from cost_models.errors import InputError

JOB: dict[str, Any] = {"gpus": 4, "global_batch": 8, "seq_len": 32}


def test_a_plan_is_compiled_and_simulated() -> None:
    plan = piper.compile_plan("tiny-llama", "pp=2,dp=2", cluster="dgx-h100", micro_batch=1, **JOB)
    result = piper.simulate(plan)
    assert plan.num_ranks == 4
    assert result.step_time_s == result.summary["step_time_s"] > 0
    assert str(result).startswith("tiny-llama, 821 k parameters on 4 GPUs")


def test_a_strategy_object_a_shorthand_and_a_file_mean_the_same(tmp_path: Path) -> None:
    file = tmp_path / "strategy.json"
    mesh = '{"op": "mesh", "axes": {"pp": 2, "dp": 2}}'
    file.write_text(f'[{mesh}, {{"op": "replicate", "filter": {{"PP": "*"}}}}]')
    strategies = ["pp=2,dp=2", str(file), piper.Strategy.parse("pp=2,dp=2"), piper.load_strategy(str(file))]
    plans = [piper.compile_plan("tiny-llama", strategy, **JOB) for strategy in strategies]
    assert len({plan.strategy for plan in plans}) == 1
    assert len({piper.simulate(plan).step_time_s for plan in plans}) == 1


def test_a_result_is_a_frame_a_picture_and_a_folder(tmp_path: Path) -> None:
    result = piper.simulate(piper.compile_plan("tiny-llama", "pp=2,dp=2", **JOB))
    frame = result.to_frame()
    assert {"0F0", "1B0"} <= set(frame["code"])
    assert result.plot(tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    again = piper.load_result(result.save(tmp_path / "kept"))
    assert again.summary == result.summary
    assert again.timeline.rows() == result.timeline.rows()


def test_strategies_are_searched() -> None:
    found = piper.search_strategies("tiny-llama", pin={"micro_batch": "1"}, top=2, **JOB)
    assert len(found.to_json()["ranking"]) == 2


def test_a_registered_schedule_can_be_used() -> None:
    def all_forwards_first(*, num_pipeline_ranks: int, num_microbatches: int, **_: object) -> list[list[str]]:
        passes = [f"F{m}" for m in range(num_microbatches)] + [f"B{m}" for m in range(num_microbatches)]
        return [[f"{rank}{code}" for code in passes] for rank in range(num_pipeline_ranks)]

    piper.register_schedule("all-forwards-first", all_forwards_first)
    mine = piper.compile_plan("tiny-llama", "pp=4,schedule=all-forwards-first", **JOB)
    gpipe = piper.compile_plan("tiny-llama", "pp=4,schedule=gpipe", **JOB)
    assert piper.simulate(mine).step_time_s == piper.simulate(gpipe).step_time_s


def test_a_plan_larger_than_the_cluster_is_refused() -> None:
    plan = piper.compile_plan("tiny-llama", "dp=16", gpus=16, cluster="dgx-h100", seq_len=32)
    with pytest.raises(InputError) as caught:
        piper.simulate(plan, cluster="h100-8gpu")
    assert (caught.value.field, caught.value.value) == ("gpus", 16)
    assert "8" in caught.value.fix


def test_annotate_does_nothing_outside_of_a_capture() -> None:
    with piper.annotate("PP") as annotation:
        assert annotation is None


def test_a_plan_at_a_prompt_is_one_line() -> None:
    plan = piper.compile_plan("tiny-llama", "pp=2,dp=2", gpus=4, global_batch=8)
    assert "\n" not in repr(plan)
    assert repr(plan).startswith("Plan('tiny-llama', 'pp=2,dp=2,zero=0,")
    assert len(repr(plan)) < 200
