"""The check of one GPU, on the CPU: everything but the calls of its device is the same code."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_check


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(gpu_check.MODELS, "cpu", gpu_check.MODELS["cpu"] | {"num_hidden_layers": 2})
    monkeypatch.setitem(gpu_check.BATCHES, "cpu", (1, 32))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(gpu_check.model_of("cpu")))
    return path


def test_a_step_is_trained_and_predicted_with_and_without_recomputation(config: Path) -> None:
    clusters = {"fitted": "local-cpu", "catalogue": "local-cpu"}
    plain, again = (
        gpu_check.compare_step(config, "cpu", recompute=recompute, clusters=clusters)
        for recompute in (False, True)
    )
    assert again["predicted_s"] > plain["predicted_s"] > 0
    assert again["predicted_bytes"] < plain["predicted_bytes"]
    assert plain["measured_s"] > 0
    assert plain["memory_error"] is None  # a CPU does not count what is allocated


@pytest.mark.parametrize(
    ("name", "device", "cluster"),
    [
        ("NVIDIA H100 80GB HBM3", "cuda", "dgx-h100"),
        ("NVIDIA A100-SXM4-80GB", "cuda", "dgx-a100"),
        ("Some CPU", "cpu", "local-cpu"),
    ],
)
def test_the_nearest_cluster_is_known_by_the_name_of_the_device(name: str, device: str, cluster: str) -> None:
    assert gpu_check.nearest_cluster(name, device) == cluster


def test_a_device_without_a_cluster_asks_for_one() -> None:
    with pytest.raises(SystemExit, match="give --cluster"):
        gpu_check.nearest_cluster("Some other GPU", "cuda")


def test_without_a_gpu_it_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--quick", "--json"])
    gpu_check.main()
    said = capsys.readouterr()
    assert json.loads(said.out) == {"benchmark": "gpu_check", "device": None}
    assert "no GPU" in said.err
