"""The shortest cycle of a directed graph: what is left to show when nothing can start.

[Note: cycle search]
What no cycle passes through is trimmed from both sides first. Every cycle contains an edge that closes a
circle of a depth-first search, so a breadth-first search from each such edge, cut off at the length found
so far, meets the shortest cycle. Work is bounded: beyond `_MOST_STEPS` edges, the shortest found by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_MOST_STEPS = 5_000_000
"""Edges that are looked at; enough for the full answer on cycles that compilers and people produce."""


@dataclass(kw_only=True, eq=False)
class Digraph:
    """A directed graph on the nodes 0..count-1.

    Args:
        count: number of nodes.
        sources, targets: int64 [edges].
    """

    count: int
    sources: Indices
    targets: Indices
    _starts: list[int] = field(init=False)
    _flat: list[int] = field(init=False)
    _steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        order = np.argsort(self.sources, kind="stable")
        starts = np.searchsorted(self.sources[order], np.arange(self.count + 1))
        self._starts, self._flat = starts.tolist(), self.targets[order].tolist()

    def unsorted(self) -> Indices:
        """Return the nodes that no topological order can place: on a cycle or after one."""
        missing = np.bincount(self.targets, minlength=self.count).tolist()
        ready = [node for node, count in enumerate(missing) if not count]
        starts, flat = self._starts, self._flat
        for node in ready:
            for after in flat[starts[node] : starts[node + 1]]:
                missing[after] -= 1
                if not missing[after]:
                    ready.append(after)
        return np.flatnonzero(np.array(missing, dtype=np.int64))

    def shortest_cycle(self) -> list[int]:
        """Return the nodes of a shortest cycle in order, each with an edge to the next; none: nothing."""
        core = self._core()
        best: list[int] = []
        for source, target in sorted(core._closing_edges()):
            limit = len(best) - 1 if best else core.count
            path = core._path(target, source, limit=limit)
            if path and (not best or len(path) < len(best)):
                best = path
            if core._steps > _MOST_STEPS:
                break
        return best

    def _core(self) -> Digraph:
        """Return the graph of the edges that may be on a cycle."""
        reverse = Digraph(count=self.count, sources=self.targets, targets=self.sources)
        kept = np.zeros(self.count, dtype=np.bool_)
        kept[np.intersect1d(self.unsorted(), reverse.unsorted())] = True
        edges = kept[self.sources] & kept[self.targets]
        return Digraph(count=self.count, sources=self.sources[edges], targets=self.targets[edges])

    def _closing_edges(self) -> Iterator[tuple[int, int]]:
        """Yield the edges that lead back to a node on the path of a depth-first search."""
        state = bytearray(self.count)
        starts, flat = self._starts, self._flat
        for root in np.unique(self.sources).tolist():
            if state[root]:
                continue
            state[root] = 1
            path, places = [root], [starts[root]]
            while path:
                node, place = path[-1], places[-1]
                if place == starts[node + 1]:
                    state[node] = 2
                    path.pop()
                    places.pop()
                    continue
                places[-1] += 1
                after = flat[place]
                if state[after] == 1:
                    yield node, after
                elif not state[after]:
                    state[after] = 1
                    path.append(after)
                    places.append(starts[after])

    def _path(self, start: int, end: int, *, limit: int) -> list[int]:
        """Return the nodes of a shortest path of at most `limit` nodes, or nothing."""
        came_from, queue = {start: start}, deque([(start, 1)])
        while queue and end not in came_from:
            node, length = queue.popleft()
            if length == limit:
                break
            after = self._flat[self._starts[node] : self._starts[node + 1]]
            self._steps += len(after)
            for other in after:
                if other not in came_from:
                    came_from[other] = node
                    queue.append((other, length + 1))
        if end not in came_from:
            return []
        path = [end]
        while path[-1] != start:
            path.append(came_from[path[-1]])
        return path[::-1]
