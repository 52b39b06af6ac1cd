"""What directives can state but the passes do not realise yet: refused here, by name, and nowhere else.

Whoever realises a fact deletes its line.
"""

from __future__ import annotations

from collections.abc import Iterator

from piper.errors import StrategyError
from piper.graph import Graph

_Missing = tuple[str, str, object, str]
"""File and line, field, value, fix."""


def require_compilable(graph: Graph) -> None:
    """Raise StrategyError for the first statement of a directive that the passes would not follow."""
    for where, field, value, fix in _missing(graph):
        raise StrategyError(
            where=where, field=field, value=value, rule="is not available in this version", fix=fix
        )


def _missing(graph: Graph) -> Iterator[_Missing]:
    for mesh in graph.stage_meshes:
        yield mesh.where, "mesh.filter", dict(mesh.axes), "use one mesh for all stages"
