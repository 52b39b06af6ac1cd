"""`piper profile`: measure this machine into a table."""

from __future__ import annotations

import os
from typing import Any

import click

from piper.cli.options import PositiveNumber
from piper.cli.output import prepared, progress


@click.command()
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="What to measure."
)
@click.option("--out", metavar="F.csv", required=True, help="The table that is written.")
@click.option("--quick", is_flag=True, help="Fewer shapes and repeats (about half a minute).")
@click.option(
    "--time-limit",
    type=PositiveNumber("120"),
    default=120.0,
    metavar="S",
    help="No kernel begins after this.",
)
def profile(*, device: str, out: str, quick: bool, time_limit: float) -> None:
    """Measure kernels, links and host costs of this machine (under torchrun: of all nodes) into a table.

    `piper calibrate` makes a cluster file of it.

    \b
    Examples:
      piper profile --device cpu --out cpu.csv --quick
      piper profile --device cuda --out gpu.csv
      torchrun --nproc-per-node 8 -m piper profile --device cuda --out node.csv
    """
    from cost_models.calibration.table import write_table

    path = prepared(out, option="--out")
    with progress("measuring") as show:
        rows = _measure({"device": device, "quick": quick, "limit_s": time_limit, "report": show})
    if int(os.environ.get("RANK", "0")) == 0:
        write_table(path, rows)
        click.echo(f"wrote {path}: {len(rows)} rows")


def _measure(options: dict[str, Any]) -> list[Any]:
    from piper.profiling.machine import Profiling, profile

    return list(profile(Profiling(**options)))
