"""Profile this machine, search a plan for a small model on 4 processes, and run the others as well.

The candidates are strategies of the space of the search that `piper run` executes: the ranking of the search,
and random ones of every combination of degrees, half of them plain (`PLAIN`). All run once; those that come
near the fastest run again and again, in rounds whose order is drawn, with the plan that was chosen among
them. A round gives the lower quartile of its steps (other programs only ever slow steps down), a strategy the
median of its rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from cost_models.calibration import calibrate, read_table, write_table
from cost_models.documents import yaml_text
from piper.errors import JobError, RunFailedError
from piper.predict import CompiledJob, Job, compile_job, predict_plan
from piper.profiling.machine import Profiling, profile
from piper.runtime import run_local
from piper.runtime.runnable import require_runnable
from piper.search import SearchRequest, search_strategies
from piper.search.candidate import Candidate
from piper.search.choices import choices_of
from piper.search.evaluate import Evaluator
from piper.search.status import layout_of
from piper.strategy import Strategy

MODEL, GLOBAL_BATCH, SEQ_LEN, PROCESSES = "tiny-llama", 8, 64, 4
NEAR = 2.0
"""Strategies up to so many times the fastest in the first round run in the following ones."""
FINALISTS = 8
"""At most so many of them."""
STEPS, TIMEOUT_S = 9, 60.0
PLAIN = {"recompute": "none", "offload": "none", "async_tp": "off", "bucket_mb": 0, "prefetch": 0, "hsdp": 0}
"""Half of the strategies that run do without what costs time to save memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="8 strategies, a quick profile")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--table", metavar="F.csv", help="do not measure: take this table of piper profile")
    parser.add_argument("--strategies", type=int, default=0, metavar="N", help="to run (32; quick: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the random strategies and of the order")
    options = parser.parse_args()
    number = options.strategies or (8 if options.quick else 32)
    with tempfile.TemporaryDirectory() as folder:
        cluster = profiled(Path(folder), table=options.table, quick=options.quick)
        found = compared(cluster, number, rounds=2 if options.quick else 4, random=Random(options.seed))
    if not options.json:
        show(found)
    print(json.dumps({"benchmark": "search_vs_reality"} | found))


def profiled(folder: Path, *, table: str | None, quick: bool) -> str:
    """Return a cluster file of this machine."""
    rows = read_table(table) if table else list(profile(Profiling(device="cpu", quick=quick, report=say)))
    write_table(folder / "cpu.csv", rows)
    found = calibrate(rows, base="local-cpu", name="here", report=say)
    cluster = folder / "here.yaml"
    cluster.write_text(yaml_text(found.content), encoding="utf-8")
    return str(cluster)


def compared(cluster: str, number: int, *, rounds: int, random: Random) -> dict[str, Any]:
    """Search, run so many strategies, and return how far the chosen one is from the fastest."""
    job = {
        "model": MODEL, "cluster": cluster, "gpus": PROCESSES, "global_batch": GLOBAL_BATCH,
        "seq_len": SEQ_LEN, "dtype": "fp32",
    }  # fmt: skip
    began_s = time.perf_counter()
    searched = search_strategies(SearchRequest(**job, only_runnable=True)).to_json()
    search_s = time.perf_counter() - began_s
    chosen = searched["best"]["strategy"]["shorthand"]
    ranking = [entry["strategy"]["shorthand"] for entry in searched["ranking"]]
    others, space = spread(Job(**job), number, random=random)
    texts = list(dict.fromkeys([*ranking[: number // 4], *others]))[:number]
    jobs = {text: compiled for text in texts if (compiled := runnable(text, job)) is not None}
    times: dict[str, list[float]] = {text: [] for text in jobs}
    measure(jobs, times, order=random.sample(list(jobs), len(jobs)), label="all")
    first = min(listed[0] for listed in times.values() if listed)
    near = sorted((t for t in times if times[t] and times[t][0] <= NEAR * first), key=lambda t: times[t][0])
    finalists = list(dict.fromkeys([chosen, *near[:FINALISTS]]))
    for each in range(rounds):
        order = random.sample(finalists, len(finalists))
        measure(jobs, times, order=order, label=f"round {each + 1} of {rounds}")
    rows = [row(text, jobs[text], listed, cluster=cluster) for text, listed in times.items() if listed]
    rows.sort(key=lambda r: (r["strategy"] not in finalists, r["measured_s"]))
    fastest = min(r["measured_s"] for r in rows if r["strategy"] in finalists)
    mine = next(r["measured_s"] for r in rows if r["strategy"] == chosen)
    return {
        "model": MODEL,
        "processes": PROCESSES,
        "executable": space,
        "strategies_run": len(rows),
        "failed": [text for text, listed in times.items() if not listed],
        "chosen": chosen,
        "chosen_s": mine,
        "fastest": next(r["strategy"] for r in rows if r["measured_s"] == fastest),
        "fastest_s": fastest,
        "regret": mine / fastest - 1,
        "kendall_tau": kendall_tau(rows),
        "finalists": len(finalists),
        "rounds": rounds,
        "rows": rows,
        "timings_s": {"search": search_s},
    }


def spread(job: Job, number: int, *, random: Random) -> tuple[list[str], int]:
    """Return strategies from everywhere in the space, and how many there are."""
    evaluator = Evaluator(job=job)
    limits = evaluator.limits
    choices = choices_of(
        gpus=(PROCESSES,), num_units=limits.num_units, experts=limits.experts,
        cuts_tensors=limits.cuts_tensors, cuts_sequences=limits.cuts_sequences,
    )  # fmt: skip
    space = evaluator.space(choices)
    candidates = list(space)
    random.shuffle(candidates)
    plain = [c for c in candidates if all(getattr(c, name) == value for name, value in PLAIN.items())]
    found: list[str] = []
    for listed, most in ((plain, number // 2), (candidates, number)):
        _spread(listed, found, most=most)
    return found, len(candidates)


def _spread(candidates: list[Candidate], found: list[str], *, most: int) -> None:
    """Add candidates up to `most`, each combination of degrees in turn, no layout twice."""
    degrees: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in candidates:
        key = tuple(getattr(candidate, name) for name in ("tp", "pp", "cp", "dp"))
        degrees.setdefault(key, []).append(candidate)
    seen: set[tuple[object, ...]] = set()
    while len(found) < most and any(degrees.values()):
        for listed in degrees.values():
            while listed:
                candidate = listed.pop()
                if layout_of(candidate) not in seen:
                    seen.add(layout_of(candidate))
                    found.append(str(candidate.shorthand))
                    break


def runnable(text: str, job: dict[str, Any]) -> CompiledJob | None:
    """Return the compiled plan of a strategy, or None where `piper run` refuses it."""
    compiled = compile_job(Job(**job, strategy=Strategy.parse(text)))
    try:
        require_runnable(compiled.plan)
    except JobError as problem:
        say(f"{text}: {problem.value} {problem.rule}")
        return None
    return compiled


def measure(
    jobs: dict[str, CompiledJob], times: dict[str, list[float]], *, order: list[str], label: str
) -> None:
    """Run strategies in an order; add the lower quartile of the steps of each, without the first."""
    for place, text in enumerate(order):
        say(f"{label}: {place + 1} of {len(order)}: {text}")
        plan = jobs[text].plan
        try:
            outcome = run_local(
                plan, jobs[text].source, num_ranks=plan.num_ranks, steps=STEPS, timeout_s=TIMEOUT_S
            )
        except RunFailedError as problem:
            say(f"failed: {problem}")
            continue
        steps = [step["step_time_s"] for step in outcome.result["steps"][1:]]
        times[text].append(statistics.quantiles(steps, n=4)[0])
        say(f"  {times[text][-1] * 1e3:.1f} ms")


def row(text: str, compiled: CompiledJob, times: list[float], *, cluster: str) -> dict[str, Any]:
    """Return what was predicted and measured of a strategy."""
    predicted = predict_plan(compiled.plan, cluster=cluster).result["step_time_s"]
    return {
        "strategy": text,
        "predicted_s": predicted,
        "measured_s": statistics.median(times),
        "rounds": len(times),
        "all_s": times,
    }


def kendall_tau(rows: list[dict[str, Any]]) -> float:
    """Return the rank correlation of predicted and measured times."""
    from scipy.stats import kendalltau

    return float(kendalltau([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]).statistic)


def show(found: dict[str, Any]) -> None:
    print(f"{'strategy':86} {'predicted':>10} {'measured':>10} rounds")
    for line in found["rows"]:
        mark = "*" if line["strategy"] == found["chosen"] else " "
        print(
            f"{mark}{line['strategy']:85} {line['predicted_s'] * 1e3:7.1f} ms "
            f"{line['measured_s'] * 1e3:7.1f} ms {line['rounds']:6}"
        )
    for text in found["failed"]:
        print(f"failed: {text}")
    print(
        f"chosen (*): {found['regret']:.1%} slower than the fastest of {found['strategies_run']} "
        f"that ran, of {found['executable']} legal ones; rank correlation {found['kendall_tau']:.2f}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
