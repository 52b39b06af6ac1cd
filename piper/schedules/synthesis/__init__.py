"""Schedules that are found for a pipeline: unequal stages, unequal passes, a memory cap of each rank.

`pipeline` says what a pipeline is and what no order can beat; `find` searches (and loads numba); `blocks` are
what it moves; `timing` and `kernel` time orders; `library` lists the known schedules that compete; `equal`
serves the schedules `synthesized` and `synthesized_v`, whose stages are alike.
"""

from __future__ import annotations

from piper.schedules.synthesis.pipeline import Pipeline, Synthesis

__all__ = ["Pipeline", "Synthesis"]
