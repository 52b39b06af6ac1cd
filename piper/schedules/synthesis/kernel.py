"""The compiled part of the synthesis: keys of passes -> an order, and an order -> times.

[Note: passes by number]
Pass `kind` (0: F, 1: BI, 2: BW) of stage s and microbatch m is number (3 s + kind) M + m.
[Note: list scheduling by keys]
Whenever a rank is free it takes, of the F and BI whose inputs have arrived, the one with the smallest key. It
waits instead for one with a smaller key that is known to arrive before a share `hold` of the pass would be
over. F needs its bytes, beside those of every F of the rank that has a smaller key and is still to come, so
that passes on their way back up find room, and beside what a BI may add to its F, so that one can always run.
BW runs where F or BI lacks bytes, and where nothing else is there and what is known to come leaves a share
`gap` of its time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.compiled import kept

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

F, BI, BW = 0, 1, 2
NEVER = 2**62


def _listed(
    stages: Ints,
    cost: Ints,
    hop: Ints,
    held: Ints,
    left: Ints,
    cap: Ints,
    keys: Floats,
    limit: Ints,
    policy: Floats,
    order: Ints,
) -> tuple[int, int, int]:
    """Fill `order` by [Note: list scheduling by keys].

    Args:
        stages: of each rank, int64 [ranks, most stages of a rank]; -1 behind the last.
        cost: of F, BI and BW, int64 [3, stages].
        hop: from each stage to the next one, and back.
        held, left: bytes from the start of F to the end of BI, and from there to the end of BW.
        cap: bytes of each rank.
        keys: of F and BI, float64 [2, stages, microbatches]; rising in each stage.
        limit: by stage, most microbatches between F and BI.
        policy: hold, gap.
        order: the passes of each rank by number, int64 [ranks, 3 x most stages x microbatches].

    Returns:
        the end of the last pass, the longest span of a rank, and how many passes ran: less than all where
        the keys need more bytes than the ranks have.
    """
    num_ranks, width = stages.shape
    num_stages, num_microbatches = keys.shape[1], keys.shape[2]
    home = np.empty(num_stages, np.int64)
    for r in range(num_ranks):
        for i in range(width):
            if stages[r, i] >= 0:
                home[stages[r, i]] = r
    arrival = np.full((2, num_stages, num_microbatches), NEVER, np.int64)
    for m in range(num_microbatches):
        arrival[F, 0, m] = 0
    done = np.zeros((3, num_stages), np.int64)
    used = np.zeros(num_ranks, np.int64)
    free = np.zeros(num_ranks, np.int64)
    first = np.full(num_ranks, -1, np.int64)
    placed = np.zeros(num_ranks, np.int64)
    wake = np.full(num_ranks, NEVER, np.int64)
    wake[home[0]] = 0
    # What the end of a pass gives back is booked when the rank is next free, that is, at once.
    returns = np.zeros(num_ranks, np.int64)
    hold, gap = policy[0], policy[1]
    added = np.zeros(num_ranks, np.int64)
    for s in range(num_stages):
        added[home[s]] = max(added[home[s]], left[s] - held[s])
    ran = 0
    while True:
        r = 0
        for q in range(1, num_ranks):
            if wake[q] < wake[r]:
                r = q
        now = wake[r]
        if now == NEVER:
            break
        used[r] -= returns[r]
        returns[r] = 0
        stage, kind, best = -1, -1, 0.0
        soon, next_arrival = NEVER, NEVER
        starved = False
        starved_key = 0.0
        for i in range(width):
            s = stages[r, i]
            if s < 0:
                break
            m = done[BI, s]
            if m < num_microbatches and m < done[F, s]:
                at = arrival[BI, s, m]
                if at <= now:
                    if used[r] + left[s] - held[s] > cap[r]:
                        if not starved or keys[BI, s, m] < starved_key:
                            starved, starved_key = True, keys[BI, s, m]
                    elif stage < 0 or keys[BI, s, m] < best:
                        stage, kind, best = s, BI, keys[BI, s, m]
                elif at < NEVER:
                    next_arrival = min(next_arrival, at)
            m = done[F, s]
            if m < num_microbatches and m < done[BI, s] + limit[s]:
                at = arrival[F, s, m]
                if at == NEVER:
                    continue
                key = keys[F, s, m]
                wanted = used[r] + held[s] + added[r]
                for j in range(width):
                    other = stages[r, j]
                    if other < 0:
                        break
                    if other != s:
                        n = done[F, other]
                        while n < num_microbatches and keys[F, other, n] < key and wanted <= cap[r]:
                            wanted += held[other]
                            n += 1
                if wanted > cap[r]:
                    if at <= now and (not starved or key < starved_key):
                        starved, starved_key = True, key
                elif at <= now:
                    if stage < 0 or key < best:
                        stage, kind, best = s, F, key
                else:
                    next_arrival = min(next_arrival, at)
        weights = -1
        for i in range(width):
            s = stages[r, i]
            if s < 0:
                break
            if done[BW, s] < done[BI, s] and (
                weights < 0 or keys[BI, s, done[BW, s]] < keys[BI, weights, done[BW, weights]]
            ):
                weights = s
        if stage >= 0 and hold > 0.0:
            until = now + hold * cost[kind, stage]
            for i in range(width):
                s = stages[r, i]
                if s < 0:
                    break
                for k in range(2):
                    m = done[k, s]
                    if m == num_microbatches or (k == BI and m >= done[F, s]):
                        continue
                    at = arrival[k, s, m]
                    if (
                        now < at < until
                        and keys[k, s, m] < best
                        and (k == BI or used[r] + held[s] + added[r] <= cap[r])
                    ):
                        soon = min(soon, at)
            if soon < NEVER:
                stage = -1
                next_arrival = min(next_arrival, soon)
        lacks_bytes = starved and (stage < 0 or starved_key < best)
        if weights >= 0 and (
            lacks_bytes
            or (stage < 0 and (next_arrival == NEVER or next_arrival - now >= gap * cost[BW, weights]))
        ):
            stage, kind = weights, BW
        if stage < 0:
            wake[r] = next_arrival
            continue
        m = done[kind, stage]
        done[kind, stage] += 1
        end = now + cost[kind, stage]
        free[r] = end
        wake[r] = end
        if first[r] < 0:
            first[r] = now
        order[r, placed[r]] = (3 * stage + kind) * num_microbatches + m
        placed[r] += 1
        ran += 1
        goal = -1
        at = end
        if kind == F:
            used[r] += held[stage]
            if stage + 1 < num_stages:
                goal = stage + 1
                at = end + hop[stage]
                arrival[F, goal, m] = at
            else:
                arrival[BI, stage, m] = end
        elif kind == BI:
            returns[r] = held[stage] - left[stage]
            if stage > 0:
                goal = stage - 1
                at = end + hop[goal]
                arrival[BI, goal, m] = at
        else:
            returns[r] = left[stage]
        if goal >= 0:
            q = home[goal]
            if q != r:
                wake[q] = min(wake[q], max(at, free[q]))
    end, span = 0, 0
    for r in range(num_ranks):
        end = max(end, free[r])
        span = max(span, free[r] - first[r])
    return end, span, ran


def _replayed(
    rank: Ints, cost: Ints, hop: Ints, held: Ints, left: Ints, order: Ints, starts: Ints, peaks: Ints
) -> tuple[int, int, int]:
    """Run an order, each pass as early as its rank and its inputs allow.

    Args:
        rank: of each stage.
        cost, hop, held, left: as in `_listed`.
        order: passes by number, int64 [ranks, passes]; -1 behind the last of a rank.
        starts: filled: of each pass by number, int64 [3 x stages x microbatches].
        peaks: filled: most bytes of each rank.

    Returns:
        the end of the last pass, the longest span of a rank, and how many passes ran.
    """
    num_ranks, length = order.shape
    num_stages = cost.shape[1]
    num_microbatches = starts.shape[0] // (3 * num_stages)
    starts[:] = -1
    place = np.zeros(num_ranks, np.int64)
    free = np.zeros(num_ranks, np.int64)
    first = np.full(num_ranks, -1, np.int64)
    used = np.zeros(num_ranks, np.int64)
    peaks[:] = 0
    end, span, ran = 0, 0, 0
    moved = True
    while moved:
        moved = False
        for r in range(num_ranks):
            while place[r] < length and order[r, place[r]] >= 0:
                number = order[r, place[r]]
                m = number % num_microbatches
                s, kind = divmod(number // num_microbatches, 3)
                at = free[r]
                own = 3 * s * num_microbatches + m
                if kind == F:
                    if s > 0:
                        before = starts[own - 3 * num_microbatches]
                        if before < 0:
                            break
                        at = max(at, before + cost[F, s - 1] + hop[s - 1])
                elif kind == BI:
                    if starts[own] < 0:
                        break
                    if s + 1 < num_stages:
                        behind = starts[own + 4 * num_microbatches]
                        if behind < 0:
                            break
                        at = max(at, behind + cost[BI, s + 1] + hop[s])
                elif starts[own + num_microbatches] < 0:
                    break
                starts[number] = at
                free[r] = at + cost[kind, s]
                if kind == F:
                    used[r] += held[s]
                    peaks[r] = max(peaks[r], used[r])
                elif kind == BI:
                    used[r] -= held[s] - left[s]
                    peaks[r] = max(peaks[r], used[r])
                else:
                    used[r] -= left[s]
                if first[r] < 0:
                    first[r] = at
                place[r] += 1
                ran += 1
                moved = True
    for r in range(num_ranks):
        end = max(end, free[r])
        span = max(span, free[r] - first[r])
    return end, span, ran


listed: Any = kept(_listed)
replayed: Any = kept(_replayed)
