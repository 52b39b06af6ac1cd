"""What the documents show can be typed: command lines parse, the strategy file compiles, files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

import piper as piper_package
from piper.cli import COMMANDS, main
from piper.cli.entry import piper

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def command_lines(text: str) -> list[str]:
    """Lines that begin with `piper`, or with a prompt and `piper`; a backslash continues a line."""
    joined = re.sub(r" *\\\n *", " ", text)
    return re.findall(rf"^ *(?:\$ )?piper ((?:{'|'.join(COMMANDS)})\b.*)$", joined, flags=re.MULTILINE)


def help_of(command: str) -> str:
    found = piper.get_command(click.Context(piper), command)
    assert found is not None
    return found.help or ""


LINES = [line for path in DOCUMENTS for line in command_lines(path.read_text(encoding="utf-8"))]
LINES += [line for command in COMMANDS for line in command_lines(help_of(command))]


@pytest.mark.parametrize("line", LINES)
def test_every_command_line_that_is_shown_can_be_parsed(line: str) -> None:
    name, *arguments = shlex.split(line)
    command = piper.get_command(click.Context(piper), name)
    assert command is not None
    with command.make_context(name, arguments):
        pass


def test_enough_command_lines_were_found() -> None:
    assert len(LINES) > 2 * len(COMMANDS)


def shown_outputs() -> list[tuple[str, list[str]]]:
    """Return (command line, lines shown below it) of each prediction in the README (renew: paste)."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(\$ .*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    runs = [run for block in blocks for run in re.sub(r" *\\\n *", " ", block).split("$ piper ")[1:]]
    found = [(run.splitlines()[0], run.splitlines()[1:]) for run in runs]
    return [(line, shown) for line, shown in found if line.startswith(("simulate", "compare"))]


@pytest.mark.parametrize(("line", "shown"), shown_outputs(), ids=[line for line, _ in shown_outputs()])
def test_the_readme_shows_what_its_predictions_print(
    line: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(shlex.split(line))
    printed = capsys.readouterr()
    lines = [*printed.out.splitlines(), *printed.err.splitlines()]
    assert [text for text in shown if text and text not in lines] == []


def test_the_strategy_file_in_the_documents_compiles(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    file = tmp_path / "strategy.json"
    file.write_text(example)
    plan = piper_package.compile_plan("tiny-llama", str(file), gpus=4, seq_len=16)
    assert plan.strategy.startswith("pp=2,dp=2,zero=1,schedule=1f1b,recompute=full")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(path: Path) -> None:
    named = re.findall(
        r"`((?:docs|benchmarks|examples|tests|piper|simulator|cost_models)/[\w./-]+)`", path.read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_models_in_the_guide_to_own_models_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "capture.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "models_of_the_guide.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    for name, strategy, gpus in [("plain", "pp=2,dp=2", 4), ("llama", "pp=2,dp=2,tp=2", 8)]:
        target = f"models_of_the_guide:{name}"
        plan = piper_package.compile_plan(target, strategy, gpus=gpus, seq_len=16, dtype="fp32")
        assert any("no annotations" in notice for notice in plan.notices) == (name == "plain")
        assert {segment.stage for segment in plan.segments} == {0, 1}
