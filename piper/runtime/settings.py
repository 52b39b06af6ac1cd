"""What a run does beyond its plan: steps, seed, verification, how sums are made, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from cost_models.errors import require_known, require_positive, require_positive_int
from piper.errors import JobError
from piper.runtime.delays import Delays

_MOST_PADDING = 0.5
"""Lengths are drawn between all and none of a sequence."""

REDUCTIONS = ("native", "ordered")

LEARNING_RATES = {"adamw": 1e-3, "sgd": 1e-2, "momentum": 1e-2}
"""Defaults of `torch.optim.AdamW`, and ten times that for SGD, whose steps are not normalised."""

WEIGHT_DECAYS = {"adamw": 1e-2, "sgd": 0.0, "momentum": 0.0}
"""Defaults of `torch.optim`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """An elementwise optimizer.

    Args:
        name: "adamw", "sgd" (without momentum) or "momentum" (SGD with it).
        learning_rate: constant over the run.
        weight_decay: decoupled for AdamW; added to the gradient for SGD.
        beta1, beta2, epsilon: AdamW only; defaults of `torch.optim.AdamW`.
        momentum: of "momentum" only (0.9: Sutskever et al. 2013 and the examples of torch.optim.SGD).
    """

    name: str
    learning_rate: float
    weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require_known(self.name, list(LEARNING_RATES), where="piper run", field="optimizer", error=JobError)
        require_positive(
            self.learning_rate,
            where="piper run",
            field="learning rate",
            fix="give for example 1e-3",
            error=JobError,
        )


def default_optimizer(name: str) -> OptimizerSettings:
    """Return the settings of an optimizer that was only named; raises JobError for one we cannot run."""
    require_known(name, list(LEARNING_RATES), where="piper run", field="optimizer", error=JobError)
    return OptimizerSettings(name=name, learning_rate=LEARNING_RATES[name], weight_decay=WEIGHT_DECAYS[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Options of a run; equal on all ranks.

    Args:
        steps: optimizer steps.
        seed: of initial values, data and dropout.
        verify: compare every step with one process (DESIGN 6).
        reductions: "native": as the backend sums; "ordered": in rank order, bitwise equal to one process.
        timeout_s: how long a rank may be silent.
        optimizer: what UPDATE does.
        padding: share of the tokens that are padding, 0 to 0.5, at the ends of sequences.
        record: keep the times of tasks.
        delays: sleep before every task, each stream in a thread of its own (to find missing waits).
    """

    steps: int
    optimizer: OptimizerSettings
    seed: int = 0
    verify: bool = False
    reductions: str = "native"
    timeout_s: float = field(default=600.0)
    padding: float = 0.0
    record: bool = True
    delays: Delays | None = None

    def __post_init__(self) -> None:
        require_positive_int(
            self.steps, where="piper run", field="--steps", fix="give a number of steps", error=JobError
        )
        require_positive(
            self.timeout_s, where="piper run", field="--timeout", fix="give seconds", error=JobError
        )
        if not 0.0 <= self.padding <= _MOST_PADDING:
            raise JobError(
                where="piper run",
                field="--padding",
                value=self.padding,
                rule=f"must be between 0 and {_MOST_PADDING}",
                fix="give for example 0.2",
            )
        require_known(self.reductions, REDUCTIONS, where="piper run", field="--reductions", error=JobError)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise JobError(
                where="piper run",
                field="--seed",
                value=self.seed,
                rule="must be a whole number >= 0",
                fix="leave it out for 0",
            )
