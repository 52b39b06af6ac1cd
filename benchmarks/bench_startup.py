"""Wall time of whole commands in fresh processes: what a user waits for (the cache is warm)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

COMMANDS = {
    "help": ["--help"],
    "models": ["models", "--json"],
    "simulate": [
        "simulate", "examples/llama3-8b/config.json", "--cluster", "dgx-h100", "--gpus", "64",
        "--strategy", "pp=4,dp=16,zero=1,schedule=1f1b,recompute=full", "--micro-batch", "1",
        "--global-batch", "512", "--seq-len", "8192", "--json",
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 repeats instead of 7")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    repeats = 2 if options.quick else 7
    found: dict[str, dict[str, float]] = {}
    for name, arguments in COMMANDS.items():
        times = [wall_s(arguments) for _ in range(repeats + 1)]
        found[name] = {"first_s": times[0], "best_s": min(times[1:]), "worst_s": max(times[1:])}
        if not options.json:
            print(f"{name:10} first {times[0]:.3f} s, then {min(times[1:]):.3f} .. {max(times[1:]):.3f} s")
    print(json.dumps({"benchmark": "startup", "repeats": repeats, "commands": found}))


def wall_s(arguments: list[str]) -> float:
    """Run one command; return its seconds. A command that fails ends the benchmark."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "piper", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
