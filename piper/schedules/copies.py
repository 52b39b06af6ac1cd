"""Copies of the model's stages: schedules that run microbatches through the ranks in two directions.

[Note: copies]
A model of S stages in c copies has c S virtual stages: virtual stage k S + s is stage s of copy k, which runs
microbatches k M / c to (k + 1) M / c - 1 of M. Nothing passes between copies; a stage's gradients are summed
over its copies. In the layout "bidirectional" rank r holds stage r of copy 0 and stage P - 1 - r of
copy 1, which is virtual stage 2P - 1 - r: copy 0 goes down the ranks, copy 1 up.
How many copies a schedule has: `copies_of` in this folder's `__init__`. What a virtual stage is: `copy_of`. A
plan names the stages of the model, which two ranks then hold: `in_model_stages`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from simulator.plan.task import NONE

if TYPE_CHECKING:
    from piper.schedules.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How virtual stages follow one another; see [Note: copies].

    Args:
        num_stages: virtual stages, those of all copies.
        count: copies; divides `num_stages`.
    """

    num_stages: int
    count: int = 1

    @property
    def stages_of_a_copy(self) -> int:
        """Return the stages of the model."""
        return self.num_stages // self.count

    def copy_of(self, virtual_stage: int) -> tuple[int, int]:
        """Return the stage of the model that a virtual stage is, and which copy of it."""
        copy, stage = divmod(virtual_stage, self.stages_of_a_copy)
        return stage, copy

    def goal(self, virtual_stage: int, *, forward: bool) -> int:
        """Return the virtual stage that needs the result of F (or else of B, BI), or NONE."""
        goal = virtual_stage + (1 if forward else -1)
        inside = 0 <= goal < self.num_stages
        return goal if inside and self.copy_of(goal)[1] == self.copy_of(virtual_stage)[1] else NONE

    def microbatches(self, virtual_stage: int, num_microbatches: int) -> range:
        """Return the microbatches, of all of a step, that a virtual stage runs."""
        copy = self.copy_of(virtual_stage)[1]
        return range(copy * num_microbatches // self.count, (copy + 1) * num_microbatches // self.count)


def in_model_stages(rows: Rows, copies: Copies) -> Rows:
    """Return rows that name the stages of the model: each stands on the ranks of all its copies."""
    if copies.count == 1:
        return rows
    return tuple(
        tuple(tuple(replace(task, stage=copies.copy_of(task.stage)[0]) for task in slot) for slot in row)
        for row in rows
    )


def copy_of(virtual_stage: int, *, num_stages: int, copies: int) -> tuple[int, int]:
    """Return the stage of the model that a virtual stage is, and which copy of it; see [Note: copies].

    Args:
        virtual_stage: as rows and plans number them, from 0.
        num_stages: virtual stages, those of all copies.
        copies: copies of the model, as `copies_of` says.
    """
    return Copies(num_stages=num_stages, count=copies).copy_of(virtual_stage)
