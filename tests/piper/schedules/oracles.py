"""What schedules are compared with: dataflow times of rows, and torch's own orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from piper.errors import StrategyError
from piper.schedules import Rows, schedule_rows

Slot = str | list[str]


def rows_or_none(
    name: str, num_pipeline_ranks: int, num_microbatches: int, virtual_stages_per_rank: int = 1
) -> Rows | None:
    """Return checked rows of a schedule, or None for counts that it refuses."""
    try:
        return schedule_rows(
            name,
            num_pipeline_ranks=num_pipeline_ranks,
            num_microbatches=num_microbatches,
            virtual_stages_per_rank=virtual_stages_per_rank,
        )
    except StrategyError as error:
        if not error.rule.startswith("cannot be used: "):
            raise
        return None


def parse(code: str) -> tuple[int, str, int]:
    """Split 2BI0 into (2, "BI", 0)."""
    stage = code[: len(code) - len(code.lstrip("0123456789"))]
    microbatch = code[len(code.rstrip("0123456789")) :]
    return int(stage), code[len(stage) : len(code) - len(microbatch)], int(microbatch)


def dataflow_times(
    rows: Sequence[Sequence[Slot]], costs: Mapping[str, Fraction], *, num_stages: int
) -> dict[str, tuple[Fraction, Fraction]]:
    """Return start and end of every pass: as early as row order and dataflow with latency `comm` allow.

    `num_stages`: of the model; virtual stages behind them belong to further copies of it.
    """
    rank_of = {code: rank for rank, row in enumerate(rows) for slot in row for code in _codes(slot)}
    times: dict[str, tuple[Fraction, Fraction]] = {}
    place = [0] * len(rows)
    free = [Fraction(0)] * len(rows)
    while any(place[rank] < len(rows[rank]) for rank in range(len(rows))):
        before = list(place)
        for rank, row in enumerate(rows):
            while place[rank] < len(row):
                codes = _codes(row[place[rank]])
                needs = [need for code in codes for need in _needs(code, rank_of, num_stages)]
                if not all(need in times for need in needs):
                    break
                arrivals = [
                    times[need][1] + (costs["comm"] if rank_of[need] != rank else 0) for need in needs
                ]
                start = max([free[rank], *arrivals])
                end = start + (costs["FB"] if len(codes) > 1 else costs[parse(codes[0])[1]])
                times |= dict.fromkeys(codes, (start, end))
                free[rank] = end
                place[rank] += 1
        assert place != before, f"stuck at {place}"
    return times


def torch_rows(
    name: str, num_pipeline_ranks: int, num_microbatches: int, virtual_stages_per_rank: int = 1
) -> list[list[Slot]]:
    """Return the compute order of a schedule of torch.distributed.pipelining, as codes."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    ranks = get_schedule_ops(name, num_pipeline_ranks, num_microbatches, virtual_stages_per_rank)
    return [codes_of_torch(row) for row in ranks]


def codes_of_torch(row: Sequence[Any]) -> list[Slot]:
    """Return the passes among the actions of torch.distributed.pipelining, as codes."""
    return [_slot_of_torch(action) for action in row if action is not None and _is_pass_of_torch(action)]


_LETTERS_OF_TORCH = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "BI", "BACKWARD_WEIGHT": "BW"}


def _is_pass_of_torch(action: Any) -> bool:
    return bool(action.sub_actions) or action.computation_type.name in _LETTERS_OF_TORCH


def _slot_of_torch(action: Any) -> Slot:
    if action.sub_actions:
        return [str(_slot_of_torch(part)) for part in action.sub_actions]
    letters = _LETTERS_OF_TORCH[action.computation_type.name]
    return f"{action.stage_index}{letters}{action.microbatch_index}"


def _codes(slot: Slot) -> list[str]:
    return [slot] if isinstance(slot, str) else list(slot)


def _needs(code: str, rank_of: Mapping[str, int], num_stages: int) -> list[str]:
    stage, kind, microbatch = parse(code)
    if kind == "F":
        return [f"{stage - 1}F{microbatch}"] if stage % num_stages else []
    if kind == "BW":
        return [f"{stage}BI{microbatch}"]
    needs = [f"{stage}F{microbatch}"]
    if stage % num_stages < num_stages - 1:
        behind = (f"{stage + 1}{letter}{microbatch}" for letter in ("B", "BI"))
        needs += [need for need in behind if need in rank_of]
    return needs
