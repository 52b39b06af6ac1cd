"""Random demands for any workload: few links, round and odd fractions, so that much is slowed at once."""

from __future__ import annotations

import random

import numpy as np

from simulator.sharing import Sharing
from simulator.workload import Workload

FRACTIONS = [0.2, 0.25, 0.3, 0.5, 0.7, 1.0, 1.3]


def random_sharing(workload: Workload, choose: random.Random) -> Sharing:
    """Return what each row of the price table holds; the last one nothing."""
    rows, num_links = len(workload.prices.duration_ns), choose.choice([0, 1, 2, 5])
    num_processors = choose.choice([1, 4, 10])
    loaded = [
        sorted(choose.sample(range(num_links), choose.randint(0, min(num_links, 3)))) for _ in range(rows - 1)
    ]
    loaded.append([])
    uses = [choose.choice(FRACTIONS) for row in loaded for _ in row]
    busiest, at = [], 0
    for row in loaded:
        busiest.append(max(uses[at : at + len(row)], default=0.0))
        at += len(row)
    parts = [
        choose.choice([(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.25), (0.3, 0.6)]) for _ in range(rows)
    ]
    return Sharing(
        latency_ns=np.array([choose.choice([0, 0, 1, 3]) for _ in range(rows)], dtype=np.int64),
        growth=np.array([choose.choice([1.0, 1.0, 2.0, 3.0]) / use if use else 0.0 for use in busiest]),
        link_starts=np.cumsum([0, *map(len, loaded)]),
        links=np.array([link for row in loaded for link in row], dtype=np.int64),
        uses=np.array(uses, dtype=np.float64),
        link_names=tuple(f"link {number}" for number in range(num_links)),
        memory=np.array([choose.choice([0.0, 0.1, 0.4, 0.9]) for _ in range(rows)]),
        processor_part=np.array([part[0] for part in parts]),
        memory_part=np.array([part[1] for part in parts]),
        processors=np.array(
            [
                0 if compute or copy else choose.choice([0, 0, 1, 3])
                for compute, copy in zip(workload.is_compute, workload.is_host_copy, strict=True)
            ],
            dtype=np.int64,
        ),
        priority=np.array([choose.choice([0, 0, 0, 1]) for _ in range(workload.num_streams)], dtype=np.int64),
        num_processors=num_processors,
    )
