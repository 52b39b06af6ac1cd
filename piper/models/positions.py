"""Positions: rotary tables and their stretching, rotation, and the slopes of linear biases.

Sources: rotary embedding: Su et al. 2021 (arXiv 2104.09864); scaling of Llama 3.1: meta-llama/llama-models,
`apply_scaling`; yarn: Peng et al. 2023 (arXiv 2309.00071), sections 3.2 and 3.4; dynamic: the same, section
3.3; longrope: Ding et al. 2024 (arXiv 2402.13753); linear biases: Press et al. 2021 (arXiv 2108.12409).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from piper.capture.replaceable import replaceable
from piper.models.shape import RopeScaling, Rotary


def rope_tables(rotary: Rotary, *, positions: int, length: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [positions, dims / 2], computed in fp32, in the default dtype and device.

    Args:
        rotary: what is rotated, and how fast.
        positions: rows of the tables.
        length: of the sequences to come; some scalings ask whether it exceeds the original context.
    """
    if torch.get_default_device().type == "meta":
        shape = positions, rotary.dims // 2
        return torch.empty(shape), torch.empty(shape)
    frequencies = rope_frequencies(rotary, length=length)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin, dtype = angles.cos(), angles.sin(), torch.get_default_dtype()
    if rotary.scaling is not None and rotary.scaling.attention_factor != 1.0:
        cos, sin = cos * rotary.scaling.attention_factor, sin * rotary.scaling.attention_factor
    return cos.to(dtype), sin.to(dtype)


def rope_frequencies(rotary: Rotary, *, length: int) -> Tensor:
    """Return the angle per position of each rotated pair, [dims / 2] fp32; `length` as in `rope_tables`."""
    scaling = rotary.scaling
    if scaling is not None and scaling.kind == "dynamic":
        return _frequencies(_dynamic_theta(rotary, scaling, length=length), rotary.dims)
    frequencies = _frequencies(rotary.theta, rotary.dims)
    if scaling is None:
        return frequencies
    if scaling.kind == "longrope":
        long = length > scaling.original_context
        return frequencies / torch.tensor(scaling.long_factors if long else scaling.short_factors)
    return _STRETCHES[scaling.kind](frequencies, scaling, rotary)


@replaceable("rotary")
def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the leading features of x [microbatch, seq, ..., head_dim] in pairs; the rest stays.

    Args:
        x: queries or keys.
        cos, sin: [seq, 1, ..., dims / 2].
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + dims / 2). They leave as (i, i + dims / 2) all
            the same: what is reordered in queries and keys alike changes no score.
    """
    dims = 2 * cos.shape[-1]
    rest = () if dims == x.shape[-1] else (x[..., dims:],)
    x = x[..., :dims] if rest else x
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat((*turned, *rest), dim=-1)


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of each head's linear bias, [heads] in the default dtype and device.

    Powers of two take 2 ** (-8 i / heads); other counts fill up with every second slope of twice as many.
    """
    if torch.get_default_device().type == "meta":
        return torch.empty(heads)
    below = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    slopes += [2 ** (-4 * (2 * i + 1) / below) for i in range(heads - below)]
    return torch.tensor(slopes)


def _frequencies(theta: float, dims: int) -> Tensor:
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    return 1.0 / theta**exponents


def _dynamic_theta(rotary: Rotary, scaling: RopeScaling, *, length: int) -> float:
    stretch = max(1.0, scaling.factor * length / scaling.original_context - (scaling.factor - 1))
    return float(rotary.theta * stretch ** (rotary.dims / (rotary.dims - 2)))


def _linear(frequencies: Tensor, scaling: RopeScaling, rotary: Rotary) -> Tensor:
    return frequencies / scaling.factor


def _llama3(frequencies: Tensor, scaling: RopeScaling, rotary: Rotary) -> Tensor:
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScaling, rotary: Rotary) -> Tensor:
    def pair_that_turns(times: float) -> float:
        wavelength = scaling.original_context / (times * 2 * math.pi)
        return rotary.dims * math.log(wavelength) / (2 * math.log(rotary.theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dims - 1)
    pairs = torch.arange(rotary.dims // 2, dtype=torch.float32)
    stretched = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return stretched * frequencies / scaling.factor + (1 - stretched) * frequencies


_STRETCHES: dict[str, Callable[[Tensor, RopeScaling, Rotary], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
