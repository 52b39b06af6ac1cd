"""Rows of published runs become jobs; what they leave open is assumed and counted."""

from pathlib import Path

import pytest

from piper.errors import JobError
from piper.validation.jobs_of_rows import job_of_row
from piper.validation.predictions import predict_row
from piper.validation.rows import PublishedRow, read_rows

RUN = {
    "case_id": "x-1", "source": "a report", "model": "GPT 22B", "layers": "48", "hidden": "6144",
    "heads": "64", "vocab": "51200", "seq_len": "2048", "gpu": "A100-SXM-80GB", "n_gpus": "16",
    "framework": "Megatron-LM", "tp": "8", "pp": "1", "cp": "1", "dp": "2", "act_ckpt": "full",
    "micro_batch": "2", "global_batch": "8", "step_time_s": "2.5",
}  # fmt: skip


def row(**changes: str) -> PublishedRow:
    return PublishedRow(file="runs", texts=RUN | changes)


def test_a_row_that_states_everything_becomes_a_job_of_its_stack_and_cluster() -> None:
    found = job_of_row(row(interconnect="Selene", sequence_parallel="false", zero_stage="0"))
    assert (found.job.stack, found.job.cluster, found.job.gpus) == ("megatron-2021", "selene", 16)
    assert (found.job.global_batch, found.job.micro_batch, found.measured_s) == (8, 2, 2.5)
    assert found.assumed == ("dtype",)


def test_the_year_of_a_source_tells_releases_of_one_framework_apart() -> None:
    found = job_of_row(row(source="Korthikanti et al. 2022 (arXiv 2205.05198)", act_ckpt=""))
    assert (found.job.stack, found.job.strategy.stated.recompute) == ("megatron-2022", "selective")
    assert job_of_row(row(act_ckpt="")).job.strategy.stated.recompute == "full"


def test_the_number_of_gpus_wins_over_dp_and_that_is_counted() -> None:
    found = job_of_row(row(dp="1"))
    assert found.job.strategy.stated.dp == 2
    assert "dp" in found.assumed


def test_an_empty_degree_follows_from_the_number_of_gpus() -> None:
    found = job_of_row(row(pp="", n_gpus="32", global_batch="8"))
    assert found.job.strategy.stated.pp == 2
    assert "pp" in found.assumed


def test_the_vocabulary_is_padded_as_the_stack_does() -> None:
    padded = job_of_row(row(vocab="50257")).job.model
    assert padded.shape.vocabulary == 51200
    kept = job_of_row(row(vocab="50257", framework="Megatron-DeepSpeed", tp="1", global_batch="16")).job.model
    assert kept.shape.vocabulary == 50257


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"global_batch": "9"}, "global_batch"),
        ({"n_gpus": "12"}, "n_gpus"),
        ({"schedule": "mine"}, "schedule"),
    ],
)
def test_a_row_that_makes_no_sense_is_skipped_with_its_reason(changes: dict[str, str], field: str) -> None:
    changed = row(**({"pp": "2"} | changes if field == "schedule" else changes))
    with pytest.raises(JobError) as problem:
        job_of_row(changed)
    assert problem.value.field == field
    assert predict_row(changed).reason.startswith(field)


def test_tflops_and_mfu_give_the_step_time_by_the_convention_of_the_row() -> None:
    stated = {"step_time_s": "", "flops_convention": "eq.(3) of the paper; 312 TF peak"}
    found = job_of_row(row(tflops_per_gpu="135", **stated)).measured_s
    assert found == pytest.approx(96 * 8 * 2048 * 48 * 6144**2 * (1 + 1 / 18 + 51200 / (16 * 48 * 6144)) / 135e12 / 16, rel=1e-3)  # fmt: skip  # noqa: E501


def test_a_file_without_a_column_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("case_id,model\nx-1,GPT 22B\n", encoding="utf-8")
    with pytest.raises(JobError) as problem:
        read_rows([path])
    assert (problem.value.field, problem.value.value) == ("column", "layers")


def test_halves_are_those_of_a_fixed_hash() -> None:
    halves = {row(model=f"GPT {size}B").half for size in range(20)}
    assert halves == {"a", "b"}
    assert row().half == row(step_time_s="9").half


def test_a_stack_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("schema_version: 1\nname: mine\nextends: megatron-2021\n", encoding="utf-8")
    assert job_of_row(row(), stack=str(path)).job.stack == str(path)
    assert predict_row(row(), stack=str(path)).reason == ""
