"""Tables of measured communication -> `Measured`: a CSV file beside the cluster's, or a mapping in it."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from cost_models.documents import UnreadableError, read_text
from cost_models.errors import CostModelError
from cost_models.measured import Measured, Series
from cost_models.price import CollectiveKind
from cost_models.units import Dimension, parse_quantity
from cost_models.yaml_file import Section

COLUMNS = ("op", "nodes", "gpus_per_node", "bytes", "time_us")
TRANSFER = "transfer"
FILE = "file"
OPERATIONS = (*(kind.value for kind in CollectiveKind if kind is not CollectiveKind.RING_SHIFT), TRANSFER)

_MICRO = 1e-6
_LAYOUT_FIX = "name the group by its GPUs inside a node (8), or nodes x GPUs on each (2x8)"

Point = tuple[str, tuple[int, int], float, float]
"""Operation, (nodes, GPUs on each), bytes, seconds."""


def read_table(section: Section, *, several_nodes: bool) -> dict[str, Measured]:
    """Return what `table` of a section holds, by operation; sizes as in `CollectiveKind`.

    Args:
        section: of a cluster, with `table` and `table_error` if it has measurements.
        several_nodes: groups over nodes, else inside one; a file may have both.
    Raises: CostModelError for a missing or broken file, an unknown operation or group, times or sizes that
        are no numbers > 0, a size given twice.
    """
    if "table" not in section:
        return {}
    field = f"{section.path}.table"
    table = section.mapping("table")
    series: dict[str, dict[tuple[int, int], Series]] = defaultdict(dict)
    of_file = _of_file(Path(table.pop(FILE))) if FILE in table else iter(())
    for points in (of_file, _of_mapping(table, where=section.where, field=field)):
        for (op, group), times in _grouped(points, where=section.where, field=field).items():
            if (group[0] > 1) is several_nodes:
                series[op][group] = _series(times)
    error = section.error("table_error")
    return {op: Measured(series=groups, error=error) for op, groups in series.items()}


def with_table_beside(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of the file `path` with the CSV files of its tables found beside it.

    `table: F.csv` becomes `table: {file: F.csv}`, to which a file that extends it can add groups.
    """
    found = dict(content)
    for name, section in content.items():
        if isinstance(section, dict) and "table" in section:
            table = section["table"]
            table = {FILE: table} if isinstance(table, str) else table
            if isinstance(table, dict) and isinstance(table.get(FILE), str):
                table = {**table, FILE: str(path.parent / table[FILE])}
            found[name] = {**section, "table": table}
    return found


def with_tables_inside(content: dict[str, Any], *, slower: float = 1.0) -> dict[str, Any]:
    """Return the content of a cluster's file with its tables as mappings, so that it needs no other file.

    `slower`: how many times as long everything in them takes.
    """
    found = dict(content)
    for name, section in content.items():
        if isinstance(section, dict) and isinstance(section.get("table"), dict):
            found[name] = {**section, "table": _as_mapping(section["table"], slower=slower)}
    return found


def _as_mapping(table: Mapping[str, Any], *, slower: float) -> dict[str, Any]:
    points = [*_of_file(Path(table[FILE]))] if FILE in table else []
    rest = {name: groups for name, groups in table.items() if name != FILE}
    points += _of_mapping(rest, where="table", field="table")
    found: dict[str, Any] = {}
    for op, (nodes, members), size, seconds in points:
        group = str(members) if nodes == 1 else f"{nodes}x{members}"
        times = found.setdefault(op, {}).setdefault(group, {})
        times[f"{size:g}B" if size == int(size) else size] = f"{seconds * slower / _MICRO:.6g}us"
    return found


def _grouped(
    points: Iterator[Point], *, where: str, field: str
) -> dict[tuple[str, tuple[int, int]], dict[float, float]]:
    found: dict[tuple[str, tuple[int, int]], dict[float, float]] = defaultdict(dict)
    for op, group, size, seconds in points:
        if size in found[op, group]:
            raise _error(
                where, f"{field}.{op}", size, rule="is given twice", fix="keep one time of each size"
            )
        found[op, group][size] = seconds
    return found


def falls(series: Series) -> list[tuple[float, float]]:
    """Return the neighbouring sizes of which the larger one takes less time."""
    points = pairwise(zip(series.sizes_bytes, series.seconds, strict=True))
    return [(size, more) for (size, before), (more, after) in points if after < before]


def _series(times: Mapping[float, float]) -> Series:
    ordered = sorted(times.items())
    return Series(
        sizes_bytes=tuple(size for size, _ in ordered), seconds=tuple(seconds for _, seconds in ordered)
    )


def _of_file(path: Path) -> Iterator[Point]:
    try:
        rows = csv.DictReader(io.StringIO(read_text(path)))
    except UnreadableError as problem:
        fix = f"give a CSV file with the columns {', '.join(COLUMNS)}, beside the file of the cluster"
        raise _error(problem.place(str(path)), "table", str(path), rule=problem.rule, fix=fix) from None
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        fix = f"write the columns {', '.join(COLUMNS)}"
        raise _error(str(path), "columns", rows.fieldnames, rule=f"lack {', '.join(missing)}", fix=fix)
    for row in rows:
        where = f"{path}:{rows.line_num}"
        nodes, members, size, time_us = (_number(row, name, where=where) for name in COLUMNS[1:])
        op = _operation(row["op"], where=where, field="op")
        yield op, (round(nodes), round(members)), size, time_us * _MICRO


def _number(row: Mapping[str, Any], name: str, *, where: str) -> float:
    try:
        number = float(row[name] or "")
    except ValueError:
        number = math.nan
    if not 0 < number < float("inf"):
        raise _error(where, name, row[name], rule="must be a number > 0", fix="leave the row out or mend it")
    return number


def _of_mapping(table: Mapping[str, Any], *, where: str, field: str) -> Iterator[Point]:
    for op, groups in table.items():
        name = f"{field}.{op}"
        _operation(op, where=where, field=name)
        for group, times in _mapping(groups, where=where, field=name).items():
            of = f"{name}.{group}"
            layout = _layout(group, where=where, field=name)
            for size, time in _mapping(times, where=where, field=of).items():
                yield (
                    op,
                    layout,
                    parse_quantity(size, Dimension.BYTES, where=where, field=of),
                    parse_quantity(time, Dimension.SECONDS, where=where, field=f"{of}.{size}"),
                )


def _mapping(value: Any, *, where: str, field: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        fix = "write op: {8: {1MiB: 33us, 2MiB: 40us}}"
        raise _error(where, field, value, rule="must be a mapping", fix=fix)
    return value


def _operation(op: str, *, where: str, field: str) -> str:
    if op not in OPERATIONS:
        raise _error(where, field, op, rule="is no operation", fix=f"known: {', '.join(OPERATIONS)}")
    return op


def _layout(group: Any, *, where: str, field: str) -> tuple[int, int]:
    parts = [part.strip() for part in str(group).lower().split("x")]
    numbers = [int(part) for part in parts if part.isdecimal()]
    match numbers if len(numbers) == len(parts) else []:
        case [members] if members > 1:
            return 1, members
        case [nodes, members] if nodes >= 1 and members >= 1 and nodes * members > 1:
            return nodes, members
    raise _error(where, field, group, rule="is no group of ranks", fix=_LAYOUT_FIX)


def _error(where: str, field: str, value: object, *, rule: str, fix: str) -> CostModelError:
    return CostModelError(where=where, field=field, value=value, rule=rule, fix=fix)
