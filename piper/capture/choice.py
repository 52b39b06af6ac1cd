"""`KernelChoice`: which kernels a model is captured for, where frameworks differ; free of torch.

A kernel decides what is computed and what is kept for backward. The options, and whose kernels they are:

* attention, flash: one kernel each way; keeps queries, keys, values, result and one fp32 number per row (Dao
  2023, arXiv 2307.08691, section 3.1). On the CPU whatever torch takes there.
* attention, math: torch's unfused path, `_scaled_dot_product_attention_math`: scores in fp32, step by step.
* attention, eager: operator by operator in the compute dtype, as transformers' eager_attention_forward and
  Megatron-LM without its kernel: product, scale, mask, softmax in fp32, cast, dropout, product.
* attention, fused_softmax: Megatron-LM's core attention: scaled product, one kernel for mask and softmax,
  dropout, product; keeps 5 a s^2 b bytes (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1).
* norm, fused: RMS norm keeps its input and 1/rms per row (torch's `_fused_rms_norm`, also Apex and
  Transformer Engine). Unfused: the operators of torch's definition, one by one.
* activation, unfused: SwiGLU and its kin keep gate, activated gate and up projection. Fused: one kernel keeps
  gate and up projection only and activates again in backward (Megatron-LM's bias_swiglu; Liger's SiLUMul,
  arXiv 2410.10989).
* rotary, unfused: halves, products, sums and their concatenation. Fused: one kernel each way over queries and
  one over keys, which keeps nothing but the tables (Transformer Engine, Apex, Liger).
* projections, fused: one matrix for queries, keys and values, and one for gate and up projection, as
  Megatron-LM has them (linear_qkv, linear_fc1), also where the model's own file has them apart.
* cross_entropy, unfused: logits become fp32, log-softmax (kept, fp32), loss. Held: the same, while the
  training loop's variable keeps the logits alive through backward. Gathered: the logits of all ranks of tp
  are gathered first (kept as they arrive, and joined), and every rank computes the loss over the whole
  vocabulary, with the fp32 copy held: 20 bytes per logit at the peak, 16 where nothing is gathered. The OOM
  verdicts of Hagemann et al. 2023 (arXiv 2311.05610) tell the sum; of which tensors is not published.
  Vocabulary_parallel: Megatron-LM's loss over cut logits, which become fp32 and then, in place, their softmax
  (kept) and gradient (core/tensor_parallel/cross_entropy.py). Fused: one kernel over the logits as they are,
  whose forward writes their gradient in place (Transformer Engine, Liger); keeps that. Chunked: head and loss
  together, some rows at a time (Liger's fused linear cross-entropy); keeps the gradients of the hidden
  features and of the head's weights, never the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from cost_models.errors import require_known
from piper.errors import ModelError

CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("cuda", "cpu"),
    "attention": ("flash", "math", "eager", "fused_softmax"),
    "norm": ("fused", "unfused"),
    "activation": ("unfused", "fused"),
    "rotary": ("unfused", "fused"),
    "projections": ("separate", "fused"),
    "cross_entropy": ("unfused", "held", "gathered", "vocabulary_parallel", "fused", "chunked"),
}
"""The options of each field; the first is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """One option for each field of `CHOICES`.

    `device`: whose kernels run where torch has different ones: on a CPU dropout keeps its mask in the compute
    dtype, torch decides about attention, and RMS norm is never fused.
    """

    device: str = "cuda"
    attention: str = "flash"
    norm: str = "fused"
    activation: str = "unfused"
    rotary: str = "unfused"
    projections: str = "separate"
    cross_entropy: str = "unfused"

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            require_known(getattr(self, name), known, where="kernels", field=name, error=ModelError)

    def changed(self, options: Mapping[str, Any], *, where: str) -> Self:
        """Return this choice with some fields changed; raises ModelError naming `where`."""
        for name, value in options.items():
            require_known(name, list(CHOICES), where=where, field="kernels", error=ModelError)
            require_known(value, CHOICES[name], where=where, field=name, error=ModelError)
        return replace(self, **options)

    @property
    def key(self) -> str:
        """Return a text that two choices share only if they are equal (for the cache)."""
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())
