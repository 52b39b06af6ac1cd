"""On which cluster a published run was made, by its GPU, its nodes and its network."""

from __future__ import annotations

import re

from cost_models import load_cluster
from cost_models.errors import CostModelError
from piper.validation.rows import PublishedRow

PLACES = (
    (r"selene", "selene"),
    (r"jean zay.*", "jean-zay"),
    (r"v100.*\b100 gb/s infiniband", "v100-8gpu-100g"),
    (r"a100.*vtrain", "vtrain-a100"),
    (r"aleph alpha", "aleph-alpha-a100"),
    (r"a100.*40gb.*(llm-foundry|mosaicml)", "mosaicml-a100-40gb"),
    (r"a100.*80gb.*(llm-foundry|mosaicml)", "mosaicml-a100-80gb"),
    (r"h100.*(llm-foundry|mosaicml)", "mosaicml-h100"),
    (r"a100.*zero-bubble", "zero-bubble-a100"),
    (r"\beos\b", "eos"),
    (r"h100.*torchtitan", "torchtitan-h100-96gb"),
    (r"h100.*dgx cloud", "dgx-cloud-h100"),
)
"""Patterns over "gpu|gpus_per_node|interconnect|framework|source" -> cluster; the first found wins."""


def cluster_of_row(row: PublishedRow) -> str:
    """Return the cluster of a run: a place that is known, or the usual machine of its GPU.

    Raises: CostModelError where no cluster of the catalogue has the GPU.
    """
    names = ("gpu", "gpus_per_node", "interconnect", "framework", "source")
    text = "|".join(row.text(name) for name in names).lower()
    for pattern, name in PLACES:
        if re.search(pattern, text):
            small = "-v100-16gb" if "16gb" in row.text("gpu").lower() else "-v100"
            return name + small if name == "jean-zay" else name
    gpu = row.text("gpu").lower()
    for pattern, name in USUAL:
        if re.search(pattern, gpu):
            return name
    load_cluster(gpu)
    raise CostModelError(
        where=f"row {row.case_id}", field="gpu", value=row.text("gpu"), rule="is on no known cluster",
        fix="name a GPU of `piper gpus`",
    )  # fmt: skip


USUAL = (
    (r"v100.*16", "v100-8gpu-100g"),
    (r"v100", "dgx-1v"),
    (r"a100.*40", "sophia"),
    (r"a100", "dgx-a100"),
    (r"h200", "dgx-h200"),
    (r"h800", "h800-deepseek"),
    (r"h100", "dgx-h100"),
    (r"gb200", "gb200-nvl72"),
    (r"gb300", "gb300-nvl72"),
    (r"b200", "dgx-b200"),
    (r"b300", "dgx-b300"),
    (r"l40s", "l40s-8gpu"),
)
"""GPU -> the machine that it is usually in."""
