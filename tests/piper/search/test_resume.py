"""One answer, however a search is run: on 1, 2 or 4 workers, interrupted, killed, resumed."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from piper.cli import main
from piper.errors import JobError
from piper.search import SearchRequest, search_strategies
from piper.search.evaluate import Evaluator

PIN = {"recompute": "none", "offload": "none", "cp": "1"}
JOB: dict[str, Any] = {"model": "tiny-llama", "gpus": 4, "global_batch": 8, "seq_len": 64, "pin": PIN}
COMMAND = ["search", "tiny-llama", "--gpus", "4", "--global-batch", "8", "--seq-len", "64", "--json"]
COMMAND += [word for name, value in PIN.items() for word in ("--pin", f"{name}={value}")]


def answer(**means: Any) -> str:
    """Return all that a search says but the time that it took."""
    summary = search_strategies(SearchRequest(**JOB, **means)).to_json()
    return json.dumps({name: value for name, value in summary.items() if name != "timings_s"})


@pytest.fixture(scope="module")
def whole() -> str:
    return answer()


def results_in(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        found: int = connection.execute("select count(*) from results").fetchone()[0]
    return found


@pytest.mark.parametrize("jobs", [2, 4])
def test_the_answer_is_the_same_for_any_number_of_workers(jobs: int, whole: str) -> None:
    assert answer(jobs=jobs) == whole


@pytest.mark.parametrize(("kind", "jobs"), [("SIGKILL", 1), ("SIGKILL", 4), ("SIGINT", 2)])
def test_a_search_that_was_stopped_at_a_random_moment_goes_on_to_the_same_answer(
    kind: str, jobs: int, whole: str, tmp_path: Path
) -> None:
    """The moment: after some results and a drawn time, wherever the search is then."""
    db = tmp_path / "search.sqlite"
    command = [sys.executable, "-m", "piper", *COMMAND, "--db", str(db), "--jobs", str(jobs)]
    random = Random(f"{kind} {jobs}")
    enough = random.randrange(1, 12)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as search:
        deadline = time.monotonic() + 120
        while not (db.is_file() and _results_or_none(db, enough)) and search.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(random.random() * 0.05)
        search.send_signal(getattr(signal, kind))
        out, _ = search.communicate(timeout=60)
    kept = results_in(db)
    assert enough <= kept
    if kind == "SIGINT" and search.returncode != 0:
        assert search.returncode == 130
        assert json.loads(out)["ended_by"] == "interrupted"
    assert answer(jobs=jobs, db=str(db), resume=True) == whole
    assert results_in(db) == json.loads(whole)["simulated"]


def _results_or_none(db: Path, enough: int) -> bool:
    try:
        return results_in(db) >= enough
    except sqlite3.OperationalError:  # the tables are not there yet
        return False


def test_what_is_kept_is_not_simulated_again(
    whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = str(tmp_path / "search.sqlite")
    assert answer(db=db) == whole

    def never(self: Evaluator, candidate: object) -> dict[str, Any]:
        raise AssertionError(candidate)

    monkeypatch.setattr(Evaluator, "simulate", never)
    assert answer(db=db, resume=True) == whole
    with pytest.raises(AssertionError):  # without --resume a search begins anew
        answer(db=db)


def test_another_job_is_not_resumed_and_the_difference_is_named(tmp_path: Path) -> None:
    db = str(tmp_path / "search.sqlite")
    search_strategies(SearchRequest(**JOB, db=db, max_candidates=1))
    with pytest.raises(JobError, match="holds another job: seq_len was 64 and is 128") as caught:
        search_strategies(SearchRequest(**JOB | {"seq_len": 128}, db=db, resume=True))
    assert caught.value.field == "--resume"


@pytest.mark.parametrize(
    ("content", "resume", "rule"),
    [
        (None, True, "has nothing to go on with: it is not there"),
        (b"no database" * 100, False, "cannot be used: file is not a database"),
        (b"", True, "has nothing to go on with: it holds no search"),
    ],
)
def test_a_file_that_is_no_store_is_refused(
    content: bytes | None, resume: bool, rule: str, tmp_path: Path
) -> None:
    path = tmp_path / "search.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobError) as caught:
        search_strategies(SearchRequest(**JOB, db=str(path), resume=resume))
    assert rule in caught.value.rule


def test_the_store_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "search.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("pragma user_version=9")
    with pytest.raises(JobError, match="it has schema version 9, not 1"):
        search_strategies(SearchRequest(**JOB, db=str(path)))


def test_resume_without_a_file_and_an_unknown_executor_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*COMMAND, "--resume"]) == 2
    assert "name its file with --db" in capsys.readouterr().err
    assert main([*COMMAND, "--executor", "rya"]) == 2
    assert "'ray'" in capsys.readouterr().err


def test_without_ray_its_executor_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError) as caught:
        search_strategies(SearchRequest(**JOB, executor="ray"))
    assert "piper-train[ray]" in caught.value.fix


def test_actors_of_a_cluster_give_the_same_answer(whole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's interface, played by this process: the call that was made last is done first."""
    cluster = _Cluster()
    monkeypatch.setitem(sys.modules, "ray", cluster)  # type: ignore[arg-type]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert answer(executor="ray", jobs=3) == whole
    assert cluster.log == ["init 3", "actor", "actor", "actor", "kill", "kill", "kill", "shutdown"]


class _Cluster:
    """The part of Ray's interface that an executor uses."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def is_initialized(self) -> bool:
        return False

    def init(self, *, num_cpus: int, **_: object) -> None:
        self.log.append(f"init {num_cpus}")

    def remote(self, kind: type) -> SimpleNamespace:
        def make(*asked: Any) -> SimpleNamespace:
            self.log.append("actor")
            actor = kind(*asked)
            return SimpleNamespace(simulate=SimpleNamespace(remote=lambda c: _Call(actor.simulate, c)))

        return SimpleNamespace(remote=make)

    def wait(self, calls: list[_Call], *, num_returns: int) -> tuple[list[_Call], list[_Call]]:
        return calls[-num_returns:], calls[:-num_returns]

    def get(self, call: _Call) -> object:
        return call.function(call.argument)

    def kill(self, _: object) -> None:
        self.log.append("kill")

    def shutdown(self) -> None:
        self.log.append("shutdown")


class _Call:
    def __init__(self, function: Any, argument: object) -> None:
        self.function, self.argument = function, argument


def test_a_worker_ends_when_its_parent_was_killed() -> None:
    """The child prints the ids of its workers, and is killed."""
    program = (
        "import os, time\n"
        "from piper.search.evaluate import Evaluator\n"
        "from piper.search.executors import executor_of\n"
        "from piper.predict import Job\n"
        "job = Job(model='tiny-llama', gpus=1, global_batch=1, seq_len=16)\n"
        "with executor_of('local', Evaluator(job=job), 2) as run:\n"
        "    pool = run.__closure__[0].cell_contents\n"
        "    pool.submit(os.getpid).result()\n"
        "    print(*pool._processes, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        workers = [int(word) for word in child.stdout.readline().split()]
        child.kill()
    assert workers
    deadline = time.monotonic() + 30
    while any(_is_running(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def test_results_for_other_demands_are_not_taken_for_these(tmp_path: Path) -> None:
    kept = str(tmp_path / "kept.sqlite")
    answer(db=kept)
    with sqlite3.connect(kept) as file:
        before = {name for (name,) in file.execute("select strategy from results")}
    fresh = answer(reserve_bytes=2**20)
    assert answer(db=kept, resume=True, reserve_bytes=2**20) == fresh
    with sqlite3.connect(kept) as file:
        after = {name for (name,) in file.execute("select strategy from results")} - before
    assert after
    assert all(name.endswith("leaving 1048576 B") for name in after)
