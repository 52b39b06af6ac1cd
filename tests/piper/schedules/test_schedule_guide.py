"""The guide's pictures are what the command prints."""

import re
import shlex
from pathlib import Path

import pytest

from piper.cli import main

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "schedules.md"
EXAMPLE = re.compile(r"^    \$ piper (schedules .+)\n((?:    rank .+\n)+)", re.MULTILINE)


def test_every_picture_of_the_guide_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]):
    examples = EXAMPLE.findall(GUIDE.read_text(encoding="utf-8"))
    assert len(examples) >= 7
    for command, picture in examples:
        assert main(shlex.split(command)) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.startswith("rank")]
        assert printed == [line.strip() for line in picture.splitlines()], command
