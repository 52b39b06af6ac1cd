"""What the facts of tensor, expert and context parallelism mean for one rank, as the plan says it."""

from __future__ import annotations

from collections.abc import Iterator

from cost_models.ops import OpKind
from piper.graph import Graph, Shares
from simulator.plan import NONE, Cuts, ParameterCut, Region


def cuts_of(graph: Graph) -> Cuts:
    """Return what is cut inside the replicas."""
    if not (graph.tensor_shardings or graph.expert_shardings or graph.sequence_shardings):
        return Cuts()
    shares = Shares(graph=graph)
    return Cuts(
        regions=(*_tensor_regions(shares), *_expert_regions(shares), *_context_regions(shares)),
        parameters=tuple(_parameters(shares)),
        sequence_parallel=shares.sequence_parallel,
        balanced=any(fact.balanced for fact in graph.sequence_shardings),
    )


def _spans(shares: Shares, axis: str, claimed: Iterator[int]) -> list[tuple[int, int]]:
    found = (shares.region(axis, i) for i in claimed)
    return sorted({span for span in found if span is not None})


def _tensor_regions(shares: Shares) -> Iterator[Region]:
    for first, last in _spans(shares, "tp", iter(shares.tensor_of)):
        yield Region(
            axis="tp",
            first=first,
            last=last,
            degree=shares.tensor_degree[first],
            asynchronous=shares.tensor_of[first].asynchronous,
        )


def _expert_regions(shares: Shares) -> Iterator[Region]:
    for first, last in _spans(shares, "ep", iter(shares.expert_of)):
        fact = shares.expert_of[first]
        yield Region(
            axis="ep",
            first=first,
            last=last,
            degree=fact.degree,
            tensor_degree=fact.tensor_degree,
            capacity=fact.capacity,
        )


def _context_regions(shares: Shares) -> Iterator[Region]:
    """Yield the regions of all-to-alls, and every segment around which a ring goes."""
    turned = {i for i, fact in shares.sequence_of.items() if fact.method == "all_to_all"}
    for first, last in _spans(shares, "cp", iter(turned)):
        yield Region(
            axis="cp", first=first, last=last, degree=shares.context_degree[first], method="all_to_all"
        )
    for i in sorted(shares.sequence_of.keys() - turned):
        operations = shares.graph.model.segments[i].forward.operations
        if any(operation.kind is OpKind.ATTENTION for operation in operations):
            yield Region(axis="cp", first=i, last=i, degree=shares.context_degree[i], method="ring")


def _parameters(shares: Shares) -> Iterator[ParameterCut]:
    seen: set[str] = set()
    for number, segment in enumerate(shares.graph.model.segments):
        layout = dict(segment.tensor_layout)
        for name in segment.parameters:
            dims = _dims(shares, number, layout.get(name, NONE))
            if dims and name not in seen:
                yield ParameterCut(name=name, dims=dims)
                seen.add(name)


def _dims(shares: Shares, number: int, cut_dim: int) -> tuple[tuple[str, int], ...]:
    expert = shares.expert_of.get(number)
    if expert is not None:
        dims = (("ep", 0, expert.degree), ("etp", cut_dim, expert.tensor_degree))
        return tuple((axis, dim) for axis, dim, degree in dims if degree > 1 and dim != NONE)
    return (("tp", cut_dim),) if shares.tensor_degree[number] > 1 and cut_dim != NONE else ()
