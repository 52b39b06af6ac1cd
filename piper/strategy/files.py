"""Strategy files: a JSON or YAML list of directives <-> typed directives with file and line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_models.errors import nearest
from piper.directives import DIRECTIVES, LATER
from piper.errors import StrategyError
from piper.graph.directive import Directive, not_yet

LARGEST_FILE_BYTES = 64 * 2**20


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
    if name in LATER:
        raise not_yet(where, "op", name, instead=f"available: {', '.join(DIRECTIVES)}")
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
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise StrategyError(
                where=str(path), field="size", value=path.stat().st_size, rule="is too large for a strategy",
                fix="a strategy is a list of directives; is this the right file?",
            )  # fmt: skip
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise StrategyError(
            where=str(path), field="file", value=str(path), rule="does not exist", fix="check the path"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise StrategyError(
            where=str(path),
            field="file",
            value=str(error),
            rule="cannot be read",
            fix="give a readable text file",
        ) from error
    return _parse_json(path, text) if path.suffix == ".json" else _parse_yaml(path, text)


def _parse_json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise StrategyError(
            where=f"{path}:{error.lineno}:{error.colno}",
            field="JSON",
            value=error.msg,
            rule="is broken here",
            fix="mend the JSON at this line and column",
        ) from error


def _parse_yaml(path: Path, text: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise StrategyError(
            where=place,
            field="YAML",
            value=error.problem,
            rule="is broken here",
            fix="mend the YAML at this place",
        ) from error
    except YAMLError as error:
        raise StrategyError(
            where=str(path), field="YAML", value=str(error), rule="is broken", fix="mend the YAML"
        ) from error


def _lines(path: Path, entries: Sequence[object]) -> list[int]:
    """Return the line of each top-level entry (YAML positions; JSON is YAML)."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        node = YAML(typ="safe", pure=True).compose(path.read_text(encoding="utf-8"))
    except YAMLError:
        return [1] * len(entries)
    return [child.start_mark.line + 1 for child in node.value]
