"""Logs of nccl-tests -> a cluster file with the measured times.

[Note: which operation a log is of]
The name of the program is taken from the log ("Collective test starting: ...", a command line) or from the
name of the file. Without it the columns tell: bus over algorithm bandwidth is 2 (n - 1) / n of an all-reduce
and (n - 1) / n of the others, of which only the reduce-scatter names a reduction.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from cost_models import CollectiveKind, load_cluster
from cost_models.documents import UnreadableError, read_text
from cost_models.errors import require_known
from cost_models.price import bus_factor
from cost_models.topology import Cluster
from piper.errors import JobError

COLUMNS = ("out-of-place", "in-place")
PROGRAMS = {
    "all_reduce": CollectiveKind.ALL_REDUCE.value,
    "all_gather": CollectiveKind.ALL_GATHER.value,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER.value,
    "alltoall": CollectiveKind.ALL_TO_ALL.value,
    "sendrecv": "transfer",
}
"""Program (without `_perf`) -> operation of a cluster file."""

_RATIOS = {name: (1.0, 2.0) if name == "all_reduce" else (0.5, 1.0) for name in PROGRAMS} | {
    "sendrecv": (1.0, 1.0)
}
"""Bus over algorithm bandwidth with 2 ranks and with very many."""

_REDUCING = ("all_reduce", "reduce_scatter", "sendrecv")
"""Programs that print a reduction (a send prints one, too)."""

TRANSFER = PROGRAMS["sendrecv"]
DEFAULT_CLUSTER = "dgx-h100"

Key = tuple[str, int, int]
"""Operation, nodes, ranks on each of them."""

LEAST_ERROR = 0.05
"""Sites with the same hardware differ by 1 to 3.5 % in the median of their large messages, more in their
small ones (nccl-tests of H100 from Azure, AWS and others)."""

_SLOWER = 0.7
"""Bus bandwidth that falls below this share of that of a smaller size is said."""

_ROUNDING = 0.02
_PREFIX = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:\s?|\s*\d+: )+")
_NAMES = "all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv"
_PROGRAM = re.compile(rf"(?:({_NAMES})_perf|test starting: ({_NAMES}))", re.IGNORECASE)
_OTHER_PROGRAM = re.compile(r"\b(broadcast|reduce|scatter|gather|hypercube)_perf", re.IGNORECASE)
_FILE_NAME = re.compile(rf"({_NAMES})", re.IGNORECASE)
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s*(.*)$")
_START = re.compile(r"^#\s*(?:nThread|nccl-tests version|Collective test starting)", re.IGNORECASE)
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z][a-z0-9_]*\s")
_ERROR_LINE = re.compile(
    r"(Test NCCL failure|Test CUDA failure|NCCL WARN .*(?:Call to|error)|unhandled \w+ error)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: size in bytes, and by column time (None where it says N/A) and bandwidth."""

    line: int
    size_bytes: int
    redop: str
    times_us: tuple[float | None, float | None]
    bus_gb_per_s: tuple[float, float]
    bus_over_algorithm: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One test: an operation on a group of ranks.

    Args:
        where: file, for errors.
        program: what it says it is, or None.
        hosts: host of each rank.
        device: name of the first one, "" if the log does not say.
        rows: in file order.
    """

    where: str
    program: str | None
    hosts: tuple[str, ...]
    device: str
    rows: tuple[Row, ...]

    @property
    def ratio(self) -> float | None:
        """Return bus over algorithm bandwidth of the last row, the least rounded one."""
        ratios = [row.bus_over_algorithm for row in self.rows if row.bus_over_algorithm is not None]
        return ratios[-1] if ratios else None

    @property
    def group(self) -> tuple[int, int]:
        """Return (nodes, ranks on each of them); raises JobError where nodes have different numbers."""
        counts = Counter(self.hosts)
        if len(set(counts.values())) != 1:
            _refuse(
                self.where,
                "Rank",
                ", ".join(f"{host}: {count}" for host, count in counts.items()),
                rule="has different numbers of ranks on its nodes",
                fix="measure with as many ranks on every node",
            )
        return len(counts), len(self.hosts) // len(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A cluster file made of logs.

    Args:
        text: the YAML.
        cluster: what it extends.
        series: (operation, nodes, ranks on each) -> bytes -> microseconds.
        warnings: what is odd about the measurements.
        notices: what was assumed.
    """

    text: str
    cluster: str
    series: Mapping[Key, Mapping[int, float]]
    warnings: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def facts(self) -> dict[str, object]:
        """Return what `--json` prints of it."""
        return {
            "extends": self.cluster,
            "series": [
                {
                    "op": op, "nodes": nodes, "gpus_per_node": each,
                    "bytes": list(times), "time_us": list(times.values()),
                }
                for (op, nodes, each), times in self.series.items()
            ],
        }  # fmt: skip


def read(
    paths: Sequence[str],
    *,
    name: str,
    cluster: str | None = None,
    column: str = COLUMNS[0],
    op: str | None = None,
) -> Imported:
    """Return the cluster file that logs of nccl-tests make.

    Args:
        paths: the logs, each of one or several tests.
        name: of the cluster.
        cluster: what it extends; None: the catalogue's cluster of the GPU that the logs name.
        column: which times, of `COLUMNS`.
        op: the operation, a program of `PROGRAMS`, where the logs do not say it.
    Raises: JobError for a log without measurements, cut or failed, or whose figures contradict each other.
    """
    require_known(column, COLUMNS, where="command line", field="--column", error=JobError)
    if op is not None:
        require_known(op, [*PROGRAMS], where="command line", field="--op", error=JobError)
    runs = [replace(run, program=op or run.program) for path in paths for run in read_log(path)]
    base = _base(runs, cluster)
    series: dict[Key, dict[int, float]] = defaultdict(dict)
    spread = [LEAST_ERROR]
    warnings: list[str] = []
    for run in runs:
        key = _key(run, base.cluster)
        times = _times(run, column)
        twice = sorted(set(series[key]) & set(times))
        if twice:
            fix = "give one log of each test"
            _refuse(run.where, "size", twice[0], rule=f"of {_title(key)} is measured twice", fix=fix)
        series[key] |= times
        spread += [abs(a / b - 1) for a, b in (row.times_us for row in run.rows) if a and b]
        warnings += [*_other_ranks(run, key), *_slower(run, key, column)]
    ordered = {key: dict(sorted(times.items())) for key, times in sorted(series.items())}
    source = f"nccl-tests, {column}: {', '.join(Path(path).name for path in paths)}"
    lines = [*_head(name, base, source), *_tables(ordered, error=_tenth_largest(spread), source=source)]
    return Imported(
        text="\n".join(lines) + "\n",
        cluster=base.cluster.name,
        series=ordered,
        warnings=tuple(warnings),
        notices=tuple(base.notices),
    )


def read_log(path: str) -> list[Run]:
    """Return the tests of a log; raises JobError as `read`."""
    try:
        lines = read_text(Path(path)).splitlines()
    except UnreadableError as problem:
        _refuse(problem.place(path), "file", path, rule=problem.rule, fix="give a log of nccl-tests")
    stripped = [_PREFIX.sub("", line) for line in lines]
    by_name = _FILE_NAME.search(Path(path).name)
    found = []
    for first, last in _sections(stripped):
        found += _run(path, stripped[first:last], first=first, by_name=by_name.group(1) if by_name else None)
    if not found:
        fix = "give the whole output of all_reduce_perf or another test; did it hang?"
        _refuse(path, "rows", 0, rule="no measurements found", fix=fix)
    return found


def operation(run: Run) -> str:
    """Return the operation of a test; [Note: which operation a log is of]. Raises JobError."""
    ratio, ranks = run.ratio, len(run.hosts)
    if run.program is not None:
        op = PROGRAMS[run.program]
        least, most = _RATIOS[run.program]
        if ratio is not None and not least - _ROUNDING <= ratio <= most + _ROUNDING:
            fix = f"check the log, or name its test with --op ({', '.join(PROGRAMS)})"
            rule = f"cannot be that of {run.program}: {least:g} to {most:g}"
            _refuse(run.where, "busbw / algbw", round(ratio, 4), rule=rule, fix=fix)
        return op
    if ratio is not None and ratio > 1 + _ROUNDING:
        return PROGRAMS["all_reduce"]
    reduces = run.rows[-1].redop != "none"
    fitting = [
        program
        for program, op in PROGRAMS.items()
        if ratio is not None
        and abs(ratio / _factor(op, ranks) - 1) <= _ROUNDING
        and (program in _REDUCING) is reduces
    ]
    if len(fitting) == 1:
        return PROGRAMS[fitting[0]]
    rule = "do not say which test they are of" + (f": {' or '.join(fitting)}" if fitting else "")
    fix = f"name it with --op ({', '.join(PROGRAMS)})"
    raise _refused(run.where, "columns", ratio and round(ratio, 4), rule=rule, fix=fix)


def _sections(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield (first line, line after the last) of each test, counted from 0."""
    first, has_rows = 0, False
    for number, line in enumerate(lines):
        if has_rows and (_START.match(line) or _PROGRAM.search(line)):
            yield first, number
            first, has_rows = number, False
        has_rows = has_rows or _ROW.match(line) is not None
    yield first, len(lines)


def _run(path: str, lines: Sequence[str], *, first: int, by_name: str | None) -> list[Run]:
    hosts: dict[int, str] = {}
    device = ""
    rows = []
    said: str | None = None
    for number, line in enumerate(lines, start=first + 1):
        where = f"{path}:{number}"
        if _ERROR_LINE.search(line):
            fix = "mend the run and measure again"
            _refuse(where, "line", line.strip()[:80], rule="says that the test failed", fix=fix)
        program, other = _PROGRAM.search(line), _OTHER_PROGRAM.search(line)
        if program is not None:
            said = said or _program(program.group(1) or program.group(2))
        elif other is not None:
            _refuse(where, "test", other.group(0), rule="is not imported", fix=f"give {', '.join(PROGRAMS)}")
        rank = _RANK.match(line)
        if rank is not None:
            hosts[int(rank.group(1))] = rank.group(2)
            device = device or rank.group(3).strip()
        elif _ROW.match(line):
            rows.append(_row(line.split(), where=where, line=number))
    if not rows:
        return []
    if len(hosts) < 2 or sorted(hosts) != list(range(len(hosts))):  # noqa: PLR2004 (two ranks)
        rule = 'must be numbered from 0, two or more, in lines "#  Rank 0 ... on HOST device ..."'
        _refuse(path, "Rank", len(hosts), rule=rule, fix="give the whole log, with its head")
    named = said or (_program(by_name) if by_name else None)
    return [Run(where=path, program=named, hosts=tuple(hosts.values()), device=device, rows=tuple(rows))]


def _program(text: str) -> str:
    return {name.replace("_", ""): name for name in PROGRAMS}[text.lower().replace("_", "")]


def _row(cells: Sequence[str], *, where: str, line: int) -> Row:
    """Read size, count, type, redop, (root,) and two times (time, algbw, busbw, wrong)."""
    if len(cells) not in {12, 13}:
        rule = "has not the 12 or 13 columns of nccl-tests (cut?)"
        _refuse(where, "columns", len(cells), rule=rule, fix="give the whole log")
    halves = (cells[-8:-4], cells[-4:])
    size = int(cells[0])
    times = tuple(_time(half, size=size, where=where) for half in halves)
    rates = [(_rate(half[1], where=where), _rate(half[2], where=where)) for half in halves]
    ratios = [bus / rate for rate, bus in rates if rate > 1]
    return Row(
        line=line,
        size_bytes=size,
        redop=cells[3],
        times_us=(times[0], times[1]),
        bus_gb_per_s=(rates[0][1], rates[1][1]),
        bus_over_algorithm=ratios[0] if ratios else None,
    )


def _time(half: Sequence[str], *, size: int, where: str) -> float | None:
    if half[0] == "N/A":
        return None
    time_us, rate = _number(half[0], where=where), _rate(half[1], where=where)
    wrong = half[3]
    if wrong != "N/A" and "." not in wrong and "e" not in wrong.lower() and wrong != "0":
        fix = "the results of the collective are wrong: mend the machine first"
        _refuse(where, "#wrong", wrong, rule="must be 0", fix=fix)
    if not time_us > 0:
        _refuse(where, "time", half[0], rule="must be a number > 0", fix="give the log as it was printed")
    if abs(size / (time_us * 1e3) - rate) > max(_ROUNDING * rate, 0.011 + 0.01 * rate):
        fix = "give the log as it was printed, with times in microseconds"
        rule = f"is not {size} bytes / {time_us:g} us = {size / (time_us * 1e3):.2f} GB/s"
        _refuse(where, "algbw", rate, rule=rule, fix=fix)
    return time_us


def _rate(text: str, *, where: str) -> float:
    return 0.0 if text == "N/A" else _number(text, where=where)


def _number(text: str, *, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not 0 <= number < float("inf"):
        _refuse(where, "column", text, rule="must be a number >= 0", fix="give the log as it was printed")
    return number


def _factor(op: str, ranks: int) -> float:
    return 1.0 if op == TRANSFER else bus_factor(CollectiveKind(op), ranks)


def _times(run: Run, column: str) -> dict[int, float]:
    """Return bytes -> microseconds of a column; sizes of 0 bytes are left out."""
    times: dict[int, float] = {}
    for row in run.rows:
        time_us = row.times_us[COLUMNS.index(column)]
        where = f"{run.where}:{row.line}"
        if time_us is None:
            other = next(name for name in COLUMNS if name != column)
            fix = f"take the other times: --column {other}"
            _refuse(where, column, "N/A", rule="has no time", fix=fix)
        if row.size_bytes in times:
            fix = "give one table of each test"
            _refuse(where, "size", row.size_bytes, rule="is given twice", fix=fix)
        if row.size_bytes:
            times[row.size_bytes] = time_us
    if not times:
        _refuse(run.where, "rows", 0, rule="no measurements found", fix="measure sizes above 0")
    return times


def _other_ranks(run: Run, key: Key) -> Iterator[str]:
    """Say where bus over algorithm bandwidth are those of another number of ranks than the log lists."""
    ratio, listed = run.ratio, len(run.hosts)
    expected = _factor(key[0], listed)
    if ratio is not None and abs(ratio / expected - 1) > _ROUNDING:
        yield (
            f"{run.where}: busbw / algbw is {ratio:.3f}, but {expected:.3f} with the {listed} ranks that the "
            "log lists: its head may be cut"
        )


def _slower(run: Run, key: Key, column: str) -> Iterator[str]:
    """Say where a larger message moves much fewer bytes per second."""
    which = COLUMNS.index(column)
    reached = sorted((row.size_bytes, row.bus_gb_per_s[which]) for row in run.rows)
    for (size, before), (more, after) in pairwise(reached):
        if after < _SLOWER * before:
            yield (
                f"{run.where}: {_title(key)}: bus bandwidth falls from {before:g} GB/s at {size} bytes to "
                f"{after:g} GB/s at {more} bytes: another path or protocol from there on, or a disturbed "
                "run (both times are kept)"
            )


def _title(key: Key) -> str:
    op, nodes, each = key
    if op == TRANSFER:
        return f"{op} {'inside a node' if nodes == 1 else 'between nodes'}"
    return f"{op} of {each} GPUs" if nodes == 1 else f"{op} of {nodes} x {each} GPUs"


def _tenth_largest(spread: Sequence[float]) -> float:
    """Return the 90th percentile of how much the two columns differ, at least `LEAST_ERROR`."""
    ordered = sorted(spread)
    return round(min(max(LEAST_ERROR, ordered[int(0.9 * (len(ordered) - 1))]), 0.9), 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What the file extends, what it changes of it, and what was assumed."""

    cluster: Cluster
    extends: str
    gpu: str | None
    gpus_per_node: int | None
    notices: tuple[str, ...]


def _base(runs: Sequence[Run], named: str | None) -> _Base:
    nodes, each = max(run.group[0] for run in runs), max(run.group[1] for run in runs)
    device = next((run.device for run in runs if run.device), "")
    notices = []
    extends = named or _cluster_of(device) or DEFAULT_CLUSTER
    cluster = load_cluster(extends)
    if named is None:
        known = (
            f"for {device}"
            if _cluster_of(device)
            else f"the GPUs of the log ({device or 'no name'}) tell no cluster"
        )
        notices.append(f"extends {extends}: {known}; name another with --cluster")
    if cluster.max_nodes is not None and nodes > cluster.max_nodes:
        rule, fix = f"has {cluster.max_nodes} nodes, a log is of {nodes}", "name a cluster with a network"
        _refuse("command line", "--cluster", extends, rule=rule, fix=fix)
    gpu = _gpu_of(device, cluster)
    if gpu:
        notices.append(f"GPUs are {gpu}, as in the logs ({cluster.name} has {cluster.gpu.name})")
    larger = each if each > cluster.gpus_per_node else None
    if larger:
        notices.append(f"{larger} GPUs per node, as in the logs ({cluster.name} has {cluster.gpus_per_node})")
    is_file = extends.lower().endswith((".yaml", ".yml"))
    return _Base(
        cluster=cluster,
        extends=str(Path(extends).resolve()) if is_file else cluster.name,
        gpu=gpu,
        gpus_per_node=larger,
        notices=tuple(notices),
    )


def _key(run: Run, cluster: Cluster) -> Key:
    """Return what a test is of.

    In sendrecv every rank sends to the next one, the slowest link decides: a transfer inside a node, or, of
    ranks on several nodes, between two of them.
    """
    op, (nodes, each) = operation(run), _placed(run, cluster)
    if op != TRANSFER:
        return op, nodes, each
    return (op, 1, 2) if nodes == 1 else (op, 2, 1)


def _placed(run: Run, cluster: Cluster) -> tuple[int, int]:
    """Return (nodes, ranks on each), where NVLink domains hold several nodes (domains, ranks in each)."""
    nodes, each = run.group
    per_domain = cluster.domain_gpus // cluster.gpus_per_node
    if each != cluster.gpus_per_node or (nodes > per_domain and nodes % per_domain):
        return nodes, each
    return max(nodes // per_domain, 1), each * min(nodes, per_domain)


_CLUSTERS_OF = {
    "V100": "dgx-1v",
    "A100-SXM": "dgx-a100",
    "A100-PCIE": "a100-pcie-8gpu",
    "A100 80GB PCIE": "a100-pcie-8gpu",
    "H100": "dgx-h100",
    "H200": "dgx-h200",
    "B200": "dgx-b200",
    "B300": "dgx-b300",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "L40S": "l40s-8gpu",
    "RTX PRO 6000": "rtx-pro-6000-8gpu",
}
"""Part of the name that the driver gives a device -> cluster of such devices; the longest one counts."""


def _cluster_of(device: str) -> str | None:
    fitting = [part for part in _CLUSTERS_OF if part in device.upper()]
    return _CLUSTERS_OF[max(fitting, key=len)] if fitting else None


def _gpu_of(device: str, cluster: Cluster) -> str | None:
    """Return the A100 of the size that the driver's name states, where the cluster has another one."""
    match = re.search(r"A100-SXM4-(40|80)GB", device)
    name = f"a100-sxm-{match.group(1)}gb" if match else None
    return name if name and cluster.gpu.name.startswith("a100-sxm") and cluster.gpu.name != name else None


def _head(name: str, base: _Base, source: str) -> Iterator[str]:
    yield from ("schema_version: 1", f"name: {_quoted(name)}")
    yield f"description: {_quoted(f'{base.cluster.name} with measured communication')}"
    yield f"extends: {_quoted(base.extends)}"
    if base.gpu:
        yield f"gpu: {base.gpu}"
    if base.gpus_per_node:
        yield from (f"gpus_per_node: {base.gpus_per_node}", f"source: {_quoted(source)}")


def _tables(series: Mapping[Key, Mapping[int, float]], *, error: float, source: str) -> Iterator[str]:
    for section, over in (("intra_collectives", False), ("inter_collectives", True)):
        chosen = {key: times for key, times in series.items() if (key[1] > 1) is over}
        if not chosen:
            continue
        yield from (
            f"{section}:",
            "  inherit: true",
            f"  table_error: {error}",
            f"  source: {_quoted(source)}",
            "  table:",
        )
        for op in dict.fromkeys(key[0] for key in chosen):
            yield f"    {op}:"
            for (of, nodes, each), times in chosen.items():
                if of == op:
                    yield f"      {f'{nodes}x{each}' if over else each}:"
                    yield from (f"        {size}: {time_us!r}us" for size, time_us in times.items())


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _refuse(where: str, field: str, value: object, *, rule: str, fix: str) -> NoReturn:
    raise _refused(where, field, value, rule=rule, fix=fix)


def _refused(where: str, field: str, value: object, *, rule: str, fix: str) -> JobError:
    return JobError(where=where, field=field, value=value, rule=rule, fix=fix)
