"""Zero bubble under a memory cap: costs of the passes -> rows of one stage per rank, F, BI and BW apart.

Several greedy rules make rows; those with the shortest longest span of a rank win (then the earliest end,
then the earlier rule). Source of the rules: Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv
2401.10241), section 3.1: fill the warm-up with forwards as far as memory goes, then F and BI in turn, BW
where a rank would idle or needs its memory back.
[Note: what BW keeps]
A microbatch counts 1 from the start of its F, and `kept` from the end of BI to the end of BW: the share of
its activations that weight gradients need. By default 1, which is stricter than the paper: it counts 32 s b h
bytes of (34 + 5 a s / h) s b h a layer (its Table 1), 0.37 and 0.43 for its models of 1.5B and 6.2B.
[Note: least bubble under a cap]
No span is below its passes plus (p - 1)(F + BI + 2 comm) - min((k - 1) F, (w - 1) BW), where k = min(m, cap)
and w = min(m, 1 + floor((cap - 1) / kept)). Before its first BI the first rank runs at most k forwards.
Before its last BI the last rank has run all F and BI, and BW of all but w microbatches; then the first rank
still waits for that BI to come up, and runs its BW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush
from itertools import islice, product

from piper.schedules.alternating import alternating_row

_MOST_PASSES_TRIED = 2**21
"""Passes of all rows that are compared: long steps are tried with fewer rules, to take seconds."""
_HALVES_OF_BW = (0, 1, 2)
_NONE = (0, 0)

Kinds = list[str]
"""F, BI and BW of one rank in order; the n-th of a kind is microbatch n."""


def automatic_rows(
    *, num_pipeline_ranks: int, num_microbatches: int, costs: Mapping[str, Fraction], cap: int
) -> list[list[str]]:
    """Return rows, as codes, that keep at most `cap` microbatches in flight on every rank.

    Args:
        num_pipeline_ranks, num_microbatches: >= 1.
        costs: of F, BI, BW and comm (the latency between ranks), in any one unit; kept (default 1).
        cap: microbatches in flight, >= 1; see [Note: what BW keeps].

    Raises: ValueError for a cap below 1.
    """
    if cap < 1:
        raise ValueError(f"a pass needs one microbatch in flight, the memory cap is {cap}")
    unit = math.lcm(*(costs[name].denominator for name in ("F", "BI", "BW", "comm")))
    kept = costs.get("kept", Fraction(1))
    problem = _Problem(
        p=num_pipeline_ranks,
        m=num_microbatches,
        cap=min(cap, num_microbatches),
        f=int(costs["F"] * unit),
        bi=int(costs["BI"] * unit),
        bw=int(costs["BW"] * unit),
        comm=int(costs["comm"] * unit),
        whole=kept.denominator,
        kept=kept.numerator,
    )
    return [_codes(rank, row) for rank, row in enumerate(_best(problem))]


def least_span(problem: _Problem) -> int:
    """Return what no rows under the cap can beat; see [Note: least bubble under a cap]."""
    work = problem.m * (problem.f + problem.bi + problem.bw)
    way = (problem.p - 1) * (problem.f + problem.bi + 2 * problem.comm)
    waiting = problem.m - 1
    if problem.kept:
        waiting = min(waiting, (problem.cap - 1) * problem.whole // problem.kept)
    return work + max(0, way - min((problem.cap - 1) * problem.f, waiting * problem.bw))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Ranks, microbatches, most in flight (at most m), and costs as whole numbers of one unit.

    A microbatch takes `whole` of memory up to the end of its BI, and `kept` up to that of its BW.
    """

    p: int
    m: int
    cap: int
    f: int
    bi: int
    bw: int
    comm: int
    whole: int
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """What a rank does where the greedy choice is open.

    Args:
        warm_up: by rank, most forwards before the first BI.
        halves_of_bw: BW fills a known gap of at least so many halves of its own time.
        hold: no forward starts where it would delay a BI that is known to arrive before its end.
    """

    warm_up: Sequence[int]
    halves_of_bw: int
    hold: bool


def _best(problem: _Problem) -> list[Kinds]:
    """Return the best rows; the first that cannot be beaten end the search."""
    end = problem.m * (problem.f + problem.bi + problem.bw) + (problem.p - 1) * (problem.f + problem.comm)
    least = (least_span(problem), max(least_span(problem), end))
    most = max(3, _MOST_PASSES_TRIED // (3 * problem.p * problem.m))
    best: list[Kinds] = []
    best_time = _NONE
    for rows in islice(_candidates(problem), most):
        time = _span_and_end(rows, problem)
        if not best or time < best_time:
            best, best_time = rows, time
        if best_time == least:
            break
    return best


def _candidates(problem: _Problem) -> Iterator[list[Kinds]]:
    """Yield the rows of ZB-H1 and ZB-H2 where they fit the cap, then those of every rule."""
    behind = [problem.p - rank for rank in range(problem.p)]
    for times in (2, 1):
        if min(problem.m, times * (problem.p - 1) + 1) <= problem.cap:
            yield [_alternating(problem, rank, times) for rank in range(problem.p)]
    warm_ups = ([2 * n - 1 for n in behind], [problem.cap] * problem.p, behind)
    for halves_of_bw, hold, warm_up in product(_HALVES_OF_BW, (False, True), warm_ups):
        yield _greedy(problem, _Rule(warm_up=warm_up, halves_of_bw=halves_of_bw, hold=hold))


def _alternating(problem: _Problem, rank: int, times: int) -> Kinds:
    passes = (["F"] * problem.m, ["BI"] * problem.m, ["BW"] * problem.m)
    return alternating_row(*passes, warm_up=times * (problem.p - 1 - rank), delay=times * rank)


@dataclass(slots=True)
class _Rank:
    """One rank while rows are made: when inputs of F and BI arrive (those known, in order), and what ran."""

    inputs: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    row: Kinds = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    forward_is_next: bool = True
    free: int = 0


def _greedy(problem: _Problem, rule: _Rule) -> list[Kinds]:
    """Return rows made in order of time: whenever a rank is free or something arrives, it chooses."""
    ranks = [_Rank() for _ in range(problem.p)]
    ranks[0].inputs = [0] * problem.m
    events = [(0, 0)]
    while events:
        now, number = heappop(events)
        rank = ranks[number]
        if rank.free > now:
            continue
        kind = _choice(problem, rule, rank, now=now, warm_up=rule.warm_up[number])
        if kind is None:
            continue
        rank.row.append(kind)
        if kind == "F":
            rank.free = now + problem.f
            rank.forwards += 1
            rank.forward_is_next = False
            following, arrival = number + 1, rank.free + problem.comm
            if following < problem.p:
                ranks[following].inputs.append(arrival)
                heappush(events, (arrival, following))
            else:
                rank.gradients.append(rank.free)
        elif kind == "BI":
            rank.free = now + problem.bi
            rank.backwards += 1
            rank.forward_is_next = True
            if number:
                arrival = rank.free + problem.comm
                ranks[number - 1].gradients.append(arrival)
                heappush(events, (arrival, number - 1))
        else:
            rank.free = now + problem.bw
            rank.weights += 1
        heappush(events, (rank.free, number))
    return [rank.row for rank in ranks]


def _choice(problem: _Problem, rule: _Rule, rank: _Rank, *, now: int, warm_up: int) -> str | None:
    """Return what a free rank runs now, or None to wait."""
    waiting = (rank.backwards - rank.weights) * problem.kept
    held = (rank.forwards - rank.backwards) * problem.whole + waiting
    full = held + problem.whole > problem.cap * problem.whole
    closed = full or (rank.backwards == 0 and rank.forwards >= warm_up)
    forward = None if closed else _known(rank.inputs, rank.forwards)
    gradient = _known(rank.gradients, rank.backwards)
    weights = rank.weights < rank.backwards
    if gradient is not None and gradient <= now:
        return "F" if forward is not None and forward <= now and rank.forward_is_next else "BI"
    if forward is not None and forward <= now:
        if not rule.hold or gradient is None or gradient >= now + problem.f:
            return "F"
        return "BW" if weights and gradient >= now + problem.bw else None
    if not weights:
        return None
    arrivals = [time for time in (forward, gradient) if time is not None]
    forced = full and rank.forwards < problem.m
    fills = not arrivals or 2 * (min(arrivals) - now) >= rule.halves_of_bw * problem.bw
    return "BW" if forced or fills else None


def _known(arrivals: Sequence[int], number: int) -> int | None:
    return arrivals[number] if number < len(arrivals) else None


def _span_and_end(rows: Sequence[Kinds], problem: _Problem) -> tuple[int, int]:
    """Return the longest span of a rank and the end of the last pass: each as early as its inputs allow."""
    cost = {"F": problem.f, "BI": problem.bi, "BW": problem.bw}
    arrived: list[dict[str, list[int]]] = [{"F": [], "BI": []} for _ in rows]
    arrived[0]["F"] = [0] * problem.m
    arrived[-1]["BI"] = [0] * problem.m
    place, free, first = [0] * problem.p, [0] * problem.p, [-1] * problem.p
    ready = list(range(problem.p))
    done = [{"F": 0, "BI": 0} for _ in rows]
    while ready:
        rank = ready.pop()
        row = rows[rank]
        while place[rank] < len(row):
            kind = row[place[rank]]
            start = free[rank]
            if kind != "BW":
                number = done[rank][kind]
                if number >= len(arrived[rank][kind]):
                    break
                start = max(start, arrived[rank][kind][number])
                done[rank][kind] += 1
            first[rank] = start if place[rank] == 0 else first[rank]
            free[rank] = start + cost[kind]
            place[rank] += 1
            goal = rank + {"F": 1, "BI": -1, "BW": problem.p}[kind]
            if 0 <= goal < problem.p:
                arrived[goal][kind].append(free[rank] + problem.comm)
                ready.append(goal)
    return max(end - start for start, end in zip(first, free, strict=True)), max(free)


def _codes(rank: int, row: Kinds) -> list[str]:
    seen = {"F": 0, "BI": 0, "BW": 0}
    codes = []
    for kind in row:
        codes.append(f"{rank}{kind}{seen[kind]}")
        seen[kind] += 1
    return codes
