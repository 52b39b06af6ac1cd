"""Errors of piper: everything a user can get wrong in a model, a strategy, a job or a run.

    InputError
    ├── ModelError          model name, config.json, annotation, capture   (exit 2)
    ├── StrategyError       strategy file, shorthand, directive, schedule  (exit 2)
    ├── JobError            sizes, cluster, GPUs, options                  (exit 2)
    └── DoesNotFitError     too much memory, with --require-fit            (exit 3)
    PiperError
    └── RunFailedError      a run that failed or differs from its reference (exit 5)

`simulator.errors.IllegalPlanError` (exit 4) is raised by the checker.
"""

from __future__ import annotations

from cost_models.errors import InputError, PiperError


class ModelError(InputError):
    """A model that cannot be found, built, annotated or captured."""


class StrategyError(InputError):
    """A strategy, directive or schedule that cannot be used."""


class JobError(InputError):
    """Sizes and options of a job that contradict each other or the cluster."""


class DoesNotFitError(InputError):
    """The plan needs more memory than a device has, and the user asked for a plan that fits."""

    code = "does_not_fit"
    exit_code = 3


class RunFailedError(PiperError):
    """A run that ended early, or whose numbers differ from what was asked to hold."""

    exit_code = 5


class CacheNotice(UserWarning):
    """The cache of captures did not help as it should; results are the same."""
