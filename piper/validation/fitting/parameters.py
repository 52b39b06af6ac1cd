"""The parameters that are fitted: which figure, how well it is known beforehand, and its bounds."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cost_models.catalogue import figure_of
from cost_models.training import SECTION
from piper.validation.overlay import Overlay

_NUMBER = re.compile(r"^([\d.eE+-]+)(.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A figure of the catalogue.

    Args:
        name: as in `piper.validation.overlay`.
        prior: what is expected before any run is seen, in the unit of the file: never what a fit has found.
        sigma: of the logarithm of the value over `prior`, beforehand.
        low, high: bounds of the value.
        of: the figure that the value is a factor of, whose product low and high bound; None: itself.
    """

    name: str
    prior: str | float
    sigma: float
    low: float
    high: float
    of: str | None = None

    def scaled(self, factor: float) -> str | float:
        """Return the prior times `factor`, in the unit of the file."""
        number, unit = _split(self.prior)
        return f"{number * factor:.4g}{unit}" if unit else float(f"{number * factor:.4g}")

    def factors(self) -> tuple[float, float]:
        """Return the bounds of the factor."""
        number, _ = _split(self.prior)
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
        found.append(Parameter(name=full, prior=1.0, sigma=sigma, low=low, high=high, of=of))
    return found


def _cluster(name: str, **shares: float) -> list[Parameter]:
    prefix = f"cluster:{name}:inter_collectives"
    return [
        Parameter(name=f"{prefix}.{key}", prior=share, sigma=0.8, low=0.03, high=1.0)
        for key, share in shares.items()
    ]


_COST: dict[str, tuple[str | float, float, float, float]] = {
    "communication_overhead": ("30us", 0.5, 2.0, 400.0),
    "collective_skew": ("20us", 0.7, 0.1, 400.0),
    "pass_wait": ("0.3ms", 0.5, 0.02, 30.0),
    "step_wait": ("3ms", 0.8, 0.05, 100.0),
    "memory_slowdown": (1.0, 0.35, 0.4, 6.0),
    "collective_slowdown": (1.0, 0.3, 0.5, 20.0),
    "attention_slowdown": (1.0, 0.2, 0.6, 3.0),
}
"""Keys of a stack's `cost` -> prior, sigma, low, high."""
_LAUNCHES = (0.4, 0.3, 120.0)


def _stack(name: str, launch: str, *keys: str) -> list[Parameter]:
    sigma, low, high = _LAUNCHES
    prefix = f"stack:{name}:cost"
    launches = Parameter(name=f"{prefix}.launch_overhead", prior=launch, sigma=sigma, low=low, high=high)
    return [launches, *_release(name, *keys)]


def _release(name: str, *keys: str) -> list[Parameter]:
    """Return what is apart for a stack that extends another's file."""
    found = []
    for key in keys:
        prior, sigma, low, high = _COST[key]
        full = f"stack:{name}:cost.{key}"
        found.append(Parameter(name=full, prior=prior, sigma=sigma, low=low, high=high))
    return found


_PASS, _STEP, _MEMORY = "pass_wait", "step_wait", "memory_slowdown"
_KERNELS = (_MEMORY, "collective_slowdown")

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
    *_gpu("b300-sxm", matmul__efficiency=(0.15, 0.3, 0.85)),
    *_gpu("v100-sxm2-32gb", matmul__efficiency=(0.1, 0.45, 0.85)),
    *_cluster("vtrain-a100", ring_efficiency=0.9, transfer_efficiency=0.8),
    *_cluster("aleph-alpha-a100", ring_efficiency=0.9, transfer_efficiency=0.8),
    *_cluster("selene", transfer_efficiency=0.8),
    *_cluster("zero-bubble-a100", transfer_efficiency=0.7),
    *_cluster("v100-8gpu-100g", ring_efficiency=0.82),
    *_cluster("jean-zay-v100", ring_efficiency=0.8),
    *_cluster("mosaicml-a100-40gb", ring_efficiency=0.85),
    *_cluster("mosaicml-a100-80gb", ring_efficiency=0.85),
    *_stack("megatron-2021", "10us", _PASS, _STEP, *_KERNELS),
    *_stack("megatron-deepspeed", "14us", "communication_overhead", "collective_skew", _PASS, _STEP, _MEMORY),
    *_stack("aleph-alpha-2023", "12us", "collective_skew", _PASS, _STEP, _MEMORY),
    *_stack("llm-foundry", "8us", _PASS, _STEP, *_KERNELS, "attention_slowdown"),
    *_stack("torchtitan", "8us", _STEP, _MEMORY),
    *_stack("torchtitan-compile", "4us", _STEP, *_KERNELS),
    *_stack("megatron-core-2024", "5us", _PASS, _STEP, *_KERNELS),
    *_release("nemo-2025", _PASS),
    *_stack("megatron-bridge-25", "5us", _PASS, _STEP, *_KERNELS),
    *_release("megatron-bridge-26.02", _PASS),
    *_release("megatron-bridge-26.06", _PASS, *_KERNELS),
    *_stack("megatron-lm-2026", "5us", _PASS, _STEP, *_KERNELS),
    *_stack("oneflow-gpt", "2us", *_KERNELS),
    *_stack("deepspeed-zero3-2021", "10us", "collective_slowdown"),
    *_stack("maxtext-2025", "1us", *_KERNELS),
)
"""All of them. Priors: efficiencies as measured by benchmarks, host times within a factor of 1.5 to 2.2."""
