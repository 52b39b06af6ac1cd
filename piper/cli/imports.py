"""`piper import`: files of other tools."""

from __future__ import annotations

from pathlib import Path

import click

from piper.cli.options import json_option
from piper.cli.output import emit, prepared, write_text

_NAMELESS = "measured"


@click.command()
@click.argument("kind", metavar="KIND")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="F", help="File to write (default: print it).")
@click.option("--cluster", metavar="NAME|FILE", help="nccl-tests: the cluster that the file extends.")
@click.option(
    "--column",
    metavar="C",
    default="out-of-place",
    help="nccl-tests: out-of-place (default) or in-place times.",
)
@click.option(
    "--op", metavar="TEST", help="nccl-tests: which test, if the log does not say (all_reduce, ...)."
)
@json_option
def import_file(
    *,
    kind: str,
    files: tuple[str, ...],
    output: str | None,
    cluster: str | None,
    column: str,
    op: str | None,
    as_json: bool,
) -> None:
    """Read files of another tool.

    \b
    KIND is
      nccl-tests  logs of all_reduce_perf, all_gather_perf, reduce_scatter_perf,
                  alltoall_perf, sendrecv_perf: makes a cluster file that extends one
                  of the catalogue and has the measured times

    \b
    Examples:
      piper import nccl-tests all_reduce.log all_gather.log --cluster dgx-h100 -o ours.yaml
      piper import nccl-tests slurm-1234.out --column in-place --json
    """
    from piper.interop import import_of

    reader = import_of(kind).reader()
    if output:
        prepared(output, option="--output")
    name = Path(output).stem if output else _NAMELESS
    found = reader(files, name=name, cluster=cluster, column=column, op=op)
    if output:
        write_text(output, found.text, option="--output")
    notes = [f"warning: {text}" for text in found.warnings] + [f"notice: {text}" for text in found.notices]
    emit(
        {
            "schema_version": 1,
            "kind": kind,
            "file": output,
            **found.facts,
            "warnings": list(found.warnings),
            "notices": list(found.notices),
        },
        as_json=as_json,
        text=lambda: f"wrote {output}" if output else found.text.rstrip("\n"),
    )
    if not as_json:
        for note in notes:
            click.echo(note, err=not output)
