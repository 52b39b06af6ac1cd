"""docs/clusters.md: its example loads, and its defaults are those of the code and of the catalogue."""

import re
from dataclasses import asdict
from pathlib import Path

from cost_models import load_cluster
from cost_models.topology import Channels, Spine

GUIDE = (Path(__file__).parents[2] / "docs/clusters.md").read_text(encoding="utf-8")


def test_the_example_of_the_guide_is_a_cluster(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    path = tmp_path / "my_cluster.yaml"
    path.write_text(example, encoding="utf-8")
    cluster = load_cluster(str(path))
    assert cluster.network_share(8) == 4 * 50e9
    assert cluster.network().spine == Spine(nodes_per_leaf=32, oversubscription=2.0)
    assert cluster.channels == load_cluster("dgx-h100").channels


def test_the_defaults_of_the_guide_are_those_of_h100():
    rows = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \| .* \| ([0-9, ]+) \|$", GUIDE, re.MULTILINE)
    names = [name.strip("`") for cell, _ in rows for name in cell.split(", ")]
    values = [int(value) for _, cell in rows for value in cell.split(", ")]
    assert dict(zip(names, values, strict=True)) == asdict(Channels())
    assert load_cluster("dgx-h100").channels == Channels()
