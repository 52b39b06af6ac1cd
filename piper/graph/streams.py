"""The streams that directives name, and the rules that hold for each."""

from __future__ import annotations

from dataclasses import replace

from cost_models.errors import nearest
from piper.errors import StrategyError
from piper.graph.facts import StreamRule
from piper.graph.graph import Graph

COMPUTE = "compute"
TRANSFERS = "pp"
_DEFAULTS = (COMPUTE, "tp", "cp", "ep", "dp", TRANSFERS, "host")


def known_streams(graph: Graph) -> tuple[str, ...]:
    """Return the names of the streams that rules may be about: the default ones and those stated."""
    stated = [name for fact in graph.replications for name in (fact.reduce_stream, fact.gather_stream)]
    for facts in (
        graph.tensor_shardings,
        graph.expert_shardings,
        graph.sequence_shardings,
        graph.offloadings,
    ):
        stated += [fact.stream for fact in facts]
    named = graph.transfer_stream
    return tuple(dict.fromkeys((*_DEFAULTS, *sorted(stated), *([named] if named else []))))


def state_rule(
    graph: Graph, stream: str, *, priority: int | None = None, sms: int | None = None, where: str, op: str
) -> Graph:
    """Return the graph with one more rule for a stream; raises when the stream has one of that kind."""
    known = known_streams(graph)
    if stream not in known:
        raise StrategyError(
            where=where, field=f"{op}.stream", value=stream, rule="is not a stream of this strategy",
            fix=f"there are {', '.join(known)}: {nearest(stream, known)}",
        )  # fmt: skip
    rule = StreamRule(stream=stream, priority=priority, sms=sms, where=where)
    for other in graph.stream_rules:
        if other.stream == stream and (other.priority is None) is (priority is None):
            raise StrategyError(
                where=where, field=f"{op}.stream", value=stream,
                rule=f"already has the {op} at {other.where}", fix=f"keep one {op} for each stream",
            )  # fmt: skip
    stated = sorted((*graph.stream_rules, rule), key=lambda r: (r.stream, r.priority is None))
    return replace(graph, stream_rules=tuple(stated))
