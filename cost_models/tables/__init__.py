"""Measured kernels, one row each; a new measurement is a row of a file, a new harness a line of `HARNESSES`.

`matmul.csv`: [m, k] times [k, n], 16-bit, row by row, by direction; `attention.csv`: causal, fused, 16-bit.
Several measurements of one shape are one row with their median. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TABLES = {"matmul": "matmul.csv", "attention": "attention.csv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """Who measured, and how.

    Args:
        source: where the rows come from.
        training: kernels as a training framework calls them, one after another; else repeated alone, for
            inference or as a benchmark.
    """

    source: str
    training: bool = False


HARNESSES: Mapping[str, Harness] = {
    "simumax": Harness(
        source="MooreThreads/SimuMax configs/system/a100_pcie.json, b200_bf16_ceperm.json: Transformer "
        "Engine, forward, input gradient, weight gradient with fp32 accumulation",
        training=True,
    ),
    "vidur": Harness(
        source="microsoft/vidur data/profiling/compute/{a100,a40}/meta-llama/Llama-2-{7b,70b}-hf/mlp.csv"
    ),
    "aiconfigurator": Harness(
        source="ai-dynamo/aiconfigurator aic-core/src/aiconfigurator_core/systems/data/<gpu>/{gemm,"
        "attention}/vllm: about 6 runs of a CUDA graph after 3 warm-ups"
    ),
    "deepbench": Harness(
        source="baidu-research/DeepBench results/train/DeepBench_NV_V100.xlsx: cuBLAS, padded to 8"
    ),
    "azure": Harness(
        source="Azure/AI-benchmarking-guide Azure_Results/ND_A100_v4_results.md: cuBLASLt, random numbers"
    ),
    "llmcompass": Harness(
        source="PrincetonUniversity/LLMCompass ae/figure5/ab/real_hardware: torch, with 20 to 50 us of launch"
    ),
}
