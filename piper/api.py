"""The public verbs behind `import piper`: names, files and strategies in; plans and results out.

All job arguments mean what the options of the command line mean, with the same defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from piper.installation import check_packages

check_packages()

if TYPE_CHECKING:
    from piper.predict import Job
    from piper.report.result import Result
    from piper.strategy import Strategy
    from simulator.plan import Plan

DEFAULT_CLUSTER = "dgx-h100"
DEFAULT_STACK = "piper"


def compile_plan(
    model: str,
    strategy: Strategy | str = "",
    *,
    cluster: str = DEFAULT_CLUSTER,
    stack: str = DEFAULT_STACK,
    **job: Any,
) -> Plan:
    """Compile a model and a strategy into one plan per pipeline rank.

    Args:
        model: a catalogue name, a config.json, or "package.module:factory".
        strategy: a `Strategy`, a shorthand, or the path of a strategy file.
        cluster, stack: names or YAML files.
        job: gpus, seq_len, global_batch, micro_batch, dtype, optimizer, clip_grad_norm.
    Raises: InputError for anything that cannot be used; IllegalPlanError for a plan that would hang.
    """
    from piper.predict import compile_job

    return compile_job(_job(model, strategy, cluster=cluster, stack=stack, **job)).plan


def simulate(
    plan: Plan,
    *,
    cluster: str = DEFAULT_CLUSTER,
    stack: str = DEFAULT_STACK,
    steps: int | str = "auto",
    engine: str = "auto",
    jitter: str | Sequence[str] = (),
    seed: int = 0,
    runs: int | None = None,
) -> Result:
    """Simulate a plan on a cluster; the result has the figures, the timeline, and draws itself.

    Args:
        plan: from `compile_plan`.
        cluster, stack: names or YAML files.
        steps: how many, or "auto".
        engine: "auto", "fast" or "reference".
        jitter: how ranks differ from the plan, as after `--jitter`; the result has a section `jitter`.
        seed, runs: of the jitter, as after `--seed` and `--runs`.
    Raises: InputError when the cluster is unknown or too small, or the jitter cannot be read.
    """
    from piper.predict import Jitter, predict_plan
    from piper.report.result import Result

    asked = Jitter(spec=jitter, seed=seed, runs=runs) if jitter else None
    found = predict_plan(plan, cluster=cluster, stack=stack, steps=steps, engine=engine, jitter=asked)
    return Result(name=plan.strategy, summary=found.result, timeline=found.timeline, plan=plan)


def search_strategies(model: str, **job: Any) -> Any:
    """Find the fastest strategy that fits; returns a `piper.search.SearchResult`.

    Args:
        model: as in `compile_plan`.
        job: cluster, stack and the job arguments of `compile_plan`, and those of `SearchRequest`.
    """
    from piper.search import SearchRequest
    from piper.search import search_strategies as search

    return search(SearchRequest(model=model, **job))


def register_schedule(name: str, function: Callable[..., Any]) -> None:
    """Make `schedule=name` mean `function` in this process.

    Args:
        name: a new name.
        function: `f(*, num_pipeline_ranks, num_microbatches, virtual_stages_per_rank, costs, memory_cap)
            -> rows`, as the modules in `piper.schedules`.
    """
    from piper.schedules import register

    register(name, function)


def _job(model: str, strategy: Strategy | str, **job: Any) -> Job:
    from piper.predict import Job
    from piper.strategy import load_strategy

    found = load_strategy(strategy, where="strategy") if isinstance(strategy, str) else strategy
    return Job(model=model, strategy=found, **job)
