"""Strategy files: a JSON or YAML list of directives <-> typed directives with file and line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_models.documents import UnreadableError, parse_json, parse_yaml, read_text
from cost_models.errors import nearest
from piper.directives import DIRECTIVES
from piper.errors import StrategyError
from piper.graph.directive import Directive

LARGEST_FILE_CHARACTERS = 64 * 2**20


def read_directives(path: Path) -> tuple[Directive, ...]:
    """Read a strategy file; raises StrategyError with file, line and field."""
    entries = _load(path)
    if not isinstance(entries, list) or not entries:
        raise StrategyError(
            where=str(path), field="strategy", value=type(entries).__name__, rule="must be a non-empty list",
            fix='write [{"op": "mesh", ...}, ...]',
        )  # fmt: skip
    lines = _lines(path, entries)
    return tuple(
        parse_directive(entry, where=f"{path}:{line}") for entry, line in zip(entries, lines, strict=True)
    )


def parse_directive(entry: object, *, where: str) -> Directive:
    """Turn one object of a strategy into a directive."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("op"), str):
        raise StrategyError(
            where=where, field="op", value=entry, rule="must be an object with op",
            fix='write {"op": "place", ...}',
        )  # fmt: skip
    name = entry["op"]
    if name not in DIRECTIVES:
        raise StrategyError(
            where=where, field="op", value=name, rule="is not a directive", fix=nearest(name, DIRECTIVES)
        )
    return DIRECTIVES[name].from_json(entry, where=where)


def write_directives(directives: Sequence[Mapping[str, Any]]) -> str:
    """Return the JSON text of a strategy file, one directive per line."""
    return "[\n" + ",\n".join("  " + json.dumps(d) for d in directives) + "\n]\n"


def _load(path: Path) -> Any:
    try:
        text = read_text(path)
        if len(text) > LARGEST_FILE_CHARACTERS:
            raise UnreadableError("is too large for a strategy, which is a list of directives")
        return parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except UnreadableError as problem:
        fix = "check the path" if problem.missing else "give a readable list of directives in JSON or YAML"
        raise StrategyError(
            where=problem.place(str(path)), field="file", value=str(path), rule=problem.rule, fix=fix
        ) from problem


def _lines(path: Path, entries: Sequence[object]) -> list[int]:
    """Return the line of each top-level entry (YAML positions; JSON is YAML)."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        node = YAML(typ="safe", pure=True).compose(read_text(path))
    except (YAMLError, RecursionError):
        return [1] * len(entries)
    return [child.start_mark.line + 1 for child in node.value]
