"""The stack's attention kernel is one of those known."""

from __future__ import annotations

import pytest

from cost_models import load_stack
from cost_models.errors import CostModelError


def test_an_unknown_attention_kernel_names_the_known_ones(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "schema_version: 1\nname: mine\ndescription: mine\nmodel: {}\nstrategy: {}\n"
        "cost: {launch_overhead: 1us, attention_kernel: flash4, source: me}\n"
    )
    with pytest.raises(CostModelError) as caught:
        load_stack(str(path))
    assert caught.value.field == "cost.attention_kernel"
    assert "flash2" in caught.value.fix
