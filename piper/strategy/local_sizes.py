"""Sizes of microbatches on stages with meshes of their own: the batch is one, the replicas are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, lcm

from piper.errors import StrategyError
from piper.strategy.degrees import Degrees
from piper.strategy.strategy import Strategy


def captured_sizes(strategy: Strategy, degrees: Degrees, sizes: Iterable[int]) -> tuple[int, ...]:
    """Return every size of a microbatch on a replica of any stage; those of the job's mesh first.

    Args:
        strategy: with the meshes of stages.
        degrees: of the job's mesh.
        sizes: sequences of the microbatches on a replica of the job's mesh.
    Raises: StrategyError for a mesh whose replicas do not take whole sequences, or that are not unions of
        replicas of the other stages (or parts of one).
    """
    distinct = tuple(dict.fromkeys(sizes))
    found = dict.fromkeys(distinct)
    known = {degrees.dp: "the job's mesh"}
    for mesh in strategy.stage_meshes:
        dp = mesh.size("dp")
        if mesh.ranks_of_stage != degrees.tp * degrees.cp * degrees.dp or mesh.size("cp") != degrees.cp:
            continue  # refused by the directive itself, with the reason
        for other, who in known.items():
            if dp % other and other % dp:
                raise StrategyError(
                    where=mesh.where, field="mesh.axes.dp", value=dp,
                    rule=f"neither divides dp = {other} of {who} nor is a multiple of it: the samples of a "
                    "replica of one stage must be those of whole replicas of another",
                    fix=f"use dp = {_legal(degrees, known, distinct)}",
                )  # fmt: skip
        for size in distinct:
            if size * degrees.dp % dp:
                least = dp // gcd(dp, degrees.dp)
                raise StrategyError(
                    where=mesh.where, field="mesh.axes.dp", value=dp,
                    rule=f"does not divide a microbatch of {size} x {degrees.dp} sequences (x dp of the job)",
                    fix=f"use dp = {_legal(degrees, known, distinct)}, or micro_batch = {least} x n",
                )  # fmt: skip
        known.setdefault(dp, f"the mesh at {mesh.where}")
        found |= dict.fromkeys(size * degrees.dp // dp for size in distinct)
    return tuple(found)


def least_micro_batch(strategy: Strategy, degrees: Degrees) -> int:
    """Return the fewest sequences of a microbatch of the job's mesh that all stages can share out."""
    return lcm(*(mesh.size("dp") // gcd(mesh.size("dp"), degrees.dp) for mesh in strategy.stage_meshes))


def _legal(degrees: Degrees, known: Iterable[int], sizes: Sequence[int]) -> str:
    """Return the values of dp that suit the ranks of a stage, the microbatches and other meshes."""
    ranks = degrees.tp * degrees.dp
    found = [
        dp
        for dp in range(1, ranks + 1)
        if ranks % dp == 0
        and all(dp % other == 0 or other % dp == 0 for other in known)
        and all(size * degrees.dp % dp == 0 for size in sizes)
    ]
    return ", ".join(map(str, found))
