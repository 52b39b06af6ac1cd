"""The CSV form of torch.distributed.pipelining: one line per pipeline rank, one cell per task.

`0F0`, `7I1` (our BI), `7W1` (BW), `7B3`, `(0F7;7B3)OVERLAP_F_B`, `0SEND_F0`, `4RECV_B0`; empty cells are idle
slots, and `0UNSHARD`, `0RESHARD`, `3REDUCE_GRAD` follow from the strategy here: all of these are left out.
"""

from __future__ import annotations

import csv
import io
import re

from piper.errors import StrategyError
from piper.schedules.entries import LISTED_KINDS, NOT_KEPT, PASS_LETTERS, Entries, Entry, Transfer
from simulator.plan.task import TaskKind, TaskName

_CELL = re.compile(r"(?P<stage>\d{1,9})(?P<kind>[A-Z]+(?:_[A-Z]+)?)(?P<microbatch>\d{0,9})")
_OVERLAP = re.compile(r"\((?P<parts>[^()]+)\)OVERLAP_F_B")
_LETTERS = {TaskKind.BI: "I", TaskKind.BW: "W"}


def read(text: str, *, where: str) -> Entries:
    """Return what the lines list; blank lines at the end are no ranks.

    Raises: StrategyError with file:line and the number of the cell (from 1) that is no task.
    """
    lines: list[tuple[Entry, ...]] = []
    reader = csv.reader(io.StringIO(text))
    try:
        for cells in reader:
            place = f"{where}:{reader.line_num}"
            found = (
                _entry(cell.strip(), reader.line_num, where=place, field=f"cell {number}")
                for number, cell in enumerate(cells, 1)
                if cell.strip()
            )
            lines.append(tuple(entry for entry in found if entry is not None))
    except csv.Error as error:
        place = f"{where}:{reader.line_num}"
        raise _bad_cell(str(error), where=place, field="line", rule="is no CSV") from error
    while lines and not lines[-1]:
        lines.pop()
    return tuple(lines)


def write(entries: Entries) -> str:
    """Return the lines of entries: the inverse of `read`."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for row in entries:
        writer.writerow([cell for entry in row for cell in _cells(entry)])
    return stream.getvalue()


def _cells(entry: Entry) -> list[str]:
    cells = [_cell(task) for task in entry.passes]
    if len(cells) > 1:
        cells = [f"({';'.join(cells)})OVERLAP_F_B"]
    return cells + [transfer.task.code for transfer in entry.transfers]


def _cell(task: TaskName) -> str:
    return f"{task.stage}{_LETTERS.get(task.kind, task.kind.name)}{task.microbatch}"


def _entry(cell: str, line: int, *, where: str, field: str) -> Entry | None:
    """Return what a cell says, or None for what is not kept."""
    overlap = _OVERLAP.fullmatch(cell)
    parts = overlap["parts"].split(";") if overlap else [cell]
    tasks = [_task(part.strip(), cell, where=where, field=field) for part in parts]
    kept = tuple(task for task in tasks if task is not None)
    passes = tuple(task for task in kept if task.kind in PASS_LETTERS.values())
    if overlap:
        if len(passes) != len(parts):
            raise _bad_cell(cell, where=where, field=field, rule="may overlap passes only")
        return Entry(passes=passes, line=line)
    if passes or not kept:
        return Entry(passes=passes, line=line) if passes else None
    return Entry(transfers=(Transfer(task=kept[0]),), line=line)


def _task(part: str, cell: str, *, where: str, field: str) -> TaskName | None:
    match = _CELL.fullmatch(part)
    kind = match["kind"] if match else ""
    if match is None or (kind not in LISTED_KINDS and kind not in NOT_KEPT):
        raise _bad_cell(cell, where=where, field=field, rule="must be stage, task and microbatch")
    if kind in NOT_KEPT:
        return None
    if not match["microbatch"]:
        raise _bad_cell(cell, where=where, field=field, rule="has no microbatch")
    return TaskName(kind=LISTED_KINDS[kind], stage=int(match["stage"]), microbatch=int(match["microbatch"]))


def _bad_cell(cell: str, *, where: str, field: str, rule: str) -> StrategyError:
    return StrategyError(
        where=where, field=field, value=cell, rule=rule,
        fix="write for example 2F0, 7I1, 7W1, 7B3, 0SEND_F0, 4RECV_B0 or (0F7;7B3)OVERLAP_F_B",
    )  # fmt: skip
