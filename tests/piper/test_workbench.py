"""What is kept for the next prediction, and what is not."""

from __future__ import annotations

from piper.predict import Job, predict
from piper.strategy import load_strategy
from piper.workbench import MOST, Workbench


def test_what_was_made_is_kept_by_its_key_and_kind() -> None:
    made: list[int] = []

    def make() -> list[int]:
        made.append(len(made))
        return made[-1:]

    bench = Workbench()
    assert bench.once("graph", "a", make) is bench.once("graph", "a", make)
    assert bench.once("graph", "b", make) == [1]
    assert bench.once("capture", "a", make) == [2]


def test_what_was_used_longest_ago_makes_room() -> None:
    bench, made = Workbench(), []
    for key in (*range(MOST["graph"]), 0, MOST["graph"], 0, 1):
        bench.once("graph", key, lambda key=key: made.append(key))  # type: ignore[misc]
    assert made == [*range(MOST["graph"]), MOST["graph"], 1]


def test_predictions_that_share_a_workbench_are_those_without_one() -> None:
    bench = Workbench()
    for text, batch in (("pp=2", 8), ("pp=2", 16), ("dp=2,zero=1", 8), ("pp=2", 8)):
        job = Job(model="tiny-llama", strategy=load_strategy(text), gpus=2, global_batch=batch)
        shared, alone = predict(job, bench=bench, verified=False).result, predict(job).result
        assert shared | {"timings_s": {}} == alone | {"timings_s": {}}
