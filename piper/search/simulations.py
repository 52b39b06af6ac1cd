"""The simulations of a search: what the store knows is not simulated again, what is new is kept at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper.search.candidate import Candidate
from piper.search.evaluate import Evaluator
from piper.search.executors import executor_of
from piper.search.rounds import Simulate
from piper.search.store import ResultStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """With what a search is run; none of it changes the answer.

    Args:
        jobs: simulations that run at once.
        executor: a name of `executors.EXECUTORS`.
        db: file that keeps results, or None.
        resume: whether to go on with what it holds.
    """

    jobs: int = 1
    executor: str = "local"
    db: str | None = None
    resume: bool = False


@contextmanager
def simulations(evaluator: Evaluator, means: Means) -> Iterator[Simulate]:
    """Give what simulates candidates, with these means.

    Raises: JobError for a store or an executor that cannot be used.
    """
    with ExitStack() as stack:
        store: ResultStore | None = None
        if means.db is not None:
            opened = ResultStore(Path(means.db), job=evaluator.job, resume=means.resume)
            store = stack.enter_context(opened)
        run = stack.enter_context(executor_of(means.executor, evaluator, means.jobs))
        known = store.known() if store is not None else {}

        def simulate(batch: Sequence[Candidate]) -> list[dict[str, Any]]:
            names = [f"{candidate.shorthand}{evaluator.demands}" for candidate in batch]
            fresh = [i for i, name in enumerate(names) if name not in known]
            for position, result in run([batch[i] for i in fresh]):
                name = names[fresh[position]]
                # As a store gives it back, so that a resumed search is the same to the last bit.
                known[name] = json.loads(json.dumps(result))
                if store is not None:
                    store.keep(name, known[name])
            return [known[name] for name in names]

        yield simulate
