"""Ranks that compute on the cores of one host slow each other, in both engines alike."""

from pathlib import Path

import pytest

from cost_models import cluster_cost_model
from cost_models.catalogue import cluster_content
from cost_models.documents import yaml_text
from cost_models.errors import CostModelError
from piper.predict import Job, compile_job
from piper.strategy import Strategy
from simulator import build_workload, simulate
from simulator.plan import TaskKind
from simulator.timeline.timeline import Timeline


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[float, str]:
    """Cluster files by the cores that processes share."""
    found = {}
    for cores in (1.0, 2.0, 64.0):
        path = tmp_path_factory.mktemp("hosts") / f"{cores}.yaml"
        host = {"cores": cores, "source": "made up"}
        path.write_text(yaml_text(cluster_content("local-cpu") | {"host": host}))
        found[cores] = str(path)
    return found


def simulated(cluster: str, strategy: str, *, gpus: int, engine: str = "fast") -> Timeline:
    job = Job(
        model="tiny-llama", strategy=Strategy.parse(strategy), cluster=cluster, gpus=gpus, global_batch=4,
        dtype="fp32",
    )  # fmt: skip
    plan = compile_job(job).plan
    model = cluster_cost_model(cluster)
    return simulate(plan, model, engine=engine, workload=build_workload(plan, model))


def longest_ns(timeline: Timeline, kind: TaskKind) -> int:
    (track, *_) = timeline.tracks
    chosen = track.kinds[track.task] == kind
    return int((track.end_ns - track.start_ns)[chosen].max())


def test_replicas_on_half_as_many_cores_take_twice_as_long(hosts: dict[float, str]) -> None:
    alone, shared = (simulated(hosts[cores], "dp=2", gpus=2) for cores in (64.0, 1.0))
    for kind in (TaskKind.F, TaskKind.B):
        assert longest_ns(shared, kind) == pytest.approx(2 * longest_ns(alone, kind), rel=1e-6)


def test_as_many_cores_as_ranks_slow_nothing(hosts: dict[float, str]) -> None:
    few, many = (simulated(hosts[cores], "dp=2", gpus=2).step_time_ns for cores in (2.0, 64.0))
    assert few == many


def test_a_pipeline_on_one_core_takes_at_least_all_its_work(hosts: dict[float, str]) -> None:
    alone, shared = (simulated(hosts[cores], "pp=2", gpus=2) for cores in (64.0, 1.0))
    (first, second) = alone.tracks
    work = (
        sum(int((track.end_ns - track.start_ns)[track.stream == 0].sum()) for track in (first, second))
        // alone.num_steps
    )
    assert work <= shared.step_time_ns < 1.3 * work
    assert alone.step_time_ns < 0.8 * work


@pytest.mark.parametrize("strategy", ["pp=2,dp=2,zero=1", "pp=4", "dp=4,zero=1,recompute=full"])
def test_engines_agree(strategy: str, hosts: dict[float, str]) -> None:
    fast, reference = (
        simulated(hosts[2.0], strategy, gpus=4, engine=engine).rows() for engine in ("fast", "reference")
    )
    assert fast == reference


def test_cores_of_several_nodes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    host = {"cores": 2, "source": "made up"}
    path.write_text(yaml_text(cluster_content("dgx-h100") | {"host": host}))
    with pytest.raises(CostModelError, match="only the cores of one node are shared"):
        cluster_cost_model(str(path))
