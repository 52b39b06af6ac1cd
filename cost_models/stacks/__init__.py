"""Stack profiles, what a framework does: name -> file.

To add one: write `<name>.yaml` beside this file with the sections `model` and `strategy` (plain data, taken
as defaults by capture and strategy) and `cost` (the only one that `cost_models` interprets); add one line to
`STACKS`. Names are lower case.
"""

STACKS = {
    "piper": "piper.yaml",
    "megatron-2021": "megatron_2021.yaml",
    "megatron-2022": "megatron_2022.yaml",
    "megatron-deepspeed": "megatron_deepspeed.yaml",
    "zero-bubble-2023": "zero_bubble_2023.yaml",
    "aleph-alpha-2023": "aleph_alpha_2023.yaml",
    "llm-foundry": "llm_foundry.yaml",
    "torchtitan": "torchtitan.yaml",
    "torchtitan-compile": "torchtitan_compile.yaml",
    "megatron-core-2024": "megatron_core_2024.yaml",
    "nemo-2025": "nemo_2025.yaml",
    "megatron-bridge-25": "megatron_bridge_25.yaml",
    "megatron-bridge-26.02": "megatron_bridge_26_02.yaml",
    "megatron-bridge-26.06": "megatron_bridge_26_06.yaml",
    "megatron-lm-2026": "megatron_lm_2026.yaml",
    "oneflow-gpt": "oneflow_gpt.yaml",
    "deepspeed-zero3-2021": "deepspeed_zero3_2021.yaml",
    "maxtext-2025": "maxtext_2025.yaml",
}

ALIASES: dict[str, str] = {}
