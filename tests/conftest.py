"""Shared by all tests: golden texts, and a cache of captured models inside the checkout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("piper", deadline=None)  # laws hold on a busy machine, too
settings.load_profile("piper")

GOLDEN = Path(__file__).parent / "golden"

os.environ["PIPER_CACHE_DIR"] = str(Path(__file__).parents[1] / ".cache" / "piper")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden/ from what is produced"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with `tests/golden/<name>`, or rewrite that file with --update-golden."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: run pytest --update-golden and read the diff"
        assert text == path.read_text()

    return check
