"""`piper run MODEL --local N --strategy S --verify` in the test process: what runs have in common is kept.

Captured models are cached on disk; traced models and references are kept here, so that a run of four tiny
ranks costs its own half second.
"""

from __future__ import annotations

from piper.predict import CompiledJob, Job, compile_job
from piper.runtime import RunOutcome, run_local
from piper.runtime.program import Program, build_program
from piper.strategy import load_strategy
from tests.piper.runtime.jobs import SHARED

BITWISE = {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}


def compiled_job(model: str, strategy: str, **options: object) -> CompiledJob:
    """Compile as `piper run` does, at sizes that run in seconds."""
    sizes = {"seq_len": 16, "global_batch": 8, "cluster": "cpu", "dtype": "fp32"} | options
    return compile_job(Job(model=model, strategy=load_strategy(strategy), **sizes))


_programs: dict[object, Program] = {}


def program_of(job: CompiledJob) -> Program:
    """Return the traced model of a job; each size is traced once."""
    facts = job.plan.training
    sizes = tuple(sorted(set(facts.micro_batch_sizes)))
    source = job.source.fingerprint() or job.source.factory
    key = (source, facts.seq_len, sizes, facts.dtype)
    if key not in _programs:
        _programs[key] = build_program(
            job.source, seq_len=facts.seq_len, micro_batch_sizes=sizes, dtype=facts.dtype
        )
    return _programs[key]


def run_job(job: CompiledJob, *, steps: int = 3, verify: bool = True, **options: object) -> RunOutcome:
    """Run a compiled job on local processes."""
    return run_local(
        job.plan, job.source, num_ranks=job.plan.num_ranks, steps=steps, verify=verify,
        program=program_of(job), references=SHARED, **{"timeout_s": 60.0, **options},
    )  # fmt: skip


def run_named(model: str, strategy: str, *, steps: int = 3, **options: object) -> RunOutcome:
    """Compile and run with verification, by SGD unless the options say otherwise."""
    return run_job(compiled_job(model, strategy, **{"optimizer": "sgd", **options}), steps=steps)


def require_equal(outcome: RunOutcome) -> None:
    """Fail unless (a) holds bitwise and (b) within its tolerances (DESIGN 6)."""
    assert outcome.differing == ()
    assert outcome.result["max_relative_error"] == BITWISE
    assert outcome.result["verified"] is True, outcome.result["whole_batch_error"]


def require_close(outcome: RunOutcome) -> None:
    """Fail unless both references hold within tolerances: the arithmetic itself is cut."""
    errors, whole = outcome.result["max_relative_error"], outcome.result["whole_batch_error"]
    assert outcome.result["verified"] is True, (errors, whole)
    assert 0.0 < errors["gradients"] < 1e-5
    assert whole["loss"] < 1e-6
    assert whole["parameters"] is None or whole["parameters"] < 1e-5
