"""Which stack a published run was made with, by the framework and the date that its row names."""

from __future__ import annotations

import re

from piper.validation.rows import PublishedRow

AUTO = "auto"

STACKS = (
    (r"megatron-bridge.*26\.(0[6-9]|1)", "megatron-bridge-26.06"),
    (r"megatron-bridge.*26\.0", "megatron-bridge-26.02"),
    (r"megatron-bridge", "megatron-bridge-25"),
    (r"megatron-lm @|transformerengine|transformer engine", "megatron-lm-2026"),
    (r"nemo", "nemo-2025"),
    (r"megatron-core", "megatron-core-2024"),
    (r"zero-bubble|zerobubble", "zero-bubble-2023"),
    (r"megatron-deepspeed", "megatron-deepspeed"),
    (r"deepspeed", "deepspeed-zero3-2021"),
    (r"megatron.*2022", "megatron-2022"),
    (r"megatron", "megatron-2021"),
    (r"aleph alpha", "aleph-alpha-2023"),
    (r"foundry|composer|mosaic", "llm-foundry"),
    (r"torchtitan.*compile", "torchtitan-compile"),
    (r"torchtitan|fsdp2", "torchtitan"),
    (r"oneflow", "oneflow-gpt"),
    (r"maxtext|jax|xla", "maxtext-2025"),
    (r"fsdp", "llm-foundry"),
)
"""Patterns over the columns `framework` and `source`, the first that is found wins -> stack."""

PADS_VOCABULARY = (
    "megatron-2021",
    "megatron-2022",
    "zero-bubble-2023",
    "megatron-core-2024",
    "nemo-2025",
)
"""Stacks that pad the vocabulary to a multiple of 128 x tp (Megatron-LM's --make-vocab-size-divisible-by);
others do so only where it is cut."""

PADDING = 128

PRINTED_MEMORY = {
    "zero-bubble-2023": "reserved",
    "oneflow-gpt": "needed",
    "megatron-deepspeed": "first",
}
"""What reports with these stacks call memory: reserved by torch; needed of the device (nvidia-smi); needed of
the first rank's device. Others print what torch calls allocated."""

FALLBACK = "piper"


def stack_of_row(row: PublishedRow, *, stack: str = AUTO) -> str:
    """Return the stack of a run: the name or file that is asked for, or that of its framework."""
    if stack != AUTO:
        return stack
    framework = f"{row.text('framework')}; {row.text('source')}".lower()
    return next((name for pattern, name in STACKS if re.search(pattern, framework)), FALLBACK)


def padded_vocabulary(size: int, *, stack: str, tp: int) -> int:
    """Return the entries that a stack keeps for a vocabulary."""
    if tp == 1 and stack not in PADS_VOCABULARY:
        return size
    multiple = PADDING * tp
    return -(-size // multiple) * multiple
