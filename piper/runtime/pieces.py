"""Which piece of a parameter, and which tokens of a sequence, belong to a rank. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from cost_models.errors import check_invariant
from simulator.plan import Plan

Piece = tuple[tuple[int, int], ...]
"""[start, end) in each dimension."""


@lru_cache(maxsize=8)
def _dims(plan: Plan) -> dict[str, tuple[tuple[str, int], ...]]:
    return {cut.name: cut.dims for cut in plan.cuts.parameters}


@lru_cache(maxsize=8)
def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in plan.parameters}


@lru_cache(maxsize=8)
def local_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return parameter -> the shape of the piece that a rank holds (all ranks equal ones)."""
    found = {}
    for name, shape in _shapes(plan).items():
        sizes = list(shape)
        for axis, dim in _dims(plan).get(name, ()):
            sizes[dim] //= degree(plan, axis)
        found[name] = tuple(sizes)
    return found


@lru_cache(maxsize=8)
def local_numel(plan: Plan) -> dict[str, int]:
    """Return parameter -> the elements that a rank holds."""
    return {name: prod(shape) for name, shape in local_shapes(plan).items()}


@lru_cache(maxsize=4096)
def piece_of(plan: Plan, rank: int, name: str) -> Piece:
    """Return the piece of a parameter that `rank` holds."""
    shape = local_shapes(plan)[name]
    pieces = [(0, size) for size in shape]
    for axis, dim in _dims(plan).get(name, ()):
        start = position(plan, rank, axis) * shape[dim]
        pieces[dim] = (start, start + shape[dim])
    return tuple(pieces)


def index_of(piece: Piece) -> tuple[slice, ...]:
    """Return what indexes a whole tensor with a piece."""
    return tuple(slice(start, end) for start, end in piece)


def degree(plan: Plan, axis: str) -> int:
    """Return over how many ranks an axis cuts; "ep" and "etp" as the plan's experts are distributed."""
    if axis not in {"ep", "etp"}:
        return plan.mesh.size(axis)
    regions = [region for region in plan.cuts.regions if region.axis == "ep"]
    degrees = {(region.degree, region.tensor_degree) for region in regions} or {(1, 1)}
    check_invariant(len(degrees) == 1, f"experts are distributed in several ways: {sorted(degrees)}")
    ep, etp = degrees.pop()
    return ep if axis == "ep" else etp


def position(plan: Plan, rank: int, axis: str) -> int:
    """Return where on an axis a rank is; of a stage's ranks etp counts fastest, then ep (DESIGN 3)."""
    if axis not in {"ep", "etp"}:
        return plan.mesh.coordinate(rank, axis)
    place = plan.mesh.ranks(pp=plan.pipeline_rank_of(rank)).index(rank)
    etp = degree(plan, "etp")
    return place % etp if axis == "etp" else place // etp % degree(plan, "ep")


def context_pieces(plan: Plan, rank: int) -> tuple[tuple[int, int], ...]:
    """Return the tokens [start, end) of every sequence that a rank of cp has: an early and a late piece.

    [Note: balanced pieces]
    Of 2 cp equal pieces the rank at place r has the pieces r and 2 cp - 1 - r, so that the causal work of all
    ranks is equal (as in Llama 3, arXiv 2407.21783, section 3.3.2); unbalanced: of cp pieces its own.
    """
    cp, seq, at = plan.mesh.size("cp"), plan.training.seq_len, plan.mesh.coordinate(rank, "cp")
    if cp == 1:
        return ((0, seq),)
    if not plan.cuts.balanced:
        size = seq // cp
        return ((at * size, (at + 1) * size),)
    size = seq // (2 * cp)
    return tuple((piece * size, (piece + 1) * size) for piece in (at, 2 * cp - 1 - at))


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a rank stands inside its replica.

    Args:
        plan: of the job.
        rank: which.
    """

    plan: Plan
    rank: int

    @cached_property
    def tensor(self) -> tuple[int, int]:
        """Return (place, ranks) on the axis tp."""
        return position(self.plan, self.rank, "tp"), self.plan.mesh.size("tp")

    @cached_property
    def counts_loss(self) -> bool:
        """Return whether this rank reports losses: ranks of tp compute the same ones."""
        return self.tensor[0] == 0

    @cached_property
    def ring(self) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Return (place, tokens of every rank) on the axis cp."""
        others = {axis: self.plan.mesh.coordinate(self.rank, axis) for axis, _ in self.plan.mesh.axes}
        members = [
            self.plan.mesh.ranks(**(others | {"cp": at}))[0] for at in range(self.plan.mesh.size("cp"))
        ]
        pieces = tuple(tokens_of(self.plan, member, over_tensor=False) for member in members)
        return position(self.plan, self.rank, "cp"), pieces

    @cached_property
    def rings(self) -> frozenset[int]:
        """Return the segments around whose attention keys and values go."""
        return frozenset(region.first for region in self.plan.cuts.regions if region.method == "ring")

    @cached_property
    def experts(self) -> dict[int, int]:
        """Return segment -> first segment of the region of experts around it."""
        regions = [region for region in self.plan.cuts.regions if region.axis == "ep"]
        return {i: region.first for region in regions for i in range(region.first, region.last + 1)}

    def tokens(self, segment: int) -> tuple[int, ...] | None:
        """Return the positions of this rank's tokens in a segment; None: all of them, in order."""
        return self._tokens[segment] if self.plan.cuts.regions else None

    @cached_property
    def _tokens(self) -> tuple[tuple[int, ...] | None, ...]:
        cuts = self.plan.cuts
        found: list[tuple[int, ...] | None] = []
        inside = {i for r in cuts.regions if r.axis == "tp" for i in range(r.first, r.last + 1)}
        turned = {i for r in cuts.regions if r.method == "all_to_all" for i in range(r.first, r.last + 1)}
        for segment in range(len(self.plan.segments)):
            over_tensor = cuts.sequence_parallel and segment not in inside
            whole = segment in turned or self.plan.mesh.size("cp") == 1
            if whole and not over_tensor:
                found.append(None)
            else:
                found.append(tokens_of(self.plan, self.rank, over_tensor=over_tensor))
        return tuple(found)


def tokens_of(plan: Plan, rank: int, *, over_tensor: bool) -> tuple[int, ...]:
    """Return the positions in the sequence of a rank's tokens; `over_tensor`: cut over tp as well."""
    mine = [token for start, end in context_pieces(plan, rank) for token in range(start, end)]
    if over_tensor:
        size = len(mine) // plan.mesh.size("tp")
        at = plan.mesh.coordinate(rank, "tp")
        mine = mine[at * size : (at + 1) * size]
    return tuple(mine)
