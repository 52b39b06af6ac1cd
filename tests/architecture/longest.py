"""Print the five longest files and functions of the product, so that growth is seen (`make check`)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cost_models", "simulator", "piper")
SHOWN = 5


def main() -> None:
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    by_file = sorted(
        ((len(path.read_text().splitlines()), path.relative_to(ROOT)) for path in files), reverse=True
    )
    by_function = sorted((entry for path in files for entry in functions(path)), reverse=True)
    sys.stdout.write("longest files (lines)\n")
    sys.stdout.writelines(f"  {lines:4}  {path}\n" for lines, path in by_file[:SHOWN])
    sys.stdout.write("longest functions (lines)\n")
    sys.stdout.writelines(f"  {lines:4}  {name}\n" for lines, name in by_function[:SHOWN])


def functions(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{path.relative_to(ROOT)}: {node.name}"


if __name__ == "__main__":
    main()
