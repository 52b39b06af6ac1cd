"""The runtime: processes that walk the very plan that was simulated, and train like one process.

program.py, trace.py, code.py   annotated nn.Module -> one callable per segment of the plan
routes.py     what each task reads, writes and sums, derived from the plan (free of torch)
worker.py, handlers/   one rank: `for task in dispatch order: wait, run, record, free`
streams.py             the compute stream is the main thread; every other stream is a thread
reference.py           the same step in one process (DESIGN 6), verify.py compares
launch.py, watch.py    start ranks, watch them, name the culprit

Importing this package loads no torch; the two verbs do.
"""

from __future__ import annotations

from piper.runtime.launch import run_local, run_rank
from piper.runtime.outcome import RunOutcome, require_verified
from piper.runtime.settings import OptimizerSettings, RunSettings, default_optimizer

__all__ = [
    "OptimizerSettings",
    "RunOutcome",
    "RunSettings",
    "default_optimizer",
    "require_verified",
    "run_local",
    "run_rank",
]
