"""How the ranks of a stage cut the model among them: what a rank must know to compute its own part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Segments between whose borders tensors lie otherwise than around them.

    Args:
        axis: "tp": features or heads are cut; "ep": experts are distributed; "cp": attention between the
            tokens of a sequence.
        first, last: its segments.
        degree: over how many ranks it is cut.
        tensor_degree: "ep": ranks that share each expert.
        asynchronous: "tp": its exchanges run beside its computation, piece by piece.
        capacity: "ep": most tokens of an expert / mean, or None: no token is dropped.
        method: "cp": "ring" (keys and values go round, nothing turns at the border) or "all_to_all" (tokens
            are exchanged for heads); else "".
    """

    axis: str
    first: int
    last: int
    degree: int
    tensor_degree: int = 1
    method: str = ""
    capacity: float | None = None
    asynchronous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCut:
    """A parameter of which each rank holds a part: (axis, dimension), axes "tp", "ep" and "etp"."""

    name: str
    dims: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Everything that is cut inside the replicas; empty: a rank computes whole stages.

    Args:
        regions: in order of axis and first segment.
        parameters: those that are cut; all others are whole on every rank.
        sequence_parallel: between the regions of tp tokens are cut over tp.
        balanced: cp: each rank has an early and a late piece of every sequence.
    """

    regions: tuple[Region, ...] = ()
    parameters: tuple[ParameterCut, ...] = ()
    sequence_parallel: bool = False
    balanced: bool = False
