"""Days, GPU-hours and cost of a whole run."""

from pathlib import Path

import pytest

from piper.cli import main
from piper.errors import JobError
from piper.report.budget import Price, budget, budget_line, price_of

FILE = """\
schema_version: 1
currency: EUR
gpu_hour:
  H100_SXM: {price: 2.5, source: an offer}
  a100_sxm_80gb: {price: 0, source: a gift}
"""


@pytest.fixture
def prices(tmp_path: Path) -> str:
    path = tmp_path / "prices.yaml"
    path.write_text(FILE)
    return str(path)


def test_a_run_of_whole_steps_has_days_gpu_hours_and_cost():
    run = budget(
        10_000_000,
        step_time_s=8.64,
        tokens_per_s=1_000_000 / 8.64,
        n_gpus=1000,
        price=Price(per_gpu_hour=2.0),
    )
    assert run["steps"] == 10
    assert run["days"] == pytest.approx(0.001)
    assert run["gpu_hours"] == pytest.approx(24.0)
    assert run["cost"] == pytest.approx(48.0)
    assert budget_line(run) == "whole run   10,000,000 tokens: 10 steps, 0.0 days, 24 GPU-hours, 48"


def test_a_part_of_a_step_is_a_step():
    assert budget(1_000_001, step_time_s=1.0, tokens_per_s=1_000_000, n_gpus=1)["steps"] == 2


def test_a_price_comes_from_the_users_file_under_any_spelling_of_the_gpu(prices: str):
    found = price_of(prices, gpu="h100-sxm")
    assert (found.per_gpu_hour, found.currency) == (2.5, "EUR")
    assert found.source.endswith("prices.yaml: an offer")
    assert price_of("1.25", gpu="h100-sxm") == Price(per_gpu_hour=1.25)


@pytest.mark.parametrize(
    ("gpu", "text", "rule"),
    [
        ("h200-sxm", FILE, "is not in it"),
        ("a100-sxm-80gb", FILE, "must be a price > 0 with its source"),
        ("h100-sxm", "schema_version: 2", "must be 1"),
        ("h100-sxm", "schema_version: 1\ncurrency: EUR", "must be there"),
        ("h100-sxm", "- [", ""),
    ],
)
def test_a_file_that_does_not_say_the_price_is_refused(gpu: str, text: str, rule: str, tmp_path: Path):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        price_of(str(path), gpu=gpu)
    assert rule in caught.value.rule


@pytest.mark.parametrize("text", ["-1", "nan", "no_such_file.yaml"])
def test_what_is_neither_a_price_nor_a_file_is_refused(text: str):
    with pytest.raises(JobError, match="no number > 0 and no file"):
        price_of(text, gpu="h100-sxm")


def test_simulate_says_what_the_whole_run_costs(prices: str, capsys: pytest.CaptureFixture[str]):
    command = ["simulate", "tiny-llama", "--gpus", "2", "--global-batch", "4", "--tokens", "1000000"]
    assert main([*command, "--price", prices]) == 0
    assert "whole run   1,000,000 tokens:" in capsys.readouterr().out
    assert main([*command[:-2], "--price", "2"]) == 2
    assert "--price = 2 needs --tokens" in capsys.readouterr().err
