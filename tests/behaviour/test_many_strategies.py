"""Full counts of what `make test` samples: many strategies trained and bounded."""

from __future__ import annotations

import random

import pytest

from piper.predict import Job
from piper.runtime import require_verified
from piper.search.evaluate import Evaluator
from piper.search.space import enumerate_space
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


@pytest.mark.parametrize(("model", "gpus", "global_batch"), [("llama3-8b", 16, 48), ("llama2-7b", 12, 60)])
def test_no_bound_exceeds_the_simulation_of_a_large_model(model: str, gpus: int, global_batch: int) -> None:
    evaluator = Evaluator(job=Job(model=model, gpus=gpus, global_batch=global_batch, seq_len=1024))
    space = enumerate_space(gpus=gpus, num_units=evaluator.num_units, global_batch=global_batch)
    for candidate in random.Random(7).sample(space.candidates, 60):
        bounds, result = evaluator.bounds(candidate), evaluator.simulate(candidate)
        assert bounds.step_time_s <= result["step_time_s"], candidate
        assert bounds.memory_bytes <= result["peak_memory_bytes"], candidate
