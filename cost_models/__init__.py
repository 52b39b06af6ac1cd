"""Cost models: what an operation, a transfer or a collective costs on given hardware.

    model = cluster_cost_model("dgx-h100")        # or load_cluster("my.yaml")
    model.operation(operation).seconds            # a Price: seconds, band, provenance

Names are imported when they are first used, so that `import cost_models` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cost_models.catalogue import Stack, load_cluster, load_gpu, load_stack
    from cost_models.clusters import CLUSTERS
    from cost_models.errors import CostModelError, InputError, InternalError
    from cost_models.gpu import Gpu
    from cost_models.hardware import GPUS
    from cost_models.models import COST_MODELS
    from cost_models.models.cluster import ClusterCostModel, cluster_cost_model
    from cost_models.models.unit import UnitCostModel
    from cost_models.ops import Operation, OpKind
    from cost_models.price import CollectiveKind, CostModel, Price, Provenance
    from cost_models.stacks import STACKS
    from cost_models.topology import Cluster, LinkSpec
    from cost_models.units import format_bytes, format_duration
    from cost_models.use import CommunicationUse, LinkKind, Machine, OperationUse

_MODULE_OF = {
    "OperationUse": "cost_models.use",
    "Machine": "cost_models.use",
    "LinkKind": "cost_models.use",
    "CommunicationUse": "cost_models.use",
    "CLUSTERS": "cost_models.clusters",
    "COST_MODELS": "cost_models.models",
    "GPUS": "cost_models.hardware",
    "STACKS": "cost_models.stacks",
    "Cluster": "cost_models.topology",
    "ClusterCostModel": "cost_models.models.cluster",
    "CollectiveKind": "cost_models.price",
    "CostModel": "cost_models.price",
    "CostModelError": "cost_models.errors",
    "Gpu": "cost_models.gpu",
    "InputError": "cost_models.errors",
    "InternalError": "cost_models.errors",
    "LinkSpec": "cost_models.topology",
    "OpKind": "cost_models.ops",
    "Operation": "cost_models.ops",
    "Price": "cost_models.price",
    "Provenance": "cost_models.price",
    "Stack": "cost_models.catalogue",
    "UnitCostModel": "cost_models.models.unit",
    "cluster_cost_model": "cost_models.models.cluster",
    "format_bytes": "cost_models.units",
    "format_duration": "cost_models.units",
    "load_cluster": "cost_models.catalogue",
    "load_gpu": "cost_models.catalogue",
    "load_stack": "cost_models.catalogue",
}

__all__ = [
    "CLUSTERS",
    "COST_MODELS",
    "GPUS",
    "STACKS",
    "Cluster",
    "ClusterCostModel",
    "CollectiveKind",
    "CommunicationUse",
    "CostModel",
    "CostModelError",
    "Gpu",
    "InputError",
    "InternalError",
    "LinkKind",
    "LinkSpec",
    "Machine",
    "OpKind",
    "Operation",
    "OperationUse",
    "Price",
    "Provenance",
    "Stack",
    "UnitCostModel",
    "cluster_cost_model",
    "format_bytes",
    "format_duration",
    "load_cluster",
    "load_gpu",
    "load_stack",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cost_models' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
