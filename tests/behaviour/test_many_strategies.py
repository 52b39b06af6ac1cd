"""Full counts of what `make test` samples: many strategies trained."""

from __future__ import annotations

import random

import pytest

from piper.runtime import require_verified
from tests.piper.runtime.jobs import plan_of, train

pytestmark = pytest.mark.slow


def drawn(seed: int) -> tuple[str, dict[str, object]]:
    """Return a random strategy of the small models, and the options of its job."""
    choose = random.Random(seed)
    pp, dp = choose.choice([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (2, 3), (1, 4), (4, 2)])
    text = (
        f"pp={pp},dp={dp},zero={choose.choice([0, 1])},schedule={choose.choice(['gpipe', '1f1b'])},"
        f"recompute={choose.choice(['none', 'full'])}"
    )
    job = {
        "global_batch": dp * choose.randint(1, 6),
        "micro_batch": choose.randint(1, 3),
        "tied": choose.random() < 0.5,
        "clip": choose.choice([None, 1.0]),
        "optimizer": choose.choice(["sgd", "adamw"]),
    }
    return text, job


@pytest.mark.parametrize("seed", range(40))
def test_a_trained_plan_equals_one_process(seed: int) -> None:
    text, job = drawn(1000 + seed)
    model = {"tied": job.pop("tied")}
    require_verified(train(plan_of(text, **job, **model), steps=3, model=model))
