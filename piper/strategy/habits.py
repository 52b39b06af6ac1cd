"""What a stack does unless the strategy says otherwise: its `strategy` section, read and checked.

Keys are those of the shorthand that describe a way of working (not degrees or sizes of a job), and

* vp: a number, or "layers": as many stages per pipeline rank as it has layers, where layers and microbatches
  divide evenly over the pipeline ranks (else one stage), and neither vp, schedule nor places are stated.
* overlap_param_gather: with buckets, a forward waits for the updated parameters of ZeRO-1 and 2 bucket by
  bucket (on), or for all of its stage (off, the default; Megatron-LM's --overlap-param-gather).
* etp: "tp": experts are cut over as many ranks as the rest, where there are ep and tp and no stated etp.
* selective: what recompute=selective means: attention (Korthikanti et al. 2022), or ops (torchtitan).
* activation_factor: what is kept from forward to backward, over what operations are known to keep: copies of
  a framework, from 1 to 2. pipeline_activation_factor: the same with pp > 1 (OneFlow double-buffers there).
* gradient_copy: fp32: without a pipeline (pp = 1) gradients are also held once more in fp32, as the published
  memory of DeepSpeed without its pipeline engine tells (bigscience, tr3m: 4 B per parameter in 9 layouts).
* gradient_sum: product: where gradients are summed over microbatches, products that make gradients of weights
  add to the sum as they end (Megatron-LM's gradient accumulation fusion); apart: a kernel of its own.
* framework_mb: 2^20 bytes of buffers that the framework holds on every device (DeepSpeed's buckets).
* gradient_dtype: in which gradients are summed over microbatches: fp32 (Megatron-LM's main_grad), bf16, fp16,
  or compute: as the job computes.
* reduce_dtype: in which they travel, where `replicate` does not say; the same, or narrower.
* gather_dtype: in which parameters travel: after an update, and before the use of cut ones.
* master_dtype: fp32, or none: the optimizer updates the parameters themselves.
* moment_dtype: of each moment of the optimizer.
* shard_dtype: in which cut parameters (ZeRO-3) are kept; fp32: they are their own masters (PyTorch's FSDP).

A shorthand overrides each key. A strategy file says all about parallelism itself: it takes only the dtypes,
overlap_param_gather, and what it leaves open of schedule and vp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cost_models.errors import nearest, require_known, require_positive_int, whole_number
from cost_models.ops import DTYPE_BYTES
from piper.errors import JobError
from piper.strategy.shorthand import Shorthand, read_value
from simulator.plan import StateDtypes
from simulator.plan.states import EIGHT_BITS, NO_MASTERS

COMPUTE = "compute"
FLOATS = ("fp32", "bf16", "fp16", COMPUTE)
DTYPES: dict[str, tuple[str, ...]] = {
    "gradient_dtype": FLOATS,
    "reduce_dtype": FLOATS,
    "gather_dtype": (*FLOATS, "fp8"),
    "master_dtype": ("fp32", NO_MASTERS),
    "moment_dtype": (*FLOATS, "fp8", "uint8"),
    "shard_dtype": FLOATS,
}
"""Keys of dtypes and their values."""
WAYS = ("vp", "zero", "sp", "schedule", "recompute", "async_tp", "offload", "bucket_mb", "prefetch")
"""Keys of the shorthand that a stack may state."""
OVERLAP = "overlap_param_gather"
ETP, SELECTIVE, FACTOR, COPY = "etp", "selective", "activation_factor", "gradient_copy"
SUM = "gradient_sum"
PIPELINE_FACTOR, FRAMEWORK = "pipeline_activation_factor", "framework_mb"
_CHOICES: dict[str, tuple[str, ...]] = {
    ETP: ("tp",),
    SELECTIVE: ("attention", "ops"),
    OVERLAP: ("on", "off"),
    COPY: ("none", "fp32"),
    SUM: ("apart", "product"),
}
HABITS = (*WAYS, *_CHOICES, FACTOR, PIPELINE_FACTOR, FRAMEWORK, *DTYPES)
_MOST_FACTOR = 2.0
ONE_LAYER = "layers"
_SUFFIX = "_dtype"
_SWITCHES = {True: "on", False: "off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Defaults of a stack.

    Args:
        ways: keys of the shorthand; None: not stated.
        layer_per_stage: vp is "layers".
        gathers_overlap: see `overlap_param_gather`; None: not stated.
        etp_is_tp: etp is "tp".
        selective: what recompute=selective means, or None: attention.
        gradient_copy: whether gradients are held once more in fp32 without a pipeline; None: not stated.
        sums_in_products: see `gradient_sum`; None: not stated.
        activation_factor, pipeline_activation_factor, framework_mb: None: not stated.
        dtypes: the stated ones, by key.
        chosen: keys whose values the user chose: no assumptions.
    """

    ways: Shorthand = field(default_factory=Shorthand)
    layer_per_stage: bool = False
    gathers_overlap: bool | None = None
    etp_is_tp: bool = False
    selective: str | None = None
    gradient_copy: bool | None = None
    sums_in_products: bool | None = None
    activation_factor: float | None = None
    pipeline_activation_factor: float | None = None
    framework_mb: int | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    chosen: frozenset[str] = frozenset()

    def states(self, compute: str, *, optimizer: str = "adamw") -> StateDtypes:
        """Return the dtypes of a training; raises JobError for gradients that travel wider than summed."""
        eight_bits = {"moment": EIGHT_BITS[optimizer]} if optimizer in EIGHT_BITS else {}
        found = StateDtypes.of(compute).changed(
            eight_bits
            | {
                name.removesuffix(_SUFFIX): compute if value == COMPUTE else value
                for name, value in self.dtypes.items()
            }
        )
        if DTYPE_BYTES[found.reduce] > DTYPE_BYTES[found.gradient]:
            raise JobError(
                where="strategy", field="strategy.reduce_dtype", value=found.reduce,
                rule=f"is wider than gradient_dtype = {found.gradient}, in which gradients are summed",
                fix=f"write reduce_dtype: {found.gradient}, or leave it out",
            )  # fmt: skip
        return found

    def factor(self, pp: int) -> float:
        """Return what is kept from forward to backward, over what operations are known to keep."""
        with_pipeline = self.pipeline_activation_factor if pp > 1 else None
        return with_pipeline or self.activation_factor or 1.0

    @property
    def assumed(self) -> dict[str, object]:
        """Return what holds for every strategy and was not chosen by the user."""
        stated: dict[str, object] = dict(self.dtypes)
        if self.gathers_overlap is not None:
            stated[OVERLAP] = _SWITCHES[self.gathers_overlap]
        if self.gradient_copy is not None:
            stated[COPY] = "fp32" if self.gradient_copy else "none"
        if self.sums_in_products is not None:
            stated[SUM] = "product" if self.sums_in_products else "apart"
        for name in (FACTOR, PIPELINE_FACTOR, FRAMEWORK):
            if getattr(self, name) is not None:
                stated[name] = getattr(self, name)
        return {name: value for name, value in stated.items() if name not in self.chosen}


def read_habits(
    sections: Iterable[tuple[str, Mapping[str, Any]]], *, chosen: frozenset[str] = frozenset()
) -> Habits:
    """Return the habits that sections state, (where, content); a later one overrides an earlier one.

    Raises: JobError or StrategyError for a key or value that is not known.
    """
    stated: dict[str, Any] = {}
    for where, section in sections:
        stated |= {name: _value(name, value, where=where) for name, value in section.items()}
    one_layer = stated.get("vp") == ONE_LAYER
    names = set(WAYS) - ({"vp"} if one_layer else set())
    return Habits(
        ways=Shorthand(**{name: value for name, value in stated.items() if name in names}),
        layer_per_stage=one_layer,
        gathers_overlap=None if OVERLAP not in stated else stated[OVERLAP] == "on",
        etp_is_tp=ETP in stated,
        selective=stated.get(SELECTIVE),
        gradient_copy=None if COPY not in stated else stated[COPY] == "fp32",
        sums_in_products=None if SUM not in stated else stated[SUM] == "product",
        activation_factor=stated.get(FACTOR),
        pipeline_activation_factor=stated.get(PIPELINE_FACTOR),
        framework_mb=stated.get(FRAMEWORK),
        dtypes={name: stated[name] for name in DTYPES if name in stated},
        chosen=chosen,
    )


def _value(name: str, value: object, *, where: str) -> object:
    at = f"strategy.{name}"
    text = _SWITCHES[value] if isinstance(value, bool) else str(value)
    if name not in HABITS:
        raise JobError(
            where=where, field=at, value=value, rule="is not known", fix=nearest(name, HABITS)
        )  # fmt: skip
    if name in DTYPES:
        require_known(text, DTYPES[name], where=where, field=at, error=JobError)
        return text
    if name in _CHOICES:
        require_known(text, _CHOICES[name], where=where, field=at, error=JobError)
        return text
    if name in {FACTOR, PIPELINE_FACTOR}:
        return _factor(text, field=at, where=where)
    if name == FRAMEWORK:
        number = whole_number(text)
        fix = "give 2^20 bytes, such as 1024"
        return require_positive_int(number, where=where, field=at, fix=fix, error=JobError)
    if name == "vp" and text == ONE_LAYER:
        return text
    return read_value(name, text, where=where)


def _factor(text: str, *, field: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= _MOST_FACTOR:
        raise JobError(
            where=where, field=field, value=text,
            rule=f"must be a number from 1 to {_MOST_FACTOR:g}", fix="write for example 1.2",
        )  # fmt: skip
    return number
