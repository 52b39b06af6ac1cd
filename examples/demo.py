"""What Piper does, end to end: plan Llama-3-8B on 64 H100, compare, search, and train a small model for real.

Run it with `make demo`. Everything it writes is in `out/`.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OUT = Path("out")
LLAMA = "examples/llama3-8b/config.json"
JOB = ["--cluster", "dgx-h100", "--gpus", "64", "--seq-len", "8192", "--global-batch", "512"]
STRATEGIES = {
    "dp64": "dp=64,zero=1,recompute=full",
    "pp2": "pp=2,dp=32,zero=1,schedule=1f1b,recompute=full",
    "pp4": "pp=4,dp=16,zero=1,schedule=1f1b",
    "pp4-gpipe": "pp=4,dp=16,zero=1,schedule=gpipe,recompute=full",
    "pp8": "pp=8,dp=8,zero=1,schedule=1f1b",
}
PROCESSES = 4
SMALL_BATCH = "16"


def main() -> None:
    start = time.monotonic()
    OUT.mkdir(exist_ok=True)
    say("1. Plan Llama-3-8B on 64 H100: time, memory, and where a step goes")
    folders = [simulate(name, strategy) for name, strategy in STRATEGIES.items()]

    say("2. Compare the strategies")
    stated = [word for strategy in STRATEGIES.values() for word in ("--strategy", strategy)]
    text = piper("compare", LLAMA, *JOB, *stated)
    (OUT / "comparison.txt").write_text(text)

    say("3. Search: the fastest strategy that fits, and why the others lost")
    piper("search", LLAMA, *JOB, "--jobs", "2", "--out", str(OUT / "search"))
    best = json.loads((OUT / "search" / "ranking.json").read_text())["best"]["strategy"]["shorthand"]
    pictures = ["--plot", f"{OUT}/best-timeline.png", "--memory-plot", f"{OUT}/best-memory.png"]
    folders.append(simulate("best", best, "--trace", f"{OUT}/best-trace.json", *pictures))

    say(f"4. Train tiny-llama on {PROCESSES} CPU processes with its best pipeline x data-parallel plan")
    small = best_pipeline_and_data_parallel()
    job = ["--strategy", small, "--global-batch", SMALL_BATCH, "--steps", "3", "--verify"]
    files = ["--trace", f"{OUT}/run-trace.json", "--out", f"{OUT}/run"]
    piper("run", "tiny-llama", "--local", str(PROCESSES), *job, *files)
    piper("plot", f"{OUT}/run", "-o", f"{OUT}/run-timeline.png")

    say("5. Report")
    piper("report", *folders, "-o", f"{OUT}/report.html", "--title", "Llama-3-8B on 64 H100")
    piper("report", f"{OUT}/run", "-o", f"{OUT}/run-report.html", "--title", f"tiny-llama trained: {small}")
    show_places(time.monotonic() - start)


DEGREES = [word for pin in ("pp=2", "dp=2", "vp=1", "offload=none", "bucket_mb=0") for word in ("--pin", pin)]
"""Pins of the search of the small model: 2 pipeline ranks and 2 replicas."""


def simulate(name: str, strategy: str, *more: str) -> str:
    """Simulate one strategy; its result is kept in a folder of `out/`."""
    folder = f"{OUT}/{name}"
    piper("simulate", LLAMA, *JOB, "--strategy", strategy, "--out", folder, *more)
    return folder


def best_pipeline_and_data_parallel() -> str:
    """Search the small model on this machine; return its best strategy of 2 pipeline ranks and 2 replicas."""
    job = [
        "--cluster",
        "local-cpu",
        "--gpus",
        str(PROCESSES),
        "--dtype",
        "fp32",
        "--global-batch",
        SMALL_BATCH,
    ]
    found = json.loads(piper("search", "tiny-llama", *job, *DEGREES, "--top", "1", "--json", quiet=True))
    return str(found["best"]["strategy"]["shorthand"])


def piper(*arguments: str, quiet: bool = False) -> str:
    """Run a command of piper and show it with its output; the demo ends when it fails."""
    print(f"\n$ piper {shlex.join(arguments)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "piper", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"demo: `piper {arguments[0]}` ended with code {done.returncode}")
    if not quiet:
        print(done.stdout, end="", flush=True)
    return done.stdout


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def show_places(seconds: float) -> None:
    places: dict[str, Any] = {
        "report.html": "the strategies side by side; open it in a browser",
        "run-report.html": "the training run: steps, verification, measured timeline",
        "search/ranking.json": "the ranking, and why the others lost",
        "comparison.txt": "the comparison as text",
        "best-timeline.png": "the best strategy's timeline",
        "best-memory.png": "its memory over time",
        "best-trace.json": "its trace; open it in https://ui.perfetto.dev",
        "run-trace.json": "the measured trace of the training run, with the same task names",
        "run-timeline.png": "the measured timeline",
    }
    print(f"\nDone in {seconds:.0f} s. Look at:")
    for name, what in places.items():
        path = OUT / name
        if not path.is_file():
            sys.exit(f"demo: {path} is missing")
        print(f"  {path!s:24} {what}")


if __name__ == "__main__":
    main()
