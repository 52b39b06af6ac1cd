"""A cluster file and one measured job -> a file that predicts it, within bounds, and what explains the rest.

[Note: anchoring to a timeline]
Factors of computation and communication are measured over predicted seconds of these tasks; the factor of the
host is then the one whose step time is the measured one. A log tells only the step time: all three factors
are then equal, as far as their bounds allow.
"""

from __future__ import annotations

import math
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models import load_stack
from cost_models.calibration.anchor import BOUNDS, bounded, slower
from cost_models.documents import UnreadableError, read_text, yaml_text
from piper.errors import JobError
from piper.predict import predict_plan
from piper.report.difference import Difference, difference
from piper.report.result import Result
from simulator.plan import Plan

Content = dict[str, Any]
_ROUNDS = 12
_CLOSE = 1e-3

_STEP_TIMES = (
    (r"elapsed time per iteration \(ms\):\s*([\d.]+)", 1e-3),  # Megatron-LM
    (r"train_step_timing in s:\s*([\d.]+)", 1.0),  # NeMo
    (r"iter(?:ation)? time \(s\):\s*([\d.]+)", 1.0),  # DeepSpeed
    (r"step[_ ]time_ms\"?[:=]?\s*([\d.]+)", 1e-3),
    (r"step[_ ]time\"?[:=]?\s*([\d.]+)\s*ms", 1e-3),
    (r"step[_ ]time(?:_s)?\"?[:=]?\s*([\d.]+)", 1.0),
)
"""How logs write the time of a step, and seconds in its unit; the first that occurs counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchored:
    """What one measured job says about a cluster file.

    Args:
        content: of the new file.
        factors: by name of `BOUNDS`.
        measured_s, before_s, after_s: step time: measured, predicted by the old file and by the new one.
        before: by kind of task, None for a log.
    """

    content: Content
    factors: Mapping[str, float]
    measured_s: float
    before_s: float
    after_s: float
    before: Difference | None

    @property
    def at_bounds(self) -> tuple[str, ...]:
        """Return the factors that their bounds held back."""
        return tuple(name for name, factor in self.factors.items() if factor in BOUNDS[name])


def anchor_to_result(content: Content, plan: Plan, measured: Result, *, stack: str) -> Anchored:
    """Anchor to a recorded run of `plan`; see [Note: anchoring to a timeline]. Raises as `difference`."""
    predict = _Predictor(content=content, plan=plan, stack=stack)
    before = difference(predict.result({}), measured)
    factors = {name: bounded(name, before.factors[name] or 1.0) for name in ("compute", "communication")} | {
        "host": 1.0
    }
    if not content["gpu"]["chip"]["asynchronous"]:  # calling is running: the host is part of computation
        factors["host"] = bounded("host", factors["compute"])
    else:
        factors["host"] = _solve(
            lambda factor: predict.step_s(factors | {"host": factor}), before.measured_s, name="host"
        )
    return predict.anchored(factors, measured_s=before.measured_s, before=before)


def anchor_to_step_time(content: Content, plan: Plan, measured_s: float, *, stack: str) -> Anchored:
    """Anchor to the step time of a log; see [Note: anchoring to a timeline]."""
    predict = _Predictor(content=content, plan=plan, stack=stack)

    def alike(factor: float) -> dict[str, float]:
        return {name: bounded(name, factor) for name in BOUNDS}

    factor = _solve(lambda factor: predict.step_s(alike(factor)), measured_s, name="communication")
    return predict.anchored(alike(factor), measured_s=measured_s, before=None)


def step_time_of_log(path: str) -> float:
    """Return the median step time of a training log without its first entry; raises JobError."""
    try:
        text = read_text(Path(path))
    except UnreadableError as problem:
        raise _no_log(problem.place(path), path, problem.rule) from None
    for pattern, unit_s in _STEP_TIMES:
        found = [float(number) * unit_s for number in re.findall(pattern, text)]
        if found:
            return statistics.median(found[1:] or found)
    raise _no_log(path, path, "has no step times that we know")


def _no_log(where: str, value: str, rule: str) -> JobError:
    return JobError(
        where=where, field="--from-log", value=value, rule=rule,
        fix="give a log with lines such as `elapsed time per iteration (ms): 123.4` or `step_time_s: 0.1234`",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Predictor:
    content: Content
    plan: Plan
    stack: str

    def result(self, factors: Mapping[str, float]) -> Result:
        """Return the prediction of the file scaled by factors."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cluster.yaml"
            path.write_text(yaml_text(self.scaled(factors)), encoding="utf-8")
            found = predict_plan(self.plan, cluster=str(path), stack=self.stack)
        return Result(name="prediction", summary=found.result, timeline=found.timeline, plan=self.plan)

    def scaled(self, factors: Mapping[str, float]) -> Content:
        every = dict.fromkeys(BOUNDS, 1.0) | dict(factors)
        launch_s = load_stack(self.stack).launch_overhead_s
        return slower(self.content, every, stack=self.stack, launch_s=launch_s)

    def step_s(self, factors: Mapping[str, float]) -> float:
        return self.result(factors).step_time_s

    def anchored(
        self, factors: Mapping[str, float], *, measured_s: float, before: Difference | None
    ) -> Anchored:
        source = ", ".join(f"{name} x {factor:.3g}" for name, factor in factors.items())
        content = self.scaled(factors)
        content["source"] = f"{content['source']} Anchored to one measured job: {source}"
        return Anchored(
            content=content, factors=factors, measured_s=measured_s, before=before,
            before_s=self.step_s({}), after_s=self.step_s(factors),
        )  # fmt: skip


def _solve(step_s: Callable[[float], float], measured_s: float, *, name: str) -> float:
    """Return the factor within bounds whose step is as long as measured; more work never takes less time."""
    low, high = BOUNDS[name]
    if step_s(low) >= measured_s:
        return low
    if step_s(high) <= measured_s:
        return high
    for _ in range(_ROUNDS):
        middle = math.sqrt(low * high)
        found = step_s(middle)
        if abs(found / measured_s - 1) < _CLOSE:
            return middle
        low, high = (middle, high) if found < measured_s else (low, middle)
    return math.sqrt(low * high)
