"""Plans that come back from disk, and files that do not become plans."""

from __future__ import annotations

import hashlib
import pickle
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from piper.plan_store import SUFFIX, PlanStore, plan_key
from piper.predict import Job, predict, prepare
from piper.strategy import load_strategy
from piper.workbench import Workbench
from simulator.plan import Plan
from simulator.plan.codec import plan_hash

JOB = Job(model="tiny-llama", strategy=load_strategy("pp=2,zero=1"), gpus=4, global_batch=8)


@pytest.fixture
def plan() -> Plan:
    return prepare(JOB).plan()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def written(folder: Path, content: bytes, *, key: str = "k") -> None:
    body = zlib.compress(content)
    head = f"piper plan {hashlib.sha256(body).hexdigest()}".encode()
    (folder / f"{key}{SUFFIX}").write_bytes(head + b"\n" + body)


def test_a_plan_comes_back_as_it_was_kept(tmp_path: Path, plan: Plan) -> None:
    PlanStore(tmp_path / "new").keep("k", plan)
    found = PlanStore(tmp_path / "new").load("k")
    assert found is not None
    assert plan_hash(found) == plan_hash(plan)
    assert PlanStore(tmp_path / "new").load("other") is None


def test_damaged_and_foreign_files_are_no_plans(tmp_path: Path, plan: Plan) -> None:
    store = PlanStore(tmp_path)
    store.keep("k", plan)
    content = files(tmp_path)[0].read_bytes()
    for damaged in (content[:-7], b"", content.replace(b"piper plan", b"piper plaN")):
        files(tmp_path)[0].write_bytes(damaged)
        assert store.load("k") is None
    written(tmp_path, pickle.dumps({"no": "plan"}))
    assert store.load("k") is None


def test_a_file_runs_no_code_of_others(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (ran,)

    written(tmp_path, pickle.dumps(Evil()))
    assert PlanStore(tmp_path).load("k") is None
    assert not ran.exists()


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path, plan: Plan) -> None:
    (tmp_path / "file").write_text("")
    store = PlanStore(tmp_path / "file")
    store.keep("k", plan)
    assert store.load("k") is None


def test_what_was_used_longest_ago_makes_room(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PlanStore(tmp_path)
    for key in "abc":
        store.keep(key, plan)
    size = files(tmp_path)[0].stat().st_size
    monkeypatch.setattr("piper.plan_store.MAX_BYTES", 2 * size)
    assert len(files(tmp_path)) == 3
    PlanStore(tmp_path)
    assert len(files(tmp_path)) == 2


def test_predictions_from_stored_plans_are_those_from_compiled_ones(tmp_path: Path) -> None:
    alone = predict(JOB).result
    for _ in range(2):
        stored = predict(JOB, bench=Workbench(plans=PlanStore(tmp_path))).result
        assert stored | {"timings_s": {}} == alone | {"timings_s": {}}
    assert len(files(tmp_path)) == 1


def test_all_that_decides_a_plan_decides_its_file(tmp_path: Path) -> None:
    bench = Workbench(plans=PlanStore(tmp_path))
    changes = [
        {"global_batch": 16}, {"seq_len": 32}, {"dtype": "fp16"}, {"optimizer": "sgd"},
        {"clip_grad_norm": None}, {"strategy": load_strategy("pp=2,zero=2")}, {"gpus": 2},
        {"strategy": load_strategy("pp=2")},
        {"strategy": load_strategy("pp=2,zero=1,micro_batch=2")}, {"model": "tiny-moe"},
        {"settings": (("strategy.gradient_dtype", "bf16"),)}, {"settings": (("model.attention", "math"),)},
    ]  # fmt: skip
    for number, change in enumerate([{}, *changes], start=1):
        job = replace(JOB, **change)  # type: ignore[arg-type]
        shared = prepare(job, bench=bench).plan()
        assert len(files(tmp_path)) == number, change
        assert plan_hash(shared) == plan_hash(prepare(job).plan())
    assert plan_key("a", "b") != plan_key("ab", "")
