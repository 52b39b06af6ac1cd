"""How many microbatches a rank holds at least, when it holds most: for bounds of memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from piper.errors import StrategyError
from piper.schedules import copies_of, find_schedule, schedule_rows
from piper.schedules.copies import Copies
from piper.schedules.rows import Rows, Slot
from simulator.plan import TaskKind

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_RANKS = 32
"""Beyond these, orders of schedules that no formula here describes are not made for a bound alone."""
_FREEING = frozenset({TaskKind.B, TaskKind.BI})
_HOLDS_ALL = frozenset({"gpipe", "looped_bfs"})
_ONE_BY_ONE = frozenset({"1f1b", "zb_h1", "zb_h2", "interleaved_1f1b", "interleaved_zb"})


def held_at_least(schedule: str, *, pp: int, vp: int, num_microbatches: int) -> Ints:
    """Return microbatches of each stage at one moment, no more than at the fullest: [ranks, stages on one].

    By formulas that need no order: a rank that is not the last waits for its first gradient, and runs what it
    may meanwhile. Schedules in a V are built to hold fewer: one. The stages of a rank rise.
    """
    if schedule in _HOLDS_ALL:
        return np.full((pp, vp), num_microbatches, dtype=np.int64)
    found = np.zeros((pp, vp), dtype=np.int64)
    found[:, 0] = np.minimum(num_microbatches, pp - np.arange(pp)) if schedule in _ONE_BY_ONE else 1
    return found


def held_usually(schedule: str, *, pp: int, vp: int, num_microbatches: int) -> Floats:
    """Return about the same, float64: no bound, for the order in which strategies are looked at.

    Sources: Narayanan et al. 2021 (arXiv 2104.04473, warm-up of interleaved 1F1B); Qi et al. 2024 (arXiv
    2401.10241, 2405.15362: p, p/2 and p/3 microbatches in a V); DeepSeek-AI 2024 (DualPipe: p + 1).
    """
    rank = np.arange(pp, dtype=np.float64)
    known: dict[str, Floats | float] = {
        "interleaved_1f1b": ((vp - 1) * pp + 2 * (pp - rank) - 1) / vp,
        "interleaved_zb": ((vp - 1) * pp + 2 * (pp - rank) - 1) / vp,
        "zb_h2": 2 * (pp - rank) - 1,
        "zb_2p": 2.0 * pp,
        "zb_1p": float(pp),
        "zbv": float(pp),
        "v_half": pp / 2 + 1,
        "v_min": pp / 3 + 1,
        "dualpipe": (pp + 1) / 2,
        "dualpipe_v": (pp + 1) / 2,
    }
    if schedule not in known:
        return held_at_least(schedule, pp=pp, vp=vp, num_microbatches=num_microbatches).astype(np.float64)
    each = np.broadcast_to(np.asarray(known[schedule]), (pp,))
    return np.asarray(np.minimum(np.repeat(each[:, None], vp, axis=1), float(num_microbatches)))


def held_microbatches(schedule: str, *, pp: int, vp: int, num_microbatches: int) -> Ints:
    """Return the same, of the order of the schedule itself (with fewer microbatches)."""
    if schedule in _HOLDS_ALL or schedule in {"1f1b", "zb_h1"} or pp > _MOST_RANKS:
        return held_at_least(schedule, pp=pp, vp=vp, num_microbatches=num_microbatches)
    few = 2 * pp + num_microbatches % pp
    return _of_rows(schedule, pp=pp, vp=vp, number=min(num_microbatches, few))


@lru_cache(maxsize=4096)
def _of_rows(schedule: str, *, pp: int, vp: int, number: int) -> Ints:
    try:
        rows = schedule_rows(
            schedule, num_pipeline_ranks=pp, num_microbatches=number, virtual_stages_per_rank=vp
        )
    except StrategyError:  # the job has a smaller last microbatch, without which the counts are not legal
        return np.zeros((pp, vp), dtype=np.int64)
    copies = Copies(num_stages=pp * vp, count=copies_of(find_schedule(schedule)))
    return held_of_rows(rows, copies)


def held_of_rows(rows: Rows, copies: Copies) -> Ints:
    """Return int64 [ranks, stages on a rank] of rows, at the moment when most microbatches are held."""
    return np.array([_fullest(row, copies) for row in rows], dtype=np.int64)


def _fullest(row: Sequence[Slot], copies: Copies) -> list[int]:
    """Return the microbatches of each stage of a rank when it holds most, the stages rising."""
    model_stage = {stage: copies.copy_of(stage)[0] for stage in {task.stage for slot in row for task in slot}}
    place = {stage: number for number, stage in enumerate(sorted(set(model_stage.values())))}
    of_stage = {stage: place[home] for stage, home in model_stage.items()}
    now, total, most = [0] * len(place), 0, 0
    fullest = list(now)
    for slot in row:
        born = [of_stage[task.stage] for task in slot if task.kind is TaskKind.F]
        gone = [of_stage[task.stage] for task in slot if task.kind in _FREEING]
        for stage in born:
            now[stage] += 1
        total += len(born)
        if total > most and not (born and gone):  # which is first of two that overlap is not known
            most, fullest = total, list(now)
        for stage in gone:
            now[stage] -= 1
        total -= len(gone)
        if total > most:
            most, fullest = total, list(now)
    return fullest
