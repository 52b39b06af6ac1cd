"""Jitter: runs in which ranks differ (stragglers, noise, slow links), with one track of times per rank.

    text        --spec-->  clauses  --resolve-->  Disturbance: figures per rank
    Disturbance --fold-->  Units: ranks that provably do the same at the same time share one
    Workload, Units, Disturbance, seed  --run-->  UnfoldedRun  --study-->  distribution and blame

To add a kind of jitter: a dataclass and one line of `simulator.jitter.spec.KINDS`, and what it does to a
rank in `simulator.jitter.disturbance`.

[Note: units]  Ranks are told apart as long as anything tells them apart: their device plan, their figures,
    what they draw, and (again and again) the ranks that they meet. What is left together behaves alike to the
    nanosecond and is simulated once. Without noise, a straggler among 16,384 ranks leaves some dozens.
[Note: draws]  Noise is drawn anew for every step, task and tensor-parallel group (or rank), by hashing these
    numbers with the seed into a table of factors. So it takes no memory, and the same seed gives the same
    noise in every engine, whatever else is simulated. The ranks of a tensor-parallel group meet several times
    in every layer: one draw for all of them stands for the slowest of them.
[Note: contention between ranks]  Up to four million tasks a step, ranks share links, processors and memory
    bandwidth as in `simulator.rules`: every rank is a unit, and the explicit unfolding runs in an engine.
    Larger runs, and workloads without sharing, time each task as if it were alone.
"""

from simulator.jitter.disturbance import Disturbance, resolve
from simulator.jitter.outcome import section_of, timeline_of
from simulator.jitter.spec import Clause, parse_jitter
from simulator.jitter.study import Sampling, Study, study

__all__ = [
    "Clause",
    "Disturbance",
    "Sampling",
    "Study",
    "parse_jitter",
    "resolve",
    "section_of",
    "study",
    "timeline_of",
]
