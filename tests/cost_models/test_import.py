"""`import cost_models` loads nothing that it does not need."""

import subprocess
import sys

import cost_models


def loaded_after(statement):
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_the_packages_above_nor_a_yaml_reader():
    loaded = loaded_after("import cost_models")
    assert "cost_models" in loaded
    assert not {"torch", "numpy", "scipy", "piper", "simulator", "ruamel.yaml"} & loaded


def test_pricing_on_a_cluster_needs_neither_torch_nor_numpy():
    loaded = loaded_after("import cost_models; cost_models.cluster_cost_model('dgx-h100')")
    assert "cost_models.models.roofline" in loaded
    assert not {"torch", "numpy", "scipy", "piper", "simulator"} & loaded


def test_every_public_name_can_be_imported():
    assert sorted(cost_models.__all__) == sorted(dir(cost_models))
    for name in cost_models.__all__:
        assert getattr(cost_models, name) is not None


def test_an_unknown_public_name_is_an_attribute_error():
    assert not hasattr(cost_models, "load_gpus")
