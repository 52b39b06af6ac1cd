"""The CSV table of a schedule: a header, then one task per line.

`rank,order,op,stage,microbatch,peer`: op is F, B, BI, BW, SEND_F, RECV_F, SEND_B or RECV_B; peer is the
rank at the other end of a transfer, and may be empty. Tasks of a rank with the same order start together:
passes that overlap, or transfers of one group. Without a column `order` the lines are in order. Transfers may
also be `send` and `recv` with a peer and a column `tensor` in place of stage and microbatch.
A column `slot` in place of `order` says when a pass runs, in slots that take one pass each: a timetable.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import replace

from cost_models.errors import nearest, whole_number
from piper.errors import StrategyError
from piper.schedules.entries import LISTED_KINDS, NOT_KEPT, TRANSFER_KINDS, Entries, Entry, Transfer
from simulator.plan.task import NONE, TaskKind, TaskName

COLUMNS = ("rank", "order", "op", "stage", "microbatch", "peer", "tensor", "slot")
_TENSOR_KINDS = {"SEND": TaskKind.SEND_F, "RECV": TaskKind.RECV_F}
_OPS = (*LISTED_KINDS, *NOT_KEPT, *_TENSOR_KINDS)
_MOST = 10**9
_MOST_RANKS = 2**20


def is_table(text: str) -> bool:
    """Tell whether the first line is a header of this form."""
    first = text.lstrip().partition("\n")[0]
    return "rank" in (name.strip().lower() for name in first.split(","))


def read(text: str, *, where: str) -> Entries:
    """Return what the lines list.

    Raises: StrategyError with file:line, column and value of what is no task.
    """
    ranks: dict[int, dict[int, Entry]] = {}
    for number, line in enumerate(_lines(text, where), 1):
        rank, order, entry = line
        listed = ranks.setdefault(rank, {})
        position = number if order is None else order
        if position in listed:
            entry = _together(listed[position], entry, where=f"{where}:{entry.line}", order=position)
        listed[position] = entry
    return tuple(
        tuple(entry for _, entry in sorted(ranks.get(rank, {}).items()) if entry.passes or entry.transfers)
        for rank in range(1 + max(ranks, default=-1))
    )


def write(entries: Entries) -> str:
    """Return the table of entries: the inverse of `read`."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS[:-2])
    for rank, row in enumerate(entries):
        for order, entry in enumerate(row):
            for task in entry.passes:
                writer.writerow([rank, order, task.kind.name, task.stage, task.microbatch, ""])
            for transfer in entry.transfers:
                task, peer = transfer.task, "" if transfer.peer == NONE else transfer.peer
                writer.writerow([rank, order, task.kind.name, task.stage, task.microbatch, peer])
    return stream.getvalue()


def _lines(text: str, where: str) -> Iterator[tuple[int, int | None, Entry]]:
    """Yield rank, order (None: that of the lines) and entry of each line."""
    reader = csv.reader(io.StringIO(text))
    header: list[str] = []
    try:
        for cells in reader:
            place = f"{where}:{reader.line_num}"
            stripped = [cell.strip() for cell in cells]
            if not any(stripped):
                continue
            if not header:
                header = _header(stripped, where=place)
                continue
            if len(stripped) != len(header):
                raise _bad(
                    place,
                    "line",
                    ",".join(cells),
                    rule=f"has {len(cells)} values for {len(header)} columns",
                )
            values = dict(zip(header, stripped, strict=True))
            rank = _number(values, "rank", where=place, most=_MOST_RANKS)
            when = next((name for name in ("slot", "order") if name in values), None)
            order = None if when is None else _number(values, when, where=place)
            entry = _entry(values, rank, line=reader.line_num, where=place)
            if when == "slot" and order is not None:
                entry = replace(entry, slot=order)
            yield rank, order, entry
    except csv.Error as error:
        raise _bad(f"{where}:{reader.line_num}", "line", str(error), rule="is no CSV") from error


def _header(names: list[str], *, where: str) -> list[str]:
    names = [name.lower() for name in names]
    for name in names:
        if name not in COLUMNS or names.count(name) > 1:
            rule = "is not known" if name not in COLUMNS else "is given twice"
            raise StrategyError(
                where=where, field="column", value=name, rule=rule, fix=nearest(name, COLUMNS)
            )
    for name in ("rank", "op"):
        if name not in names:
            raise _bad(where, "columns", ",".join(names), rule=f"must have {name}")
    if {"slot", "order"} <= set(names):
        raise _bad(where, "columns", ",".join(names), rule="must have only one of order and slot")
    return names


def _entry(values: Mapping[str, str], rank: int, *, line: int, where: str) -> Entry:
    op = values["op"].upper()
    if op not in _OPS:
        raise StrategyError(
            where=where, field="op", value=values["op"], rule="is not known", fix=nearest(op, _OPS)
        )
    if op in NOT_KEPT:
        return Entry(line=line)
    peer = NONE
    if values.get("peer"):
        peer = _number(values, "peer", where=where, most=_MOST_RANKS)
        if peer == rank:
            raise _bad(where, "peer", peer, rule="is the rank itself")
    if op in _TENSOR_KINDS:
        if not values.get("tensor") or peer == NONE:
            missing = "peer" if values.get("tensor") else "tensor"
            raise _bad(where, missing, "", rule=f"must be given for {op}")
        task = TaskName(kind=_TENSOR_KINDS[op])
        return Entry(transfers=(Transfer(task=task, peer=peer, tensor=values["tensor"]),), line=line)
    stage, microbatch = (_number(values, name, where=where) for name in ("stage", "microbatch"))
    task = TaskName(kind=LISTED_KINDS[op], stage=stage, microbatch=microbatch)
    if op in TRANSFER_KINDS:
        return Entry(transfers=(Transfer(task=task, peer=peer),), line=line)
    return Entry(passes=(task,), line=line)


def _together(first: Entry, second: Entry, *, where: str, order: int) -> Entry:
    """Return one entry of two with the same order."""
    if bool(first.passes) is not bool(second.passes):
        raise _bad(where, "order", order, rule="joins a pass and a transfer, which cannot start together")
    return Entry(
        passes=first.passes + second.passes, transfers=first.transfers + second.transfers, line=first.line,
        slot=first.slot,
    )  # fmt: skip


def _number(values: Mapping[str, str], name: str, *, where: str, most: int = _MOST) -> int:
    text = values.get(name, "")
    number = whole_number(text)
    if number is None or not 0 <= number < most:
        raise _bad(where, name, text, rule=f"must be a whole number from 0 to {most - 1}")
    return number


def _bad(where: str, field: str, value: object, *, rule: str) -> StrategyError:
    return StrategyError(
        where=where, field=field, value=value, rule=rule,
        fix="write the header rank,order,op,stage,microbatch,peer and lines such as 0,3,SEND_F,0,2,1",
    )  # fmt: skip
