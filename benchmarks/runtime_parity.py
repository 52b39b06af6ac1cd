"""The runtime against torch's own: DDP, FSDP2, 1F1B and interleaved 1F1B, the same tiny Llama, paired runs.

Both sides start from the same parameters, take the same tokens, and step AdamW without clipping; reductions
are the backend's. A pair is a run of each, one after the other, in alternating order; the ratio is the
throughput of ours over theirs. Losses of all steps must agree. Where other programs take the machine, single
pairs say little: `best_ratio` compares the fastest steps of all pairs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from piper.predict import CompiledJob, Job, compile_job
from piper.runtime import run_local
from piper.runtime.init import batch_of_step, initial_value
from piper.runtime.sources import build
from piper.strategy import load_strategy
from simulator.plan import Plan

MODEL, SEQ_LEN = "tiny-llama", 64
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 1e-2
"""`piper.runtime.settings`: those of torch.optim.AdamW."""
LOSS_TOLERANCE = 1e-5
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """What is compared.

    Args:
        other: "ddp", "fsdp2", "1f1b" or "interleaved".
        ranks: processes.
        strategy: ours.
        global_batch: sequences per step.
    """

    other: str
    ranks: int
    strategy: str
    global_batch: int

    @property
    def name(self) -> str:
        """Return what the case is called."""
        return f"{self.other} x{self.ranks}"


CASES = [
    Case("ddp", 2, "dp=2,micro_batch=4", 8),
    Case("ddp", 4, "dp=4,micro_batch=2", 8),
    Case("fsdp2", 2, "dp=2,zero=3,micro_batch=4", 8),
    Case("fsdp2", 4, "dp=4,zero=3,micro_batch=2", 8),
    Case("1f1b", 2, "pp=2,schedule=1f1b", 8),
    Case("1f1b", 4, "pp=4,schedule=1f1b", 8),
    Case("interleaved", 2, "pp=2,vp=2,schedule=interleaved_1f1b", 8),
    Case("interleaved", 4, "pp=4,vp=2,schedule=interleaved_1f1b", 8),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two pairs of short runs with 2 processes")
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--only", metavar="NAME", help="only cases whose names contain this")
    options = parser.parse_args()
    pairs, steps = (2, 5) if options.quick else (5, 12)
    chosen = [c for c in CASES if options.only in c.name] if options.only else CASES
    chosen = [c for c in chosen if c.ranks == 2] if options.quick else chosen  # noqa: PLR2004
    torch.set_num_threads(1)
    rows = [compared(case, pairs=pairs, steps=steps) for case in chosen]
    if not options.json:
        for row in rows:
            ratios = f"{row['ratio']:.2f}, fastest steps {row['best_ratio']:.2f}"
            print(f"{row['name']:16} ours / theirs {ratios} (pairs {_shown(row['ratios'])})")
    print(json.dumps({"benchmark": "runtime_parity", "model": MODEL, "seq_len": SEQ_LEN, "cases": rows}))


def compared(case: Case, *, pairs: int, steps: int) -> dict[str, Any]:
    """Return throughput of ours over theirs, and by how much losses differ."""
    sizes = {"seq_len": SEQ_LEN, "cluster": "cpu", "dtype": "fp32", "optimizer": "adamw"}
    job = compile_job(
        Job(
            model=MODEL, strategy=load_strategy(case.strategy), global_batch=case.global_batch,
            clip_grad_norm=None, **sizes,
        )
    )  # fmt: skip
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    losses: dict[str, list[float]] = {}
    for number in range(pairs):
        sides = [("ours", ours, _run_ours), ("theirs", theirs, _run_theirs)]
        for side, times, run in sides if number % 2 == 0 else reversed(sides):
            of_steps, losses[side] = run(case, job, steps)
            times.append(of_steps)
        print(f"{case.name}: pair {number + 1} of {pairs}", file=sys.stderr)
    our_s, their_s = ([statistics.median(times) for times in side] for side in (ours, theirs))
    ratios = [their / our for our, their in zip(our_s, their_s, strict=True)]
    error = max(abs(a - b) / b for a, b in zip(losses["ours"], losses["theirs"], strict=True))
    return {
        "name": case.name,
        "strategy": case.strategy,
        "ranks": case.ranks,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "best_ratio": min(map(min, theirs)) / min(map(min, ours)),
        "our_step_s": statistics.median(our_s),
        "their_step_s": statistics.median(their_s),
        "max_loss_error": error,
        "losses_equal": error < LOSS_TOLERANCE,
    }


def _run_ours(case: Case, job: CompiledJob, steps: int) -> tuple[list[float], list[float]]:
    """Return seconds of every step but the first, and losses."""
    outcome = run_local(job.plan, job.source, num_ranks=case.ranks, steps=steps, timeout_s=TIMEOUT_S)
    found = outcome.result["steps"]
    return [s["step_time_s"] for s in found[1:]], [s["loss"] for s in found]


def _run_theirs(case: Case, job: CompiledJob, steps: int) -> tuple[list[float], list[float]]:
    """Return the same of torch, by the slowest rank."""
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        init = f"file://{Path(folder) / 'store'}"
        arguments = [(case, job, steps, rank, init, results) for rank in range(case.ranks)]
        processes = [fork.Process(target=_be_rank, args=one) for one in arguments]
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
        for process in processes:
            process.join()
    times = max((row["times"] for row in found), key=statistics.median)
    losses = [sum(row["losses"][i] for row in found) for i in range(steps)]
    return times[1:], losses


def _be_rank(case: Case, job: CompiledJob, steps: int, rank: int, init: str, results: Any) -> None:  # noqa: PLR0917
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=case.ranks)
    step = RUNNERS[case.other](case, job, rank)
    times, losses = [], []
    for number in range(steps):
        batch = batch_of_step(job.plan, seed=0, step=number)
        before = time.perf_counter()
        losses.append(step(batch))
        times.append(time.perf_counter() - before)
    results.put({"times": times, "losses": losses})
    dist.barrier()
    dist.destroy_process_group()


Step = Callable[[Tensor], float]
"""From the tokens of a step, [global_batch, seq_len + 1], to what this rank adds to the mean loss."""


def _replicated(case: Case, job: CompiledJob, rank: int) -> Step:
    module = _module(job)
    return _of_replica(nn.parallel.DistributedDataParallel(module), case, plan=job.plan, rank=rank)


def _sharded(case: Case, job: CompiledJob, rank: int) -> Step:
    from torch.distributed.fsdp import fully_shard

    module: Any = _module(job)
    mesh = dist.device_mesh.init_device_mesh("cpu", (case.ranks,))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return _of_replica(module, case, plan=job.plan, rank=rank)


def _of_replica(module: nn.Module, case: Case, *, plan: Plan, rank: int) -> Step:
    """Return the step of one of several replicas, whose gradients torch averages."""
    optimizer = _optimizer(module)
    share, tokens = case.global_batch // case.ranks, plan.training.tokens_per_step

    def step(batch: Tensor) -> float:
        rows = batch[rank * share : (rank + 1) * share]
        loss: Tensor = module(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / tokens
        (loss * case.ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


class Stage(nn.Module):
    """A run of the layers of a decoder, with the embedding at the begin and the head at the end."""

    def __init__(self, whole: Any, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.decoder = [whole.model]  # not registered: it keeps the tables of positions only
        self.layers = nn.ModuleList(whole.model.layers[i] for i in layers)
        self.shapes = [whole.shape.layers[i] for i in layers]
        self.embed = whole.model.embed_tokens if first else None
        self.norm = whole.model.norm if last else None
        self.head = whole.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens or hidden features to hidden features or logits."""
        if self.embed is not None:
            x = self.embed(x)
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            x = layer(x, *self.decoder[0].tables(shape))
        return x if self.head is None else self.head(self.norm(x))


def _pipelined(case: Case, job: CompiledJob, rank: int) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    plan, whole = job.plan, _module(job)
    num_stages = max(segment.stage for segment in plan.segments) + 1
    tokens = plan.training.tokens_per_step
    modules = {
        stage: Stage(whole, layers, first=stage == 0, last=stage == num_stages - 1)
        for stage, layers in _layers_of_stages(plan)
        if stage % case.ranks == rank
    }
    device = torch.device("cpu")
    stages = [PipelineStage(module, stage, num_stages, device) for stage, module in modules.items()]
    optimizer = _optimizer(nn.ModuleList(modules.values()))

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum") / tokens

    count, options = plan.training.num_microbatches, {"loss_fn": loss_fn, "scale_grads": False}
    schedule: Any = (
        Schedule1F1B(stages[0], count, **options)
        if case.other == "1f1b"
        else ScheduleInterleaved1F1B(stages, count, **options)
    )
    last = num_stages - 1 in modules

    def step(batch: Tensor) -> float:
        losses: list[Tensor] = []
        given = (batch[:, :-1].contiguous(),) if 0 in modules else ()
        schedule.step(*given, **({"target": batch[:, 1:].contiguous(), "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(loss.detach() for loss in losses))

    return step


RUNNERS: dict[str, Callable[[Case, CompiledJob, int], Step]] = {
    "ddp": _replicated,
    "fsdp2": _sharded,
    "1f1b": _pipelined,
    "interleaved": _pipelined,
}


def _layers_of_stages(plan: Plan) -> Iterator[tuple[int, range]]:
    """Yield the layers of each stage of the plan."""
    stages: dict[int, set[int]] = {}
    for segment in plan.segments:
        here = stages.setdefault(segment.stage, set())
        here |= {int(name.split(".")[2]) for name in segment.parameters if name.startswith("model.layers.")}
    for stage, layers in sorted(stages.items()):
        yield stage, range(min(layers), max(layers) + 1)


def _module(job: CompiledJob) -> nn.Module:
    """Return the model with the parameters that a run of ours starts from."""
    module = build(job.source, dtype="fp32", device="cpu", seq_len=SEQ_LEN)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(initial_value(name, tuple(parameter.shape), seed=0))
    return module


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def _shown(ratios: list[float]) -> str:
    return " ".join(f"{ratio:.2f}" for ratio in ratios)


if __name__ == "__main__":
    main()
