"""Jobs of searches that are small enough to simulate many strategies, and random strategies of them."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from piper.predict import Job
from piper.search.candidate import Candidate
from piper.search.cells import CellTable
from piper.search.choices import choices_of
from piper.search.estimate import Estimates, Estimator
from piper.search.evaluate import Evaluator
from piper.search.space import Space
from tests.tiny_configs import TINY

LAYERS = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
}
"""Of models that are thin enough for a thousand simulations, and wide enough that kernels take time."""

JOBS: dict[str, dict[str, Any]] = {
    "dense": {"gpus": 4, "global_batch": 8},
    "experts": {"gpus": 4, "global_batch": 4},
    "six": {"gpus": 6, "global_batch": 12},
    "no barrier": {"gpus": 4, "global_batch": 4, "clip_grad_norm": None},
    "two nodes": {"gpus": 16, "global_batch": 16},
}


def job_of(name: str) -> Job:
    """Return one of the jobs."""
    return Job(model=_config("mixtral" if name == "experts" else "llama"), seq_len=512, **JOBS[name])


@cache
def _config(family: str) -> str:
    folder = Path(tempfile.mkdtemp(prefix="piper-search-"))
    path = folder / "config.json"
    path.write_text(json.dumps(TINY[family] | LAYERS), encoding="utf-8")
    return str(path)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A job with its space.

    Args:
        evaluator, space, table, estimator: of the job.
    """

    evaluator: Evaluator
    space: Space
    table: CellTable
    estimator: Estimator

    @classmethod
    def of(cls, job: Job, **values: Any) -> Sample:
        """Return the sample of a job; `values`: of dimensions, instead of all."""
        evaluator = Evaluator(job=job)
        limits = evaluator.limits
        space = evaluator.space(
            choices_of(
                gpus=(job.gpus or 1,),
                num_units=limits.num_units,
                experts=limits.experts,
                cuts_tensors=limits.cuts_tensors,
                cuts_sequences=limits.cuts_sequences,
                values=values,
            )
        )
        table = evaluator.cells(space)
        return cls(evaluator=evaluator, space=space, table=table, estimator=evaluator.estimator(table))

    def random_points(self, count: int, *, seed: int) -> Iterator[tuple[int, int, Candidate]]:
        """Yield (cell, row of its keepings, candidate), all cells alike."""
        draw = random.Random(seed)
        for _ in range(count):
            cell = draw.randrange(len(self.table))
            layout = int(self.table.layout[cell])
            row = draw.randrange(len(self.space.keepings[int(self.space.keeping_of[layout])]))
            yield cell, row, self.space.candidate(layout, int(self.table.working[cell]), row)

    def estimates(self, cell: int) -> Estimates:
        """Return the estimates of a cell, refined."""
        self.table.refine(np.array([cell]))
        return self.estimator.of(cell)


def broken_bounds(sample: Sample, count: int, *, seed: int) -> list[str]:
    """Simulate random strategies; return those whose bounds exceed the simulation."""
    found = []
    for cell, row, candidate in sample.random_points(count, seed=seed):
        coarse_ns, coarse_bytes = sample.table.bound_ns[cell], sample.table.least_bytes[cell]
        estimates = sample.estimates(cell)
        result = sample.evaluator.simulate(candidate)
        step_ns, peak = result["step_time_s"] * 1e9, result["peak_memory_bytes"]
        if estimates.bound_ns[row] > step_ns or estimates.least_bytes[row] > peak:
            bound = (estimates.bound_ns[row] / step_ns, estimates.least_bytes[row] / peak)
            found.append(f"{candidate.shorthand}: bounds are {bound} of the simulation")
        if coarse_ns > sample.table.bound_ns[cell] + 1 or coarse_bytes > sample.table.least_bytes[cell] + 1:
            found.append(f"{candidate.shorthand}: the coarse bound is above that of its own probe")
    return found
