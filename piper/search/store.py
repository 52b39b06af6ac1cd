"""What a search has simulated, in an SQLite file, so that an interrupted one goes on where it was.

[Note: how a search is resumed]
A search is a sequence of rounds that depends on nothing but the job, the request and the results of its
simulations. So results are all that is kept: resumed, the same rounds come again, and those that are known
take no time. The answer is that of a search that was never interrupted.

[Note: what a result belongs to]
Its job: model, hardware and training, with the content of the files that they name, and the source of these
packages. Pins, limits and objectives only decide which strategies of the job are asked for: another search of
the same job finds them here as well. A result is one transaction: a process that is killed leaves whole ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from piper.errors import JobError
from piper.predict import Job

_SCHEMA_VERSION = 1
_TABLES = """
create table if not exists searches (job text primary key, described text not null);
create table if not exists results (
    job text not null, strategy text not null, result text not null, primary key (job, strategy)
);
"""
_SOURCES = ("piper", "simulator", "cost_models")
"""Packages, beside each other, whose source decides a result."""
_SUFFIXES = ("*.py", "*.yaml")
_NOT_THE_JOB = frozenset({"strategy"})


class ResultStore:
    """Results of one job in an SQLite file; see [Note: what a result belongs to].

    Args:
        path: the file; made if it does not exist.
        job: whose results these are.
        resume: go on with what the file has of the job; else it is forgotten.

    Raises: JobError for a file that cannot be used, and where there is nothing of the job to resume.
    """

    def __init__(self, path: Path, *, job: Job, resume: bool) -> None:
        self.path = path
        self._job = job_key(job)
        if resume and not path.is_file():
            raise _nothing_to_resume(path, "is not there")
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, timeout=60)
            self._open(described=_described(job), resume=resume)
        except sqlite3.Error as problem:
            raise JobError(
                where=str(path), field="--db", value=path.name, rule=f"cannot be used: {problem}",
                fix="name a file of an earlier search, or one that does not exist yet",
            ) from problem  # fmt: skip

    def _open(self, *, described: str, resume: bool) -> None:
        version = self._connection.execute("pragma user_version").fetchone()[0]
        if version not in {0, _SCHEMA_VERSION}:
            raise sqlite3.DatabaseError(f"it has schema version {version}, not {_SCHEMA_VERSION}")
        self._connection.execute("pragma journal_mode=wal")
        self._connection.executescript(_TABLES)
        self._connection.execute(f"pragma user_version={_SCHEMA_VERSION}")
        known = self._connection.execute("select 1 from searches where job = ?", (self._job,)).fetchone()
        if resume and known is None:
            raise _nothing_to_resume(self.path, self._difference(described))
        if not resume:
            self._connection.execute("delete from results where job = ?", (self._job,))
        self._connection.execute("insert or ignore into searches values (?, ?)", (self._job, described))

    def _difference(self, described: str) -> str:
        """Say in what this job differs from the last one of the file."""
        last = self._connection.execute("select described from searches order by rowid desc").fetchone()
        if last is None:
            return "holds no search"
        before, now = json.loads(last[0]), json.loads(described)
        changed = [name for name in now if before.get(name) != now[name]]
        shown = ", ".join(f"{name} was {before.get(name)} and is {now[name]}" for name in changed[:3])
        return f"holds another job: {shown or 'files or the program have changed'}"

    def known(self) -> dict[str, dict[str, Any]]:
        """Return the results by strategy."""
        rows = self._connection.execute("select strategy, result from results where job = ?", (self._job,))
        return {strategy: json.loads(result) for strategy, result in rows}

    def keep(self, strategy: str, result: Mapping[str, Any]) -> None:
        """Write one result; it is there when this returns."""
        row = (self._job, strategy, json.dumps(result))
        self._connection.execute("insert or replace into results values (?, ?, ?)", row)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def job_key(job: Job) -> str:
    """Return a hash of all that decides the results of a job; see [Note: what a result belongs to]."""
    digest = hashlib.sha256(_sources())
    for name, value in _stated(job):
        digest.update(f"{name}={value!r}\0".encode())
        if isinstance(value, str):
            digest.update(_content(value))
    return digest.hexdigest()


def _described(job: Job) -> str:
    return json.dumps({name: str(value) for name, value in _stated(job)})


def _stated(job: Job) -> Iterable[tuple[str, object]]:
    return ((f.name, getattr(job, f.name)) for f in fields(job) if f.name not in _NOT_THE_JOB)


def _content(text: str) -> bytes:
    """Return a hash of the file that a text names: a path, a folder of a config.json, a module:factory."""
    module, colon, _ = text.partition(":")
    paths = [Path(text), Path(text) / "config.json"]
    if colon:
        with suppress(ImportError, ValueError, AttributeError):
            found = importlib.util.find_spec(module)
            if found is not None and found.origin is not None:
                paths.append(Path(found.origin))
    for path in paths:
        with suppress(OSError, ValueError):
            if path.is_file():
                return hashlib.sha256(path.read_bytes()).digest()
    return b""


@cache
def _sources() -> bytes:
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for package in _SOURCES:
        for suffix in _SUFFIXES:
            for file in sorted((root / package).rglob(suffix)):
                digest.update(file.read_bytes())
    return digest.digest()


def _nothing_to_resume(path: Path, why: str) -> JobError:
    return JobError(
        where=str(path), field="--resume", value=path.name, rule=f"has nothing to go on with: it {why}",
        fix="leave --resume out, or give the options of the search that was interrupted",
    )  # fmt: skip
