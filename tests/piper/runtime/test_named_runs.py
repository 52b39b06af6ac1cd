"""What the documentation promises: `piper run tiny-llama --local N --strategy ... --steps 3 --verify` holds.

Each strategy runs as the command would run it; references are shared ([Note: known references]).
"""

from __future__ import annotations

import pytest

from tests.piper.runtime.named_runs import require_equal, run_named

STATE = [
    "dp=4",
    "dp=4,zero=1",
    "dp=4,zero=2",
    "dp=4,zero=3",
    "dp=4,zero=2,hsdp=2",
    "dp=4,zero=3,hsdp=2",
    "dp=4,zero=3,prefetch=2",
    "dp=4,zero=1,bucket_mb=1",
    "pp=2,dp=2,zero=2",
    "pp=2,dp=2,zero=3,recompute=full",
]


@pytest.mark.parametrize("strategy", STATE)
def test_state_cut_over_replicas_trains_as_one_process(strategy: str) -> None:
    require_equal(run_named("tiny-llama", strategy))
