"""The parameters that are fitted: which figure, how well it is known beforehand, and its bounds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cost_models.catalogue import figure_of
from cost_models.training import SECTION
from piper.validation.overlay import Overlay

_NUMBER = re.compile(r"^([\d.eE+-]+)(.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A figure of the catalogue, or each of a list of figures, times a factor.

    Args:
        name: as in `piper.validation.overlay`.
        sigma: of the logarithm of the factor, beforehand.
        low, high: bounds of the value (of the factor for a list).
        start: the value where the file has none.
        of: the figure that the value is a factor of, whose product low and high bound; None: itself.
    """

    name: str
    sigma: float
    low: float
    high: float
    start: str | float | None = None
    of: str | None = None

    def value(self) -> Any:
        """Return what the file says, or `start`."""
        found = figure_of(self.name)
        return self.start if found is None else found

    def scaled(self, factor: float) -> Any:
        """Return the value times `factor`, in the unit of the file."""
        value = self.value()
        if isinstance(value, list):
            return [min(1.0, float(f"{item * factor:.4g}")) for item in value]
        number, unit = _split(value)
        return f"{number * factor:.4g}{unit}" if unit else float(f"{number * factor:.4g}")

    def factors(self) -> tuple[float, float]:
        """Return the bounds of the factor."""
        value = self.value()
        number = 1.0 if isinstance(value, list) else _split(value)[0]
        if self.of is not None:
            scaled = figure_of(self.of)
            number *= 1.0 if isinstance(scaled, list) else _split(scaled)[0]
        return self.low / number, self.high / number


def _split(value: str | float) -> tuple[float, str]:
    if not isinstance(value, str):
        return float(value), ""
    found = _NUMBER.match(value)
    return (float(found.group(1)), found.group(2)) if found else (float("nan"), "")


def overlay_of(parameters: tuple[Parameter, ...], factors: list[float]) -> Overlay:
    """Return the values of parameters."""
    return tuple((p.name, p.scaled(factor)) for p, factor in zip(parameters, factors, strict=True))


def _gpu(name: str, **figures: tuple[float, float, float]) -> list[Parameter]:
    found = []
    for key, (sigma, low, high) in figures.items():
        dotted = key.replace("__", ".")
        full = f"gpu:{name}:{SECTION}.{dotted}"
        of = f"gpu:{name}:{dotted}"
        found.append(Parameter(name=full, sigma=sigma, low=low, high=high, start=1.0, of=of))
    return found


def _cluster(name: str, *keys: str) -> list[Parameter]:
    prefix = f"cluster:{name}:inter_collectives"
    return [Parameter(name=f"{prefix}.{key}", sigma=0.4, low=0.05, high=1.0) for key in keys]


_HOST = {
    "launch_overhead": (0.4, 0.3, 120.0, None),
    "communication_overhead": (0.5, 2.0, 400.0, "30us"),
    "pass_wait": (0.5, 0.02, 30.0, "0.3ms"),
    "step_wait": (0.8, 0.05, 100.0, "3ms"),
}
_SLOWDOWNS = {
    "memory": (0.35, 0.4, 6.0),
    "collective": (0.3, 0.5, 20.0),
    "matmul": (0.07, 0.8, 1.5),
    "attention": (0.2, 0.6, 3.0),
}


def _stack(name: str, *keys: str) -> list[Parameter]:
    found = []
    for key in keys:
        if key in _HOST:
            sigma, low, high, start = _HOST[key]
            found.append(
                Parameter(name=f"stack:{name}:cost.{key}", sigma=sigma, low=low, high=high, start=start)
            )
        else:
            sigma, low, high = _SLOWDOWNS[key]
            full = f"stack:{name}:cost.{key}_slowdown"
            found.append(Parameter(name=full, sigma=sigma, low=low, high=high, start=1.0))
    return found


_LAUNCH, _MESSAGE, _PASS, _STEP = "launch_overhead", "communication_overhead", "pass_wait", "step_wait"
_RING, _TRANSFER = "ring_efficiency", "transfer_efficiency"
_KERNELS = ("memory", "collective")

PARAMETERS: tuple[Parameter, ...] = (
    *_gpu(
        "a100-sxm-80gb",
        matmul__efficiency=(0.06, 0.62, 0.84),
        matmul__batched_efficiency=(0.2, 0.15, 0.9),
        matmul__misaligned_slowdown=(0.25, 1.1, 5.0),
        matmul__latency=(0.4, 1.0, 20.0),
        attention__kernels__flash1__efficiency=(0.15, 0.15, 0.6),
        attention__kernels__flash2__efficiency=(0.15, 0.3, 0.72),
    ),
    *_gpu(
        "h100-sxm",
        matmul__efficiency=(0.06, 0.55, 0.84),
        matmul__dtype_efficiency__fp8=(0.1, 1.2, 1.95),
        attention__kernels__flash2__efficiency=(0.25, 0.12, 0.5),
        attention__kernels__cudnn__efficiency=(0.15, 0.3, 0.7),
        grouped_matmul__efficiency=(0.2, 0.6, 1.6),
    ),
    *_gpu(
        "b200-sxm",
        matmul__efficiency=(0.1, 0.38, 0.75),
        matmul__dtype_efficiency__fp8=(0.15, 1.1, 2.2),
        matmul__dtype_efficiency__mxfp8=(0.15, 1.1, 2.2),
        matmul__dtype_efficiency__nvfp4=(0.15, 1.3, 4.0),
        attention__kernels__cudnn__efficiency=(0.15, 0.25, 0.75),
        grouped_matmul__efficiency=(0.25, 0.5, 2.2),
    ),
    *_gpu("gb200", matmul__efficiency=(0.15, 0.3, 0.85)),
    *_gpu("gb300", matmul__efficiency=(0.15, 0.3, 0.85)),
    *_gpu("b300-sxm", matmul__efficiency=(0.15, 0.3, 0.85)),
    *_gpu(
        "v100-sxm2-32gb",
        matmul__efficiency=(0.1, 0.45, 0.85),
        matmul__batched_efficiency=(0.3, 0.1, 0.8),
    ),
    *_cluster("vtrain-a100", _RING, _TRANSFER),
    *_cluster("aleph-alpha-a100", _RING, _TRANSFER),
    *_cluster("selene", _TRANSFER),
    *_cluster("zero-bubble-a100", _TRANSFER),
    *_cluster("v100-8gpu-100g", _RING),
    *_cluster("jean-zay-v100", _RING),
    *_cluster("mosaicml-a100-40gb", _RING),
    *_cluster("mosaicml-a100-80gb", _RING),
    *_stack("megatron-2021", _LAUNCH, _PASS, _STEP, *_KERNELS),
    *_stack("megatron-deepspeed", _LAUNCH, _MESSAGE, _PASS, _STEP, *_KERNELS),
    *_stack("zero-bubble-2023", _LAUNCH, _PASS, _STEP, "memory"),
    *_stack("aleph-alpha-2023", _LAUNCH, _PASS, _STEP, *_KERNELS),
    *_stack("llm-foundry", _LAUNCH, _PASS, _STEP, *_KERNELS, "attention"),
    *_stack("torchtitan", _LAUNCH, _STEP, "memory"),
    *_stack("torchtitan-compile", _LAUNCH, _STEP, *_KERNELS),
    *_stack("megatron-core-2024", _LAUNCH, _PASS, _STEP, *_KERNELS, "matmul"),
    *_stack("nemo-2025", _LAUNCH, _PASS, _STEP, *_KERNELS, "matmul"),
    *_stack("megatron-bridge-25", _LAUNCH, _PASS, _STEP, *_KERNELS, "matmul"),
    *_stack("megatron-bridge-26.02", _LAUNCH, _PASS, _STEP, *_KERNELS, "matmul"),
    *_stack("megatron-bridge-26.04", _LAUNCH, _PASS, _STEP, *_KERNELS, "matmul"),
    *_stack("megatron-lm-2026", _LAUNCH, _PASS, _STEP, *_KERNELS, "matmul"),
    *_stack("oneflow-gpt", _LAUNCH, *_KERNELS),
    *_stack("deepspeed-zero3-2021", _LAUNCH, "collective"),
    *_stack("maxtext-2025", _LAUNCH, *_KERNELS),
)
"""All of them. Priors: efficiencies as measured by benchmarks, host times within a factor of 1.5 to 2.2."""
