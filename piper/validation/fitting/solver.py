"""Compositions and parameters -> factors: damped Gauss-Newton with a robust loss, bounds and priors."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models.catalogue import names_below
from piper.predict import load_hardware
from piper.validation.fitting.composition import Atom, Composition, seconds_of
from piper.validation.fitting.parameters import Parameter, overlay_of
from piper.validation.overlay import overlaid

Floats = npt.NDArray[np.float64]
Hardware = tuple[str, str, tuple[tuple[str, str], ...]]

ROBUST = 0.04
"""Relative errors beyond this count linearly (soft L1)."""
PRIOR = 0.025
"""How much a deviation of one sigma counts, as a relative error of one run."""
_FEW_RUNS = 30
"""Sources with more runs weigh less each, by the fourth root."""
_STEP = 0.02
_LARGEST = 0.5
_TRIES = 6
_ENOUGH = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Runs with the same hardware.

    Args:
        counts: [runs, atoms].
        measured_s, weight: [runs].
        touched: numbers of the parameters that change it.
    """

    hardware: Hardware
    atoms: tuple[Atom, ...]
    counts: Floats
    measured_s: Floats
    weight: Floats
    touched: frozenset[int]


def fit(
    compositions: Sequence[Composition],
    parameters: tuple[Parameter, ...],
    *,
    iterations: int = 12,
    report: Callable[[str], object] = lambda _: None,
) -> list[float]:
    """Return the factor of every parameter.

    Args:
        compositions: of the runs to fit.
        parameters: what may change.
        iterations: at most.
        report: called with the progress.
    """
    blocks = _blocks(compositions, parameters)
    limits = np.log(np.array([p.factors() for p in parameters]))
    found = np.clip(np.zeros(len(parameters)), limits[:, 0] + 1e-9, limits[:, 1] - 1e-9)
    sigmas = np.array([p.sigma for p in parameters])

    def times(values: Floats, block: _Block) -> Floats:
        with overlaid(overlay_of(parameters, [math.exp(v) for v in values])):
            _, cost_model = load_hardware(block.hardware[0], block.hardware[1], settings=block.hardware[2])
        prices: Floats = np.array([seconds_of(atom, cost_model) for atom in block.atoms])
        return np.asarray(block.counts @ prices)

    def residuals(values: Floats, of_blocks: list[Floats]) -> Floats:
        errors = [
            block.weight * np.log(np.maximum(seconds, 1e-9) / block.measured_s)
            for block, seconds in zip(blocks, of_blocks, strict=True)
        ]
        return np.concatenate([_softened(np.concatenate(errors)), PRIOR * values / sigmas])

    seconds = [times(found, block) for block in blocks]
    residual = residuals(found, seconds)
    cost, damping = float(residual @ residual), 1e-3
    for iteration in range(iterations):
        slopes = np.zeros((len(residual), len(found)))
        for number in range(len(found)):
            step = _STEP if found[number] + _STEP < limits[number, 1] else -_STEP
            moved = found.copy()
            moved[number] += step
            changed = [
                times(moved, block) if number in block.touched else before
                for block, before in zip(blocks, seconds, strict=True)
            ]
            slopes[:, number] = (residuals(moved, changed) - residual) / step
        before = cost
        for _ in range(_TRIES):
            candidate = _stepped(found, slopes, residual, limits=limits, damping=damping)
            tried = [times(candidate, block) for block in blocks]
            after = residuals(candidate, tried)
            if float(after @ after) < cost:
                found, seconds, residual, cost = candidate, tried, after, float(after @ after)
                damping = max(damping / 5, 1e-5)
                break
            damping *= 5
        report(f"iteration {iteration + 1}: {cost:.4f}")
        if before - cost < _ENOUGH * before:
            break
    return [math.exp(value) for value in found]


def _blocks(compositions: Sequence[Composition], parameters: tuple[Parameter, ...]) -> list[_Block]:
    by_hardware: dict[Hardware, list[Composition]] = defaultdict(list)
    for composition in compositions:
        by_hardware[composition.hardware].append(composition)
    sizes = Counter(composition.source for composition in compositions)
    found = []
    for hardware, listed in by_hardware.items():
        atoms = tuple(dict.fromkeys(atom for composition in listed for atom in composition.counts))
        number = {atom: index for index, atom in enumerate(atoms)}
        counts = np.zeros((len(listed), len(atoms)))
        for row, composition in enumerate(listed):
            for atom, count in composition.counts.items():
                counts[row, number[atom]] = count
        names = names_below(hardware[0], hardware[1])
        found.append(
            _Block(
                hardware=hardware,
                atoms=atoms,
                counts=counts,
                measured_s=np.array([composition.measured_s for composition in listed]),
                weight=np.array([(_FEW_RUNS / sizes[c.source]) ** 0.25 for c in listed]),
                touched=frozenset(
                    index for index, p in enumerate(parameters) if p.name.rsplit(":", 1)[0] in names
                ),
            )
        )
    return found


def _softened(errors: Floats) -> Floats:
    size = np.sqrt(2 * (np.sqrt(1 + (errors / ROBUST) ** 2) - 1)) * ROBUST
    return np.asarray(np.sign(errors) * size)


def _stepped(found: Floats, slopes: Floats, residual: Floats, *, limits: Floats, damping: float) -> Floats:
    """Return where a damped step leads; parameters that would leave their bounds stay."""
    matrix, gradient = slopes.T @ slopes, slopes.T @ residual
    matrix += damping * np.diag(np.diag(matrix) + 1e-9)
    below = (found <= limits[:, 0] + 1e-8) & (gradient > 0)
    above = (found >= limits[:, 1] - 1e-8) & (gradient < 0)
    free = ~(below | above)
    step = np.zeros(len(found))
    step[free] = -np.linalg.solve(matrix[np.ix_(free, free)], gradient[free])
    return np.clip(found + np.clip(step, -_LARGEST, _LARGEST), limits[:, 0], limits[:, 1])
