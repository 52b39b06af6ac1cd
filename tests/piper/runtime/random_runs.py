"""Random models under random strategies: what a seed stands for, and the run that it names.

Two kinds of models: the toy (branches over several stages, tied and frozen parameters, dropout), and small
published decoders (attention cores, dropout, experts). What does not go together, the planner says; then the
seed draws again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piper.errors import JobError, StrategyError
from piper.runtime import RunOutcome
from piper.runtime.runnable import check_rings
from simulator.plan import Plan
from tests.piper.runtime.jobs import plan_of, train
from tests.piper.runtime.named_runs import compiled_job, run_job
from tests.piper.runtime.small_models import small_model

RANKS = 4
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_1p", "zb_2p", "dualpipe")
LOOPED = ("interleaved_1f1b", "looped_bfs", "interleaved_zb")
V_SHAPED = ("zbv", "v_half", "v_min", "dualpipe_v")
DECODERS = ("llama", "qwen3", "gpt2", "mixtral")
EXPERTS = ("mixtral",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and a strategy.

    Args:
        family: of the decoder; "toy": the toy.
        strategy: shorthand.
        model: options of the toy.
        job: global batch, microbatch, optimizer, clipping, dtype.
    """

    family: str
    strategy: str
    model: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)

    def ready(self, folder: Path) -> tuple[Plan, Callable[..., RunOutcome]]:
        """Return the plan, and what runs it for some steps.

        Raises: StrategyError or JobError for what does not go together.
        """
        if self.family == "toy":
            plan = plan_of(self.strategy, **self.job, **self.model)
            return plan, lambda steps: train(plan, steps=steps, model=self.model)
        job = compiled_job(small_model(self.family, folder), self.strategy, **self.job)
        return job.plan, lambda steps: run_job(job, steps=steps)


def draw(seed: int, folder: Path) -> tuple[Case, Plan, Callable[..., RunOutcome]]:
    """Return the case of a seed, its plan, and what runs it."""
    rng = random.Random(seed)
    while True:
        case = _toy(rng) if rng.random() < 0.6 else _decoder(rng)
        try:
            plan, run = case.ready(folder)
            require_rings_runnable(plan)
        except (StrategyError, JobError):
            continue
        return case, plan, run


def require_rings_runnable(plan: Plan) -> None:
    """Raise JobError for the one thing that the runtime refuses here; all else that is legal must run."""
    for device in plan.device_plans:
        check_rings(device)


def _toy(rng: random.Random) -> Case:
    frozen = rng.choice((0, 0, 0, 1))
    model = {
        "layers": rng.choice((2, 3, 4)),
        "tied": not frozen and rng.random() < 0.3,
        "dropout": rng.choice((0.0, 0.1)),
        "crossing": not frozen and rng.random() < 0.3,
        "frozen": frozen,
    }
    dp = rng.choice((1, 2, 2, 4))
    parts = {"pp": rng.choice([p for p in (1, 2, 3, 4) if p * dp <= RANKS]), "dp": dp}
    parts |= _schedule(rng, parts["pp"]) | _state(rng, dp, host=("optimizer", "params"))
    parts["recompute"] = rng.choice(("none", "none", "full", "full:1"))
    return Case(family="toy", strategy=_text(parts), model=model, job=_job(rng, dp, clip="clip"))


def _decoder(rng: random.Random) -> Case:
    family = rng.choice(DECODERS)
    tp, cp, dp = rng.choice(
        ((1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2), (2, 2, 1))
    )
    pp = rng.choice([p for p in (1, 2) if p * tp * cp * dp <= RANKS])
    parts = {"pp": pp, "dp": dp, "tp": tp, "cp": cp} | _schedule(rng, pp)
    parts |= _state(rng, dp, host=("optimizer", "params", "activations"))
    if tp > 1:
        parts["sp"] = rng.choice(("on", "off"))
    if family in EXPERTS:
        parts["ep"] = rng.choice([e for e in (1, 2, 4) if e <= dp * cp * tp])
    parts["recompute"] = rng.choice(("none", "full", "selective"))
    exact = tp == cp == parts.get("ep", 1) == 1
    dtype = rng.choice(("fp32", "bf16")) if exact else "fp32"  # where sums differ, bf16 leaves no margin
    job = _job(rng, dp, clip="clip_grad_norm") | {"dtype": dtype}
    return Case(family=family, strategy=_text(parts), job=job)


def _schedule(rng: random.Random, pp: int) -> dict[str, Any]:
    if pp == 1:
        return {}
    if rng.random() < 0.5:
        return {"schedule": rng.choice(SCHEDULES)}
    if rng.random() < 0.5:
        return {"schedule": rng.choice(LOOPED), "vp": 2}
    return {"schedule": rng.choice(V_SHAPED)}


def _state(rng: random.Random, dp: int, *, host: tuple[str, ...]) -> dict[str, Any]:
    """Draw what is cut over the replicas, and what waits on the host."""
    found: dict[str, Any] = {"zero": rng.choice((0, 1, 2, 3))}
    if dp == RANKS and found["zero"] and rng.random() < 0.5:
        found["hsdp"] = 2
    if found["zero"] == 3 and rng.random() < 0.5:
        found["prefetch"] = rng.choice((0, 2, 3))
    if rng.random() < 0.3:
        found["offload"] = rng.choice(host)
    if rng.random() < 0.2:
        found["bucket_mb"] = 1
    return found


def _job(rng: random.Random, dp: int, *, clip: str) -> dict[str, Any]:
    return {
        "global_batch": dp * rng.choice((2, 3, 4)),
        "micro_batch": rng.choice((1, 1, 2)),
        "optimizer": rng.choice(("sgd", "sgd", "adamw")),
        clip: rng.choice((None, 0.1)),
    }


def _text(parts: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in parts.items())
