"""Fit the parameters of GPUs, clusters and stacks to the published runs, and write them into their files.

Three fits: to all runs (written into `cost_models/`), and to each half (`piper/validation/fitted/`). Runs
that no other agrees with are left out; of sources with many runs a sample is taken. It takes half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import FoldedScalarString

from cost_models import catalogue
from cost_models.errors import InputError
from piper.validation.fitting.composition import Composition, composition_of
from piper.validation.fitting.parameters import PARAMETERS, overlay_of
from piper.validation.fitting.solver import fit
from piper.validation.halves import FITTED
from piper.validation.odd_runs import ODD_RUNS
from piper.validation.overlay import Overlay
from piper.validation.rows import PublishedRow, read_rows

FOLDER = Path(__file__).parent / "published_runs"
MOST = 70
"""Runs of one source that are fitted to: those of large tables repeat each other."""
SEED = 1
SAID = "fitted to published runs (docs/accuracy.md)"
_LISTED = re.compile(rf"[\w.]+(?:, [\w.]+)*: {re.escape(SAID)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few runs and iterations; writes nothing")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--rounds", type=int, default=2, help="simulations of all runs")
    options = parser.parse_args()
    rows = sample(read_rows(sorted(FOLDER.glob("*.csv"))), most=2 if options.quick else MOST)
    told = (lambda _: None) if options.json else print
    parameters: Overlay = ()
    compositions: list[Composition] = []
    for _ in range(1 if options.quick else options.rounds):
        compositions = composed(rows, parameters)
        factors = fit(compositions, PARAMETERS, iterations=2 if options.quick else 12, report=told)
        parameters = overlay_of(PARAMETERS, factors)
    halves = {} if options.quick else {
        half: overlay_of(PARAMETERS, fit(of_half(compositions, half), PARAMETERS, report=told))
        for half in ("a", "b")
    }  # fmt: skip
    for half, found in halves.items():
        write_overlay(FITTED / f"fit_{half}.yaml", found, runs=sum(c.half == half for c in compositions))
    if not options.quick:
        write_files(parameters)
    print(json.dumps({"n_runs": len(compositions), "parameters": dict(parameters)}))


def of_half(compositions: Sequence[Composition], half: str) -> list[Composition]:
    """Return the runs of one half."""
    return [composition for composition in compositions if composition.half == half]


def sample(rows: Sequence[PublishedRow], *, most: int) -> list[PublishedRow]:
    """Return the runs to fit to."""
    by_source: dict[str, list[PublishedRow]] = defaultdict(list)
    for row in rows:
        if not row.oom and row.case_id not in ODD_RUNS:
            by_source[row.file].append(row)
    found = []
    for listed in by_source.values():
        found += listed if len(listed) <= most else random.Random(SEED).sample(listed, most)
    return found


def composed(rows: Sequence[PublishedRow], parameters: Overlay) -> list[Composition]:
    """Return the compositions of all runs that can be predicted, found on all cores."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return [found for found in pool.map(partial(_composed, parameters=parameters), rows) if found]


def _composed(row: PublishedRow, *, parameters: Overlay) -> Composition | None:
    try:
        return composition_of(row, parameters=parameters)
    except InputError:
        return None


def write_overlay(path: Path, parameters: Overlay, *, runs: int) -> None:
    """Write parameters as a file."""
    path.parent.mkdir(exist_ok=True)
    content = {
        "schema_version": 1,
        "source": f"fitted to {runs} published runs of one half by benchmarks/fit_parameters.py",
        "parameters": dict(parameters),
    }
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(content, file)


def write_files(parameters: Overlay) -> None:
    """Write parameters into the files of the catalogue; their sections say so in `source`.

    A new section `training` of a file that extends another chip's inherits only if it says so.
    """
    by_file: dict[Path, dict[str, object]] = defaultdict(dict)
    for name, value in parameters:
        kind, entry, keys = name.split(":", 2)
        by_file[catalogue.path_of(kind, entry)][keys] = value
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 110
    for path, figures in by_file.items():
        content = yaml.load(path.read_text(encoding="utf-8"))
        for keys, value in figures.items():
            section, *inner, last = keys.split(".")
            place = content.setdefault(section, {})
            for key in inner:
                place = place.setdefault(key, {})
            place[last] = value
        for section in {keys.partition(".")[0] for keys in figures}:
            names = ", ".join(keys.partition(".")[2] for keys in figures if keys.startswith(f"{section}."))
            before = " ".join(content[section].pop("source", "").split())
            said = SAID if before in ("", SAID) else f"{names}: {SAID}"
            if said != SAID and SAID in before:
                said = _LISTED.sub(lambda _, said=said: said, before)
            elif said != SAID:
                said = f"{before}. {said}"
            content[section]["source"] = FoldedScalarString(f"{said}\n")
        with path.open("w", encoding="utf-8") as file:
            yaml.dump(content, file)


if __name__ == "__main__":
    main()
