"""One forward and one backward pass in turn: the row that 1F1B and its kin have in common.

[Note: late weight gradients]
A backward pass cut in two (BI, BW) gives its input's gradient to the rank before at once; the weight half
waits until `delay` later input halves are done and fills time that would be idle. Source: Qi et al. 2024,
"Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), section 2.
[Note: rounds]
Several stages on a rank take turns: a round of microbatches runs on the first stage, then on the second, ...
With M microbatches on P ranks there are max(1, M // P) rounds of equal size, which must divide M. Source:
Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, for rounds of P; other sizes as in torch's
`ScheduleInterleaved1F1B`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def alternating_row(
    forwards: Sequence[str],
    backwards: Sequence[str],
    weights: Sequence[str] = (),
    *,
    warm_up: int,
    delay: int = 0,
) -> list[str]:
    """Return `warm_up` forwards, then a forward (while any is left) and a backward in turn.

    Args:
        forwards, backwards: all passes of the rank, each in its order.
        weights: the weight halves of `backwards` in the same order, or none when those are whole.
        warm_up: forwards before the first pair.
        delay: how many more backwards run before the weight half of one.
    """
    row = list(forwards[:warm_up])
    for number, backward in enumerate(backwards):
        row += forwards[warm_up + number : warm_up + number + 1]
        row.append(backward)
        if number >= delay:
            row += weights[number - delay : number - delay + 1]
    row += weights[max(len(backwards) - delay, 0) :]
    return row


def microbatches_per_round(name: str, *, num_pipeline_ranks: int, num_microbatches: int) -> int:
    """Return how many microbatches one stage runs before the next stage has its turn; see [Note: rounds].

    Raises: ValueError naming the nearest counts that divide into rounds.
    """
    rounds = _rounds(num_pipeline_ranks, num_microbatches)
    if num_microbatches % rounds:
        below = next(m for m in range(num_microbatches, 0, -1) if m % _rounds(num_pipeline_ranks, m) == 0)
        above = -(-num_microbatches // num_pipeline_ranks) * num_pipeline_ranks
        legal = next(m for m in range(num_microbatches, above + 1) if m % _rounds(num_pipeline_ranks, m) == 0)
        raise ValueError(
            f"{name} runs {num_microbatches} microbatches on {num_pipeline_ranks} ranks in {rounds} rounds, "
            f"which {num_microbatches} does not divide into; use {below} or {legal} microbatches"
        )
    return num_microbatches // rounds


def passes_by_turns(
    kind: str,
    stages: Sequence[int],
    *,
    num_microbatches: int,
    per_round: int,
) -> list[str]:
    """Return the passes of one kind on a rank, as codes: each round on every stage in turn."""
    return [
        f"{stage}{kind}{microbatch}"
        for first in range(0, num_microbatches, per_round)
        for stage in stages
        for microbatch in range(first, first + per_round)
    ]


def stages_of_ranks(num_pipeline_ranks: int, virtual_stages_per_rank: int) -> Iterator[range]:
    """Yield for every rank its stages: r, r + P, r + 2P, ..."""
    num_stages = num_pipeline_ranks * virtual_stages_per_rank
    return (range(rank, num_stages, num_pipeline_ranks) for rank in range(num_pipeline_ranks))


def _rounds(num_pipeline_ranks: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_pipeline_ranks)
