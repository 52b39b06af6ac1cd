"""GPUs (and the CPU core that stands in for one): name -> file.

To add one: write `<name>.yaml` beside this file (copy the nearest GPU; or say `extends: <gpu>` and give only
the sections that differ), every section with its `source`; add one line to `GPUS`, and other names that
people use to `ALIASES`. Names are lower case. The tests of the catalogue run over every line.
"""

GPUS = {
    "a100-sxm-40gb": "a100_sxm_40gb.yaml",
    "a100-sxm-80gb": "a100_sxm_80gb.yaml",
    "h100-sxm": "h100_sxm.yaml",
    "h200-sxm": "h200_sxm.yaml",
    "b200-sxm": "b200_sxm.yaml",
    "cpu": "cpu.yaml",
}

ALIASES = {
    "a100": "a100-sxm-80gb",
    "a100-40gb": "a100-sxm-40gb",
    "a100-80gb": "a100-sxm-80gb",
    "a100-sxm": "a100-sxm-80gb",
    "a100_sxm": "a100-sxm-80gb",
    "h100": "h100-sxm",
    "h100-80gb": "h100-sxm",
    "h100-sxm-80gb": "h100-sxm",
    "h100_sxm": "h100-sxm",
    "h200": "h200-sxm",
    "h200_sxm": "h200-sxm",
    "b200": "b200-sxm",
    "b200_sxm": "b200-sxm",
}
