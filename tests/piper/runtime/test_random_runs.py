"""Whatever the model and the legal strategy: three optimizer steps equal one process (DESIGN 6).

Bitwise to the same order of additions; within tolerances where the arithmetic itself is cut (tensors, tokens
or experts: another order inside of products and sums), and to the whole batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.piper.runtime.named_runs import BITWISE
from tests.piper.runtime.random_runs import draw

SOME, ALL = 60, 2000
STEPS = 3


def check(seed: int, folder: Path) -> None:
    case, plan, run = draw(seed, folder)
    try:
        outcome = run(steps=STEPS)
    except Exception as error:
        error.add_note(repr(case))
        raise
    assert outcome.result["verified"] is True, (case, outcome.result, outcome.differing[:3])
    if not plan.cuts.regions:
        assert outcome.result["max_relative_error"] == BITWISE, case


@pytest.mark.parametrize("seed", range(SOME))
def test_a_random_run_equals_one_process(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(SOME, ALL + SOME, 20))
def test_many_random_runs_equal_one_process(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 20):
        check(seed, tmp_path)
