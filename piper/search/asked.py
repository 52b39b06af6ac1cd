"""What a request allows, and what of it contradicts what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cost_models.units import format_bytes
from piper.errors import JobError
from piper.search.choices import Choices, choices_of
from piper.search.conflicts import Constraint, smallest_conflict, written
from piper.search.space import Space

if TYPE_CHECKING:
    from piper.search.evaluate import Evaluator
    from piper.search.search import SearchRequest

_PIN, _FORBID, _VALUES, _MICRO_BATCH, _WHY_NOT = "--pin", "--forbid", "values", "--micro-batch", "--why-not"
_MOST_REASONS = 3


def choices_asked(
    request: SearchRequest, evaluator: Evaluator, *, seeds: Mapping[str, tuple[int | str, ...]]
) -> Choices:
    """Return the values of every dimension; `seeds` instead of ours where the request states none.

    Raises: JobError for a dimension or value that does not exist, and for one that is stated twice.
    """
    pin = dict(request.pin)
    if request.micro_batch is not None:
        if pin.get("micro_batch", str(request.micro_batch)) != str(request.micro_batch):
            raise JobError(
                where="--micro-batch", field="micro_batch", value=request.micro_batch,
                rule=f"contradicts --pin micro_batch={pin['micro_batch']}", fix="give it once, or equal",
            )  # fmt: skip
        pin["micro_batch"] = str(request.micro_batch)
    limits = evaluator.limits
    return choices_of(
        gpus=(evaluator.job.gpus or 1,),
        num_units=limits.num_units,
        experts=limits.experts,
        cuts_tensors=limits.cuts_tensors,
        cuts_sequences=limits.cuts_sequences,
        pin=pin,
        forbid=request.forbid,
        values=dict(seeds) | request.values,
    )


def infeasible(request: SearchRequest, evaluator: Evaluator) -> JobError:
    """Return the error of a space without strategies: what contradicts, and which rules are broken."""
    conflict = smallest_conflict(_constraints(request), lambda chosen: _allows(request, evaluator, chosen))
    reasons = _reasons(request, evaluator, conflict)
    gpus = f"{evaluator.job.gpus} GPUs"
    return JobError(
        where="search",
        field="space",
        value=f"{written(conflict)} on {gpus}" if conflict else gpus,
        rule=f"leave no legal strategy{reasons}",
        fix=f"leave out one of {written(conflict)}, or change --gpus or --global-batch"
        if conflict
        else "change --global-batch or --gpus",
    )


def why_illegal(request: SearchRequest, evaluator: Evaluator) -> str:
    """Return why no strategy has the values of `--why-not`: rules, or what the request states."""
    wanted = [(_WHY_NOT, name, value) for name, value in request.why_not.items()]
    everything = [*wanted, *_constraints(request)]
    if _allows(request, evaluator, everything):
        return "it says the same as a strategy without them: they change nothing there"
    conflict = smallest_conflict(everything, lambda chosen: _allows(request, evaluator, chosen))
    stated = [constraint for constraint in conflict if constraint[0] != _WHY_NOT]
    reasons = _reasons(request, evaluator, conflict)
    if stated:
        return f"{written(stated)} leaves it out{reasons}"
    values = " and ".join(f"{name}={value}" for _, name, value in conflict)
    return f"no legal strategy has {values} on {evaluator.job.gpus} GPUs{reasons}"


def memory_conflict(request: SearchRequest, evaluator: Evaluator) -> dict[str, str] | None:
    """Return constraints under which nothing can fit by the bounds, none of which could be left out.

    Returns: {constraints, reason}; without constraints where nothing fits with none of them either; None
        where something might fit by its bounds.
    """

    def may_fit(chosen: Sequence[Constraint]) -> bool:
        space = _space_of(request, evaluator, chosen)
        return space is not None and bool(np.isfinite(evaluator.cells(space).bound_ns).any())

    kept = _constraints(request)
    if may_fit(kept):
        return None
    if not may_fit(()):
        spare = f", with {format_bytes(request.reserve_bytes)} left free" if request.reserve_bytes else ""
        reason = f"nothing fits on {evaluator.job.gpus} GPUs, whatever is allowed{spare}"
        return {"constraints": "", "reason": reason}
    for constraint in list(kept):
        fewer = [other for other in kept if other != constraint]
        if not may_fit(fewer):
            kept = fewer
    reason = f"{written(kept)} leave nothing that fits on {evaluator.job.gpus} GPUs, by the bounds"
    return {"constraints": written(kept), "reason": reason}


def _constraints(request: SearchRequest) -> list[Constraint]:
    """Return what a request states about its space, one by one."""
    size = request.micro_batch
    return [
        *((_PIN, name, value) for name, value in request.pin.items()),
        *((_FORBID, name, value) for name, value in request.forbid),
        *((_VALUES, name, "/".join(map(str, listed))) for name, listed in request.values.items()),
        *([] if size is None else [(_MICRO_BATCH, "micro_batch", str(size))]),
    ]


def _allows(request: SearchRequest, evaluator: Evaluator, chosen: Sequence[Constraint]) -> bool:
    """Return whether any strategy is legal under some constraints of a request."""
    space = _space_of(request, evaluator, chosen)
    return space is not None and space.num_candidates > 0


def _space_of(request: SearchRequest, evaluator: Evaluator, chosen: Sequence[Constraint]) -> Space | None:
    """Return the space of a request with some of its constraints only; None where they pin two values."""
    pins: dict[str, str] = {}
    for option, name, value in chosen:
        if option in {_PIN, _WHY_NOT, _MICRO_BATCH} and pins.setdefault(name, value) != value:
            return None
    values = [name for option, name, _ in chosen if option == _VALUES]
    if any(name in pins and pins[name] not in map(str, request.values[name]) for name in values):
        return None
    fewer = replace(
        request,
        pin=pins,
        forbid=tuple((name, value) for option, name, value in chosen if option == _FORBID),
        values={name: request.values[name] for name in values},
        micro_batch=None,
    )
    return evaluator.space(choices_asked(fewer, evaluator, seeds={}))


def _reasons(request: SearchRequest, evaluator: Evaluator, conflict: Sequence[Constraint]) -> str:
    """Return the rules that strategies under a conflict break, as the end of a sentence."""
    space = _space_of(request, evaluator, conflict)
    found = sorted({reason for _, reason in space.illegal}) if space is not None else []
    return f": {'; '.join(found[:_MOST_REASONS])}" if found else ""
