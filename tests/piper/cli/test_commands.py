"""Every command does what it says, with text for people and one JSON object for scripts."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from piper.cli import main

ROOT = Path(__file__).resolve().parents[3]
LLAMA = str(ROOT / "examples" / "llama3-8b" / "config.json")
SMALL = ["tiny-llama", "--seq-len", "32", "--gpus", "4", "--global-batch", "8"]

CONTRACT_KEYS = {
    "schema_version", "model", "n_parameters", "cluster", "n_gpus", "strategy", "schedule", "stack",
    "defaults", "step_time_s", "makespan_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_flops_per_step",
    "tflops_per_gpu", "mfu", "hfu", "mfu_convention", "peak_memory_bytes", "peak_reserved_bytes",
    "context_bytes", "device_memory_bytes", "fits", "bubble_fraction", "idle_fraction", "breakdown_s",
    "ranks", "error_band", "provenance", "warnings", "timings_s",
}  # fmt: skip


def output_of(arguments: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0) -> str:
    assert main(arguments) == code, capsys.readouterr().err
    return capsys.readouterr().out


def object_of(arguments: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output_of([*arguments, "--json"], capsys, code=code))
    return found


def test_simulate_gives_every_key_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(["simulate", *SMALL, "--strategy", "pp=2,dp=2,zero=1"], capsys)
    assert set(found) >= CONTRACT_KEYS
    assert found["n_gpus"] == 4
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_time_s"], rel=1e-9)
    for rank in found["ranks"]:
        assert sum(rank["memory_by_class_bytes"].values()) == rank["peak_memory_bytes"]


def test_llama3_8b_on_64_h100_is_planned_as_the_formula_says(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = "pp=4,dp=16,zero=1,schedule=1f1b,recompute=full"
    job = [
        "--cluster",
        "dgx-h100",
        "--gpus",
        "64",
        "--micro-batch",
        "1",
        "--global-batch",
        "512",
        "--seq-len",
        "8192",
    ]
    found = object_of(["simulate", LLAMA, *job, "--strategy", strategy], capsys)
    assert found["n_parameters"] == 8_030_261_248
    assert 0.25 < found["mfu"] < 0.60
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    embedding = 128256 * 4096
    stages = [8 * layer + embedding, 8 * layer, 8 * layer, 8 * layer + embedding + 4096]
    for rank, parameters in zip(found["ranks"], stages, strict=True):
        padded = -(-parameters // 128) * 128
        classes = rank["memory_by_class_bytes"]
        assert classes["parameters"] == 2 * padded
        assert classes["gradients"] == 4 * padded
        assert classes["optimizer"] == 12 * padded // 16


def test_simulate_says_in_text_what_it_understood(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(["simulate", *SMALL, "--strategy", "pp=2,dp=2"], capsys)
    first, second, *_ = out.splitlines()
    assert first == "tiny-llama, 821 k parameters on 4 GPUs of dgx-h100"
    assert second.startswith("strategy    pp=2,dp=2,")
    assert "assumed " in out
    assert "\x1b" not in out


def test_simulate_writes_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "--trace": "deep/trace.json.gz", "--plot": "t.png", "--memory-plot": "m.svg",
        "--plan-out": "plan.json", "--out": "kept",
    }  # fmt: skip
    options = [word for option, name in files.items() for word in (option, str(tmp_path / name))]
    found = object_of(["simulate", *SMALL, "--strategy", "pp=2,dp=2", *options], capsys)
    assert json.loads((tmp_path / "kept" / "result.json").read_text()) == found
    assert (tmp_path / "kept" / "timeline.npz").is_file()
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "m.svg").read_text()
    names = {
        event["name"]
        for event in json.loads(gzip.decompress((tmp_path / "deep/trace.json.gz").read_bytes()))[
            "traceEvents"
        ]
    }
    assert {"0F0", "1B3", "1SEND_B0"} <= names


def test_a_plan_file_gives_what_its_model_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json.gz"
    direct = object_of(["simulate", *SMALL, "--strategy", "pp=2,dp=2", "--plan-out", str(plan)], capsys)
    again = object_of(["simulate", str(plan)], capsys)
    for key in ("step_time_s", "breakdown_s", "ranks", "n_parameters", "strategy", "mfu"):
        assert again[key] == direct[key]
    assert object_of(["check", str(plan)], capsys)["legal"] is True


def test_the_steps_option_gives_one_isolated_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(["simulate", *SMALL, "--strategy", "pp=4", "--steps", "1"], capsys)
    assert found["step_time_s"] == found["makespan_s"]


def test_clipping_can_be_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["simulate", *SMALL, "--strategy", "pp=2,dp=2"]
    clipped, free = object_of(job, capsys), object_of([*job, "--clip-grad-norm", "none"], capsys)
    assert free["step_time_s"] < clipped["step_time_s"]


def test_too_much_memory_is_exit_3_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["simulate", "llama3-8b", "--strategy", "pp=2,dp=4"]
    assert "DOES NOT FIT" in output_of(job, capsys)
    found = object_of([*job, "--require-fit"], capsys, code=3)
    assert found["fits"] is False
    assert found["error"]["code"] == "does_not_fit"
    assert "recompute=full" in found["error"]["fix"]
    assert main([*job, "--require-fit"]) == 3
    out, err = capsys.readouterr()
    assert "DOES NOT FIT" in out
    assert "error: pp=2,dp=4" in err


def test_zero_over_one_replica_is_legal_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(["simulate", "tiny-llama", "--gpus", "2", "--strategy", "pp=2,zero=1"], capsys)
    assert any("zero=1 shards over one replica" in text for text in found["warnings"])


def test_compare_keeps_the_order_and_names_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    strategies = ["--strategy", "pp=4", "--strategy", "dp=4", "--strategy", "pp=2,dp=2"]
    found = object_of(["compare", *SMALL, *strategies], capsys)
    assert [result["strategy"]["shorthand"][:9] for result in found["results"]] == [
        "pp=4,dp=1", "pp=1,dp=4", "pp=2,dp=2",
    ]  # fmt: skip
    out = output_of(["compare", *SMALL, *strategies], capsys)
    best = min(range(3), key=lambda number: found["results"][number]["step_time_s"])
    rows = [line for line in out.splitlines() if line.startswith(("pp=4 ", "dp=4 ", "pp=2,dp=2 "))]
    assert [number for number, row in enumerate(rows) if " best " in row] == [best]


def test_search_ranks_and_writes_strategy_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["search", *SMALL, "--pin", "micro_batch=1", "--top", "3", "--out", str(tmp_path / "found")]
    found = object_of(job, capsys)
    times = [result["step_time_s"] for result in found["ranking"]]
    assert times == sorted(times)
    assert len(times) == 3
    assert json.loads((tmp_path / "found" / "ranking.json").read_text())["ranking"] == found["ranking"]
    file = found["best"]["strategy_file"]
    again = object_of(["simulate", *SMALL, "--strategy", file], capsys)
    assert again["step_time_s"] == found["best"]["step_time_s"]


def test_search_draws_prices_and_takes_a_space_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("schema_version: 1\npin: {micro_batch: 1}\nvalues: {schedule: [1f1b], gpus: [2, 4]}\n")
    files = {name: str(tmp_path / f"{name}.svg") for name in ("plot", "heatmap")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    words = ["search", "tiny-llama", "--global-batch", "8", "--space", str(space), "--top", "1"]
    words += [*options, "--tokens", "1000000", "--price", "2.5", "--objective", "cost"]
    words += ["--report", str(tmp_path / "page.html")]
    found = object_of(words, capsys)
    assert {row["gpus"] for row in found["gpus"]} == {2, 4}
    assert {entry["schedule"] for entry in found["ranking"]} == {"1f1b"}
    run = found["best"]["run"]
    assert run["cost"] == pytest.approx(run["gpu_hours"] * 2.5)
    assert all(Path(path).read_text().startswith("<?xml") for path in files.values())
    page = (tmp_path / "page.html").read_text()
    assert found["best"]["strategy"]["shorthand"] in page
    for wrong, field in (("--pin", "pin.micro_batch"), ("--gpus", "values.gpus")):
        value = "micro_batch=2" if wrong == "--pin" else "4"
        assert object_of([*words, wrong, value], capsys, code=2)["error"]["field"] == field


def test_search_answers_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(["search", *SMALL, "--pin", "micro_batch=1", "--top", "1", "--why-not", "pp=4"], capsys)
    assert "why not pp=4?" in out


def test_an_interrupted_search_keeps_what_it_has_and_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("piper.search.evaluate.Evaluator.simulate", interrupt)
    found = object_of(["search", *SMALL, "--pin", "micro_batch=1"], capsys, code=130)
    assert found["ended_by"] == "interrupted"


@pytest.mark.parametrize(
    "option",
    [
        ["--pin", "pp"],
        ["--why-not", "pp"],
        ["--pin", "pipeline=2"],
        ["--jobs", "0"],
        ["--pin", "pp=2", "--pin", "pp=4"],
        ["--why-not", "pipeline=2"],
    ],
)
def test_search_refuses_what_it_cannot_read(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *SMALL, *option]) == 2
    assert "\nfix: " in capsys.readouterr().err


def test_plot_as_text_has_a_line_of_letters_per_rank_as_wide_as_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    strategy = ["--gpus", "4", "--strategy", "pp=4", "--global-batch", "8"]
    assert main(["simulate", "tiny-llama", *strategy, "--out", str(tmp_path / "o")]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["plot", str(tmp_path / "o"), "--text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) for line in lines[:4]] == [80] * 4
    assert all("F" in line.upper() and "B" in line.upper() for line in lines[:4])
    assert all(len(line) <= 80 for line in lines)


def test_plot_and_report_take_folders_results_and_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, trace = tmp_path / "kept", tmp_path / "trace.json"
    output_of(
        ["simulate", *SMALL, "--strategy", "pp=2,dp=2", "--out", str(kept), "--trace", str(trace)], capsys
    )
    for source in (kept, kept / "result.json", trace):
        picture = tmp_path / "picture.svg"
        assert object_of(["plot", str(source), "-o", str(picture)], capsys)["file"] == str(picture)
        assert "<svg" in picture.read_text()
    page = tmp_path / "page.html"
    found = object_of(["report", str(kept), str(trace), "-o", str(page), "--title", "Two"], capsys)
    assert found["results"] == ["kept", "trace.json"]
    assert "<title>Two</title>" in page.read_text()


MODULE = """
import piper
from torch import nn
from torch.nn.functional import cross_entropy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(11, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, labels):
        with piper.annotate("PP"):
            first = self.embedding(tokens)
        with piper.annotate("PP"), piper.annotate("LAYER"):
            hidden = self.middle(first)
        with piper.annotate("PP"):
            scores = self.head(hidden + first).float()
            return cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
"""


def test_an_own_module_is_counted_simulated_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    model = "own_module:Model"
    detail = object_of(["models", model], capsys)
    assert (detail["n_parameters"], detail["layers"]) == (11 * 4 + 4 * 4 + 4, None)
    job = [model, "--seq-len", "6", "--global-batch", "4", "--strategy", "pp=3"]
    assert object_of(["simulate", *job], capsys)["n_parameters"] == detail["n_parameters"]
    trained = object_of(["run", *job, "--local", "3", "--steps", "2", "--verify"], capsys)
    assert trained["verified"] is True
    assert trained["max_relative_error"] == {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}


def test_models_show_exact_counts_and_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(["models", LLAMA], capsys)
    assert (found["n_parameters"], found["n_active_parameters"]) == (8_030_261_248, 8_030_261_248)
    assert (found["layers"], found["hidden"], found["vocabulary"]) == (32, 4096, 128_256)
    assert found["assumed"]
    names = [entry["model"] for entry in object_of(["models"], capsys)["models"]]
    assert {"tiny-llama", "llama3-8b"} <= set(names)


@pytest.mark.parametrize(
    ("catalogue", "name"), [("gpus", "h100"), ("clusters", "dgx-h100"), ("stacks", "piper")]
)
def test_catalogues_show_one_entry_with_its_sources(
    catalogue: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert object_of([catalogue, name], capsys)["sources"]
    assert f"name: {object_of([catalogue, name], capsys)['name']}" in output_of([catalogue, name], capsys)


@pytest.mark.parametrize(
    ("catalogue", "name", "key", "value", "source"),
    [
        ("gpus", "b300-sxm", "memory.bandwidth", "7.75TB/s", "aiconfigurator"),
        ("clusters", "selene", "inter.nic_bandwidth", "200Gb/s", "Narayanan"),
        ("clusters", "selene", "intra_collectives.table", "nccl_a100.csv", "nccl-tests rows"),
    ],
)
def test_catalogues_list_every_figure_as_written_with_its_source(
    catalogue: str, name: str, key: str, value: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = {entry["name"]: entry for entry in object_of([catalogue], capsys)[catalogue]}
    alone = object_of([catalogue, name], capsys)
    for entry in (listed[name], alone):
        figures = {figure["key"]: figure for figure in entry["figures"]}
        assert figures[key]["value"] == value
        assert source in figures[key]["source"]
        assert all(
            figure["source"] for figure in entry["figures"] if figure["key"] not in {"gpu", "max_nodes"}
        )


def test_a_file_of_a_user_is_shown_like_an_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "schema_version: 1\nname: mine\nextends: h100\n"
        "memory: {inherit: true, capacity: 94GiB, usable: 93GiB, source: our invoice}\n"
    )
    found = object_of(["gpus", str(file)], capsys)
    assert found["memory_bytes"] == 94 * 2**30
    assert found["sources"]["memory"].startswith("our invoice. Otherwise as h100-sxm: ")


def test_measured_times_of_a_cluster_are_told_by_their_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert "1x8: 21 sizes, 448 to 469762048 bytes" in output_of(["clusters", "dgx-h100"], capsys)
    times = object_of(["clusters", "dgx-h100"], capsys)["curves"]["all_gather"]["measured"]["series"]["1x8"]
    assert len(times["sizes_bytes"]) == len(times["seconds"]) == 21


def test_a_schedule_alone_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(
        ["schedules", "1f1b", "--pp", "4", "--microbatches", "8", "--costs", "F=1,BI=1,BW=1"], capsys
    )
    assert found["makespan"] == 3 * (8 + 4 - 1)
    assert found["bubble_fraction"] == pytest.approx(3 / 11, rel=1e-15)
    assert found["in_flight"] == [4, 3, 2, 1]
    assert "rank 0   |F0|F1|F2|F3" in output_of(
        ["schedules", "1f1b", "--pp", "4", "--microbatches", "8"], capsys
    )


def test_the_violations_of_a_users_schedule_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def rows(**counts):\n    return [['0F0', '0B0'], ['1B0', '1F0']]\n")
    job = ["schedules", f"{file}:rows", "--pp", "2", "--microbatches", "1", "--check"]
    found = object_of(job, capsys, code=4)
    assert any(
        "rank 1 is stuck at slot 0, 1B0, which needs 1F0" in text for text in found["error"]["violations"]
    )


def test_run_trains_verifies_and_keeps_the_measured_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "run.json"
    job = ["--local", "2", "--strategy", "pp=2", "--seq-len", "16", "--steps", "2", "--verify"]
    found = object_of(
        ["run", "tiny-llama", *job, "--trace", str(trace), "--out", str(tmp_path / "run")], capsys
    )
    assert found["verified"] is True
    assert found["world_size"] == 2
    assert len(found["steps"]) == 2
    assert set(found["max_relative_error"].values()) == {0.0}
    assert found["predicted_step_time_s"] > 0
    simulated = tmp_path / "simulated.json"
    same = ["--cluster", "local-cpu", "--dtype", "fp32", "--seq-len", "16", "--strategy", "pp=2"]
    output_of(["simulate", "tiny-llama", *same, "--trace", str(simulated)], capsys)
    assert task_names(trace) == task_names(simulated)
    page = tmp_path / "page.html"
    output_of(["report", str(tmp_path / "run"), "-o", str(page)], capsys)
    assert "Compared with one process: equal" in page.read_text()


def task_names(trace: Path) -> set[str]:
    return {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}


def test_run_says_who_must_start_the_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["run", "tiny-llama", "--strategy", "pp=2"]) == 2
    assert "--local N" in capsys.readouterr().err
    assert main(["run", "tiny-llama", "--strategy", "pp=2", "--local", "2", "--gpus", "4"]) == 2
    assert "--gpus = 4 contradicts the 2 processes of --local" in capsys.readouterr().err
    assert main(["run", "tiny-llama", "--strategy", "pp=2,dp=2", "--local", "2"]) == 2
    assert "pp x dp = 4 is not the number of GPUs, 2" in capsys.readouterr().err


def test_doctor_names_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIPER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = object_of(["doctor"], capsys)
    by_name = {finding["name"]: finding for finding in found["findings"]}
    assert "cannot be written" in by_name["cache"]["problem"]
    assert "PIPER_CACHE_DIR" in by_name["cache"]["fix"]
    assert by_name["torch"]["value"]
    assert by_name["gloo"]["problem"] == ""
    assert by_name["cores"]["value"] == len(os.sched_getaffinity(0))


def test_doctor_survives_a_broken_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so is missing')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    out = output_of(["doctor"], capsys)
    assert "problem  torch" in out
    assert "libcudart.so is missing" in out


def test_a_schedule_is_written_as_csv_and_drawn_and_checked_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "order.csv")
    named = ["schedules", "interleaved_1f1b", "--pp", "2", "--vp", "2", "--microbatches", "4"]
    for form in ("passes", "transfers", "table"):
        wanted = object_of([*named, "--csv", file, "--csv-form", form], capsys)
        assert object_of(["schedules", file], capsys) == wanted
        assert object_of(["schedules", file, "--pp", "2", "--microbatches", "4", "--check"], capsys) == wanted
        found = object_of(["check", file], capsys)
        assert (found["legal"], found["n_ranks"], found["notices"]) == (True, 2, [])
    missing = object_of([*named, "--csv", str(tmp_path / "none" / "a.csv")], capsys, code=2)
    assert missing["error"]["field"] == "--csv"


def test_a_schedule_file_in_which_ranks_wait_for_each_other_is_refused_without_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stuck.csv"
    file.write_text("rank,op,peer,tensor\n0,send,1,x0\n0,recv,1,x1\n1,send,0,x1\n1,recv,0,x0\n")
    (violation,) = object_of(["check", str(file)], capsys, code=4)["error"]["violations"]
    assert all(end in violation for end in ("send x0", "recv x0", "send x1", "recv x1"))
    file.write_text("rank,op,peer,tensor\n0,send,1,x0\n1,recv,0,x0\n")
    assert "an excerpt" in object_of(["check", str(file)], capsys)["notices"][0]
    assert "notice: an excerpt" in output_of(["check", str(file)], capsys)
    refused = object_of(["check", str(file), "--gpus", "8"], capsys, code=2)
    assert refused["error"]["field"] == "--gpus"


def test_one_pipeline_stage_on_each_rank_can_follow_a_schedule_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "order.csv")
    output_of(["schedules", "interleaved_1f1b", "--pp", "2", "--microbatches", "4", "--csv", file], capsys)
    job = ["simulate", "tiny-llama", "--global-batch", "4", "--strategy"]
    by_name = object_of([*job, "pp=2,schedule=interleaved_1f1b"], capsys)
    assert object_of([*job, f"pp=2,schedule={file}"], capsys)["step_time_s"] == by_name["step_time_s"]


def test_check_warns_of_memory_that_can_never_fit(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--gpus", "8", "--strategy", "pp=8", "--seq-len", "1024", "--global-batch", "8"]
    found = object_of(["check", "llama3-70b", *job], capsys)
    assert found["legal"] is True
    assert "needs at least" in found["warnings"][0]
    assert main(["check", "llama3-70b", *job, "--require-fit"]) == 3
    assert "can never fit" in capsys.readouterr().err
    assert object_of(["check", *SMALL, "--strategy", "pp=2", "--require-fit"], capsys)["warnings"] == []


def test_a_link_without_a_bound_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = object_of(["clusters", "dgx-h100"], capsys)
    assert found["transfer_curve"]["bus_bytes_per_s"] is None
