"""How long a capture takes: cold and warm in a process of its own, and another shape of a known model."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

QUICK = ("llama3.1-405b", "deepseek-v3")
MORE = ("qwen3-235b-a22b", "gpt-oss-120b", "gemma3-27b", "mixtral-8x7b")

CAPTURE = """
import json, resource, sys, time
start = time.perf_counter()
from piper.capture import capture
from piper.models import find_model
source = find_model(sys.argv[1])
found = time.perf_counter()
model = capture(source, micro_batch=1, seq_len=4096, dtype="bf16")
captured = time.perf_counter()
torch_loaded = "torch" in sys.modules


def capture_s(**sizes):
    start = time.perf_counter()
    capture(source, dtype="bf16", **sizes)
    return time.perf_counter() - start


others = {
    "another_microbatch_s": capture_s(micro_batch=2, seq_len=4096),
    "another_length_s": capture_s(micro_batch=1, seq_len=2048),
    "both_s": capture_s(micro_batch=4, seq_len=1024),
}
peak_rss_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"find_model_s": found - start, "capture_s": captured - found, "torch_loaded": torch_loaded,
                  "peak_rss_gib": peak_rss_gib, "segments": len(model.segments), "others": others}))
"""

DEGREES = """
import json, sys
from piper.predict import Job, compile_job
from piper.strategy import Strategy
found = {}
for tp in (8, 4):
    strategy = Strategy.parse(f"pp=4,tp={tp},dp=1,micro_batch=1")
    job = Job(model=sys.argv[1], strategy=strategy, seq_len=4096, global_batch=8, gpus=4 * tp)
    found[tp] = compile_job(job).timings_s
print(json.dumps({"capture_s": found[4]["capture"], "compile_s": found[4]["compile"]}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two models, each once")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    repeats = 1 if options.quick else 3
    torch_s = min(run("import torch")[1] for _ in range(repeats))
    rows = []
    for name in QUICK if options.quick else (*QUICK, *MORE):
        row = min((measured(name) for _ in range(repeats)), key=lambda row: row["cold_process_s"])
        rows.append(row)
        if not options.json:
            print(row)
    print(json.dumps({"benchmark": "capture_speed", "import_torch_process_s": torch_s, "models": rows}))


def measured(name: str) -> dict[str, Any]:
    """Return the seconds of one model: with an empty cache, with a full one, and of other shapes."""
    with tempfile.TemporaryDirectory() as folder:
        cold, cold_s = run(CAPTURE, name, cache=folder)
        warm, warm_s = run(CAPTURE, name, cache=folder)
        degrees, _ = run(DEGREES, name, cache=folder)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    return {
        "model": name,
        "segments": cold["segments"],
        "cold_process_s": cold_s,
        "cold_capture_s": cold["capture_s"],
        "warm_process_s": warm_s,
        "warm_capture_s": warm["capture_s"],
        "warm_loads_torch": warm["torch_loaded"],
        **warm["others"],
        "another_degree": degrees,
        "cold_peak_rss_gib": cold["peak_rss_gib"],
        "warm_peak_rss_gib": warm["peak_rss_gib"],
        "cache_bytes": size,
    }


def run(code: str, *arguments: str, cache: str = "") -> tuple[Any, float]:
    """Run code in a fresh process; return the JSON of its last line, if any, and its wall time."""
    environment = os.environ | ({"PIPER_CACHE_DIR": cache} if cache else {})
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None, seconds


if __name__ == "__main__":
    main()
