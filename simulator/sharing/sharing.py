"""`Sharing`: what each priced thing holds of links, processors and memory bandwidth while it runs alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharing:
    """Demands by row of the price table (the last row is free: nothing to do), and facts about streams.

    Replicas are folded: all ranks of a device plan do the same at once, so that links which all flows load
    alike are one link here, and links that cannot be full are left out.

    Args:
        latency_ns: int64 [prices], communication: how long no bytes flow.
        growth: float64 [prices], one over the fraction that the flow takes of its busiest link; 0: no
            link.
        link_starts: int64 [prices + 1], the entries of each row in `links` and `uses`.
        links: int64 [entries], numbers of links.
        uses: float64 [entries], fraction of the link's capacity that the flow takes at full speed.
        link_names: what each link is, for people.
        memory: float64 [prices], fraction of a device's memory bandwidth: of communication while on the wire
            at full speed, of computation while it is bound by memory.
        processor_part, memory_part: float64 [prices], computation: the parts of its time alone that each
            bounds.
        processors: int64 [tasks], what a communication holds on its device.
        priority: int64 [streams], higher wins.
        num_processors: of every device.
        by_cores: computations flow over a link, the cores of a host; [Note: shared cores] in `demands`.
    """

    latency_ns: Ints
    growth: Floats
    link_starts: Ints
    links: Ints
    uses: Floats
    link_names: tuple[str, ...]
    memory: Floats
    processor_part: Floats
    memory_part: Floats
    processors: Ints
    priority: Ints
    num_processors: int
    by_cores: bool = False

    @property
    def num_links(self) -> int:
        """Return how many links may be full."""
        return len(self.link_names)
