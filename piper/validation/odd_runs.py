"""Published runs that no other run agrees with: left out of fits, scored with and without."""

from __future__ import annotations

_NUMBERS = {
    # Twins and neighbours take half of the time, or less by a fifth to a third.
    "vtrain2024_multi_node": (13, 15, 20, 43, 50, 80),
    # 13B on 64 GPUs with flash attention 2 and pp=2: times rise with the microbatch and lie above those of
    # slower kernels; the run that is 15 % faster than all others; tp=1, pp=2 with dp=128.
    "hagemann2023": (
        67, 69, 71, 73, 75, 76, 81, 83, 84, 85, 97, 106, 120, 126, 129, 139, 140, 586, 590, 593, 597,
    ),
    # One virtual stage beside siblings with five; the same layout at half of the time by another recipe.
    "megatron_bridge": (166, 227, 257, 263),
    # Slower in fp8 than its twins in bf16.
    "torchtitan": (28, 29),
    "llm_foundry_fsdp": (119, 120, 139),
    # Pure FSDP whose recomputation and messages are not stated.
    "moe_parallel_folding2025": (0, 5, 10),
    # Reduction beside the backward, which the other runs do not have.
    "dlperf_v100_gpt": (2, 3),
    # Ablations.
    "zerobubble2024": (117, 118),
    # Of a preview.
    "simumax_b200": (43,),
}  # fmt: skip

ODD_RUNS = frozenset(f"{source}-{number:04d}" for source, numbers in _NUMBERS.items() for number in numbers)
"""Names of the runs."""
