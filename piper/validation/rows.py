"""A CSV file of published runs -> rows with typed fields."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cost_models.errors import nearest
from piper.errors import JobError

NEEDED = (
    "case_id", "model", "layers", "hidden", "heads", "gpu", "n_gpus", "tp", "pp", "cp", "dp",
)  # fmt: skip
"""Columns that a file must have (CONTRACT)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published run. Text "" and None: the source does not say.

    Args:
        file: stem of the file, the name of the source in scores.
        texts: every column as it was read.
    """

    file: str
    texts: Mapping[str, str]

    def text(self, name: str) -> str:
        """Return a column, "" where it is missing or empty."""
        return self.texts.get(name, "").strip()

    def number(self, name: str) -> float | None:
        """Return a column as a number > 0, or None; raises JobError for what is none."""
        text = self.text(name)
        if not text:
            return None
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not found > 0:
            raise JobError(
                where=f"row {self.case_id}", field=name, value=text, rule="is not a number above 0",
                fix="correct the row, or leave the column empty",
            )  # fmt: skip
        return found

    def integer(self, name: str) -> int | None:
        """Return a column as a whole number >= 1, or None; raises JobError for what is none."""
        found = self.number(name)
        if found is None:
            return None
        if found != int(found):
            raise JobError(
                where=f"row {self.case_id}", field=name, value=self.text(name), rule="is not a whole number",
                fix="correct the row, or leave the column empty",
            )  # fmt: skip
        return int(found)

    @property
    def case_id(self) -> str:
        """Return the row's name."""
        return self.text("case_id")

    @property
    def seq_len(self) -> int | None:
        """Return the tokens per sequence."""
        return self.integer("seq_len")

    @property
    def oom(self) -> bool:
        """Tell whether the run did not fit."""
        return self.text("oom").lower() == "true"

    @property
    def group(self) -> str:
        """Return what runs have in common that compare layouts (CONTRACT)."""
        names = ("model", "gpu", "n_gpus", "dtype", "seq_len", "global_batch")
        return "|".join([self.file, *(self.text(name) for name in names)])

    @property
    def half(self) -> str:
        """Return the half of the runs to which this one belongs: "a" or "b", by its group."""
        names = ("source", "model", "gpu", "n_gpus", "dtype", "seq_len", "global_batch")
        key = "|".join(self.text(name) for name in names)
        return "b" if hashlib.sha256(key.encode()).digest()[0] >> 7 else "a"


def read_rows(paths: Iterable[str | Path]) -> list[PublishedRow]:
    """Return the rows of all files, in order.

    Raises: JobError for a file that cannot be read, lacks a column, or names a case twice.
    """
    found: list[PublishedRow] = []
    seen: set[str] = set()
    for path in paths:
        for row in _rows_of(Path(path)):
            if row.case_id in seen:
                raise JobError(
                    where=str(path), field="case_id", value=row.case_id, rule="is there twice",
                    fix="give every row a name of its own",
                )  # fmt: skip
            seen.add(row.case_id)
            found.append(row)
    return found


def _rows_of(path: Path) -> list[PublishedRow]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or []
            listed = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise JobError(
            where=str(path), field="file", value=str(path), rule=f"cannot be read: {problem}",
            fix="give a CSV file of published runs",
        ) from problem  # fmt: skip
    for name in NEEDED:
        if name not in header:
            raise JobError(
                where=str(path), field="column", value=name, rule="is missing",
                fix=f"add it (docs/accuracy.md lists the columns); {nearest(name, header)}"
                if header else "give a CSV file with a header",
            )  # fmt: skip
    return [
        PublishedRow(
            file=path.stem, texts={key: value or "" for key, value in row.items() if isinstance(key, str)}
        )
        for row in listed
    ]
