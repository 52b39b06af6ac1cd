"""`sm_budget`: how many streaming multiprocessors the collectives of a stream take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from piper.errors import StrategyError
from piper.graph.directive import Directive, read_name, read_whole_number, refuse_unknown_keys
from piper.graph.graph import Graph
from piper.graph.streams import COMPUTE, state_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class SmBudget(Directive):
    """Limit what collectives take from the kernels that run beside them.

    rewrite: all-to-all(all it wants) | F(the rest)  ->  all-to-all(20 SMs) | F(all other SMs)

    Args:
        stream: its name, as for `priority`.
        sms: streaming multiprocessors.
    """

    op: ClassVar[str] = "sm_budget"
    keys: ClassVar[tuple[str, ...]] = ("stream", "sms")

    stream: str
    sms: int

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], *, where: str) -> Self:
        """Read `{"op": "sm_budget", "stream": "ep", "sms": 20}`."""
        refuse_unknown_keys(entry, cls.keys, where=where, op=cls.op)
        stream = read_name(entry.get("stream"), where=where, name="sm_budget.stream")
        if stream == COMPUTE:
            raise StrategyError(
                where=where, field="sm_budget.stream", value=stream,
                rule="is the stream of the kernels that take what is left",
                fix="name the stream of a collective, such as ep",
            )  # fmt: skip
        sms = read_whole_number(entry.get("sms"), where=where, name="sm_budget.sms")
        return cls(stream=stream, sms=sms, where=where)

    def apply(self, graph: Graph) -> Graph:
        """State the budget of the stream."""
        return state_rule(graph, self.stream, sms=self.sms, where=self.where, op=self.op)
