"""What directives state about streams, by the numbers of one device's streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from piper.graph import Graph
from simulator.plan import StreamRuleFacts

_TRANSFERS = "pp"
"""What rules call the streams of transfers; the graph may have another name for them too."""
_SENDS_AND_RECEIVES = ("send_", "recv_")


def stream_rules(graph: Graph, streams: Mapping[str, int]) -> tuple[StreamRuleFacts, ...]:
    """Return one rule for each stream about which something is stated; what a device lacks is left out.

    Args:
        graph: with the rules.
        streams: number of each stream of the device by name.
    """
    found: dict[int, StreamRuleFacts] = {}
    for rule in graph.stream_rules:
        transfers = rule.stream in {_TRANSFERS, graph.transfer_stream}
        for name, number in streams.items():
            moves = name == _TRANSFERS or name.startswith(_SENDS_AND_RECEIVES)
            if name == rule.stream or (transfers and moves):
                known = found.setdefault(number, StreamRuleFacts(stream=number))
                stated = {"priority": rule.priority, "sms": rule.sms}
                found[number] = replace(known, **{k: v for k, v in stated.items() if v is not None})
    return tuple(found[number] for number in sorted(found))
