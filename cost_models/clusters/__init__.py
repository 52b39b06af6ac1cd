"""Clusters: name -> file. An entry has any number of nodes unless its file states `max_nodes`.

To add one: write `<name>.yaml` beside this file (copy the nearest; or say `extends: <cluster>` and give only
the keys and sections that differ), every section with its `source`; add one line to `CLUSTERS`, and other
names that people use to `ALIASES`. Names are lower case. The tests of the catalogue run over every line.
"""

CLUSTERS = {
    "dgx-a100": "dgx_a100.yaml",
    "dgx-h100": "dgx_h100.yaml",
    "dgx-h200": "dgx_h200.yaml",
    "dgx-b200": "dgx_b200.yaml",
    "a100-8gpu": "a100_8gpu.yaml",
    "h100-8gpu": "h100_8gpu.yaml",
    "h200-8gpu": "h200_8gpu.yaml",
    "b200-8gpu": "b200_8gpu.yaml",
    "local-cpu": "local_cpu.yaml",
}

ALIASES = {
    "selene": "dgx-a100",
    "azure nd a100 v4": "dgx-a100",
    "azure nd h100 v5": "dgx-h100",
    "azure nd h200 v5": "dgx-h200",
    "gcp a3-ultragpu-8g": "dgx-h200",
    "aws p6-b200.48xlarge": "dgx-b200",
    "cpu": "local-cpu",
}
