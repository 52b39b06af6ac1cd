"""Whatever is cut, and with whatever else: small models of several families train as one process does."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.piper.runtime.named_runs import require_close, run_named
from tests.piper.runtime.small_models import small_model

DENSE = ("llama", "gpt2", "qwen3", "falcon", "llama with adapters")
WITH_EXPERTS = ("mixtral", "deepseek_v2", "gpt_oss")
UNFUSED = ("deepseek_v2", "gpt_oss")
"""Their attention is more than one kernel, around which no ring goes."""
MOST_RANKS = 8
FEW = 5
MANY = 150


def draw(random: Random) -> tuple[str, str, dict[str, object]]:
    """Return a family, a strategy that cuts something, and sizes of the job."""
    while True:
        family = random.choice((*DENSE, *WITH_EXPERTS))
        degrees = {
            "tp": random.choice((1, 2, 2)),
            "cp": 1 if family in UNFUSED else random.choice((1, 1, 2)),
            "dp": random.choice((1, 2, 4)),
            "pp": random.choice((1, 1, 2)),
            "ep": random.choice((1, 2, 4)) if family in WITH_EXPERTS else 1,
        }
        tp, cp, dp, pp, ep = degrees.values()
        whole_tokens = tp > 1 and ep == 1 and random.random() < 1 / 3
        if tp * cp * dp * pp > MOST_RANKS or tp * cp * ep == 1 or (tp * cp * dp) % ep:
            continue
        parts = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
        parts += ["sp=off"] if whole_tokens else []
        parts += ["async_tp=on"] if tp > 1 and not whole_tokens and random.random() < 1 / 3 else []
        parts += [f"zero={random.randrange(4)}"]
        parts += [f"schedule={random.choice(('1f1b', 'gpipe', 'zb_h1'))}"] if pp > 1 else []
        parts += ["recompute=full"] if random.random() < 1 / 3 else []
        sizes = {
            "global_batch": random.choice((8, 12)),
            "micro_batch": random.choice((1, 2, 3)),
            "clip_grad_norm": random.choice((None, 0.5)),
        }
        return family, ",".join(parts), sizes


def check(seed: int, folder: Path) -> None:
    family, strategy, sizes = draw(Random(seed))
    print(family, strategy, sizes)  # noqa: T201  shown where it fails
    require_close(run_named(small_model(family, folder), strategy, steps=2, **sizes))


@pytest.mark.parametrize("seed", range(FEW))
def test_random_cuts_equal_one_process(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, FEW + MANY))
def test_many_random_cuts_equal_one_process(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


def test_many_strategies_are_drawn() -> None:
    drawn = [draw(Random(seed)) for seed in range(FEW + MANY)]
    assert len({(family, strategy) for family, strategy, _ in drawn}) > MANY * 2 // 3
    for axis in ("tp=", "cp=", "ep=", "sp=off", "async_tp", "zero=3", "zb_h1", "recompute=full"):
        assert sum(axis in strategy for _, strategy, _ in drawn) > MANY // 20, axis
