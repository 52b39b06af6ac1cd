"""Find GPUs, clusters and stacks by name, alias or file, and read them.

A file may say `extends: NAME|FILE` and then give only what differs; a section is replaced as a whole, so
that its `source` speaks about all of its figures. A section that says `inherit: true` gives single figures
and takes over the others; both sources are kept.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cost_models.clusters import ALIASES as CLUSTER_ALIASES
from cost_models.clusters import CLUSTERS
from cost_models.errors import CostModelError, nearest, require_known
from cost_models.gpu import ATTENTION_KERNELS, FITTED, Gpu
from cost_models.hardware import ALIASES as GPU_ALIASES
from cost_models.hardware import GPUS
from cost_models.read_cluster import read_cluster
from cost_models.read_gpu import read_gpu
from cost_models.read_measured import with_table_beside, with_tables_inside
from cost_models.stacks import ALIASES as STACK_ALIASES
from cost_models.stacks import STACKS
from cost_models.topology import Cluster
from cost_models.training import SECTION as TRAINING
from cost_models.training import trained
from cost_models.yaml_file import SCHEMA_VERSION, Section, read_yaml

TASKS = (
    "f", "b", "bi", "bw", "r", "send_f", "recv_f", "send_b", "recv_b", "all_reduce", "reduce_scatter",
    "all_gather", "all_to_all", "norm", "update", "ring_shift", "offload", "reload",
)  # fmt: skip
"""Names of the kinds of tasks (`simulator.plan.TaskKind`)."""

_SLOWDOWNS = ("matmul", "attention", "memory", "collective")
_COST = (
    "launch_overhead", "communication_overhead", "collective_skew", "pass_wait", "step_wait", "run_ahead",
    "blocking", "awaited", "attention_kernel", "expandable_segments", "contention", "step_error",
    *(f"{name}_slowdown" for name in _SLOWDOWNS),
)  # fmt: skip

_PACKAGE = Path(__file__).parent

REPLACED: ContextVar[Mapping[str, str | float]] = ContextVar("REPLACED", default=MappingProxyType({}))
"""Figures to read in place of those of the files, by "gpu|cluster|stack:NAME:section.key": for fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What a framework does.

    Args:
        name: catalogue name, lower case.
        description: for people.
        launch_overhead_s: host time to launch one kernel.
        communication_overhead_s: host time to launch a transfer or a collective.
        collective_skew_s: by which members of a collective arrive apart, per doubling of their number.
        pass_wait_s: of a forward or backward of a stage, in which the device waits for the host.
        step_wait_s: the same, once per step (data, loss, logging).
        slowdowns: time of this framework's kernels over those of the GPU's and cluster's files, by
            "matmul", "attention", "memory" (all other kernels) and "collective" (transfers, too).
        step_error: |predicted / measured - 1| of step times that 80 % of published runs with this stack stay
            below, or None (no such runs).
        run_ahead_kernels: how many kernels of a stream may be launched and not have ended, or None.
        blocking: what the host awaits the end of as soon as it is launched, of `TASKS`.
        awaited: what the host awaits the end of before it launches what needs it, of `TASKS`.
        attention_kernel: a class of `ATTENTION_KERNELS`, or `FITTED`: the GPU's fastest.
        contention: whether what runs at once slows each other (links, processors, memory bandwidth).
        expandable_segments: of the caching allocator, as in `PYTORCH_CUDA_ALLOC_CONF`.
        model, strategy: defaults for capture and strategy; plain data, not interpreted here.
        sources: where the figures of `cost` come from.
    """

    name: str
    description: str
    launch_overhead_s: float
    communication_overhead_s: float
    collective_skew_s: float
    pass_wait_s: float
    step_wait_s: float
    slowdowns: Mapping[str, float]
    step_error: float | None
    run_ahead_kernels: int | None
    blocking: tuple[str, ...]
    awaited: tuple[str, ...]
    attention_kernel: str
    expandable_segments: bool
    contention: bool
    model: Mapping[str, Any]
    strategy: Mapping[str, Any]
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folder:
    kind: str
    folder: str
    names: Mapping[str, str]
    aliases: Mapping[str, str]

    def path(self, text: str, *, beside: Path | None = None) -> Path:
        """Return the file of a catalogue name, an alias or a path (relative paths: `beside` a file)."""
        lowered = text.lower()
        name = self.aliases.get(lowered, lowered)
        if name in self.names:
            return _PACKAGE / self.folder / self.names[name]
        if lowered.endswith((".yaml", ".yml")) or "/" in text or "\\" in text:
            return (beside.parent if beside else Path()) / text
        raise CostModelError(
            where=self.kind,
            field="name",
            value=text,
            rule=f"is not a known {self.kind}",
            fix=f"{self._hint(text)} (or give a YAML file)",
        )

    def _hint(self, text: str) -> str:
        """Return the names like `text`, other names too, else all entries."""
        names = [*self.names, *self.aliases]
        return nearest(text, names if get_close_matches(text.lower(), names) else self.names)


_GPU = _Folder(kind="GPU", folder="hardware", names=GPUS, aliases=GPU_ALIASES)
_CLUSTER = _Folder(kind="cluster", folder="clusters", names=CLUSTERS, aliases=CLUSTER_ALIASES)
_STACK = _Folder(kind="stack", folder="stacks", names=STACKS, aliases=STACK_ALIASES)
_FOLDERS = {"gpu": _GPU, "cluster": _CLUSTER, "stack": _STACK}


def load_gpu(name_or_path: str) -> Gpu:
    """Return a GPU by catalogue name or alias (any case) or from a YAML file.

    Raises: CostModelError for an unknown name, a missing or broken file, a bad figure, a missing source.
    """
    return _gpu(_GPU.path(str(name_or_path)))


def load_cluster(name_or_path: str) -> Cluster:
    """Return a cluster by catalogue name or alias (any case) or from a YAML file; raises as `load_gpu`."""
    return _cluster(_CLUSTER.path(str(name_or_path)))


def cluster_content(name_or_path: str) -> dict[str, Any]:
    """Return what the file of a cluster says, with what it extends and with its device's file in `gpu`.

    Raises: CostModelError as `load_cluster`.
    """
    path = _CLUSTER.path(str(name_or_path))
    _cluster(path)  # refuses what is broken
    content = copy.deepcopy(_content(path, _CLUSTER))
    if isinstance(content["gpu"], str):
        gpu = copy.deepcopy(_content(_GPU.path(content["gpu"], beside=path), _GPU))
        in_training = trained(gpu, where=str(gpu.get("name")))
        in_training.pop(TRAINING, None)  # its factors are in the figures now
        content["gpu"] = in_training
    return with_tables_inside(content)


def load_stack(name_or_path: str) -> Stack:
    """Return a stack profile by catalogue name or alias or from a YAML file; raises as `load_gpu`."""
    return _stack(_STACK.path(str(name_or_path)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One entry of a file of the catalogue.

    Args:
        key: dotted, as in the file: `matmul.efficiency`.
        value: as written, with its unit: `80GiB`, 0.73.
        source: where it comes from.
    """

    key: str
    value: object
    source: str


def gpu_figures(name_or_path: str) -> tuple[Figure, ...]:
    """Return what the file of a GPU says, with that of the files that it extends; raises as `load_gpu`."""
    return _figures(_content(_GPU.path(str(name_or_path)), _GPU))


def cluster_figures(name_or_path: str) -> tuple[Figure, ...]:
    """Return what the file of a cluster says, as `gpu_figures`; tables by the name of their file."""
    return _figures(_content(_CLUSTER.path(str(name_or_path)), _CLUSTER))


def _figures(content: Mapping[str, Any]) -> tuple[Figure, ...]:
    whole = content.get("source", "")
    told = ("schema_version", "name", "description", "source")
    return tuple(
        Figure(key=key, value=entry, source=source)
        for name, value in content.items()
        if name not in told
        for source in [value.get("source", whole) if isinstance(value, dict) else whole]
        for key, entry in _leaves(name, value)
    )


def _leaves(key: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value as written) of what lies below `key`, without sources."""
    if key.endswith(".table") and isinstance(value, dict):
        own = [name for name in value if name != "file"]
        yield key, ", ".join([*([Path(value["file"]).name] if "file" in value else []), *own])
    elif isinstance(value, dict):
        for name, entry in value.items():
            if name != "source":
                yield from _leaves(f"{key}.{name}", entry)
    else:
        yield key, value


def path_of(kind: str, name: str) -> Path:
    """Return the file of a "gpu", "cluster" or "stack" of the catalogue; raises CostModelError."""
    return _FOLDERS[kind].path(name)


def figure_of(name: str) -> Any:
    """Return what the catalogue says for "gpu|cluster|stack:NAME:section.key", or None: it is not stated."""
    kind, entry, keys = name.split(":", 2)
    folder = _FOLDERS[kind]
    found: Any = _content(folder.path(entry), folder)
    for key in keys.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def names_below(cluster: str, stack: str) -> frozenset[str]:
    """Return the files behind a cluster and a stack, as "gpu:NAME" and so on: they, and what they extend."""
    clusters = _chain(_CLUSTER, cluster)
    gpu = next(content["gpu"] for content in clusters if "gpu" in content)
    chains = {"cluster": clusters, "gpu": _chain(_GPU, gpu), "stack": _chain(_STACK, stack)}
    return frozenset(f"{kind}:{content['name']}" for kind, listed in chains.items() for content in listed)


def _chain(folder: _Folder, name: str) -> list[dict[str, Any]]:
    path = folder.path(name)
    found = [read_yaml(path)]
    while "extends" in found[-1]:
        path = folder.path(found[-1]["extends"], beside=path)
        found.append(read_yaml(path))
    return found


@cache
def _catalogue_file(path: Path) -> dict[str, Any]:
    return read_yaml(path)


def _gpu(path: Path, *, training: bool = False) -> Gpu:
    """Read a GPU; `training`: with the figures that it reaches in training, see `trained`."""
    content, where = _content(path, _GPU), _shown(path)
    return read_gpu(trained(content, where=where) if training else content, where=where)


def _cluster(path: Path) -> Cluster:
    content = _content(path, _CLUSTER)
    where = _shown(path)
    gpu = content.get("gpu")
    if isinstance(gpu, dict):  # a calibrated cluster holds its devices
        described = trained(gpu, where=f"{where}: gpu")
        return read_cluster(content, gpu=read_gpu(described, where=f"{where}: gpu"), where=where)
    if not isinstance(gpu, str):
        fix = "name a GPU (see `piper gpus`), a YAML file, or write its sections here"
        raise CostModelError(where=where, field="gpu", value=gpu, rule="must be a GPU", fix=fix)
    return read_cluster(content, gpu=_gpu(_GPU.path(gpu, beside=path), training=True), where=where)


def _stack(path: Path) -> Stack:
    where = _shown(path)
    keys = ("schema_version", "name", "description", "model", "strategy", "cost")
    file = Section(_content(path, _STACK), where=where, keys=keys, sourced=False)
    cost = file.section("cost", _COST)
    kernel = cost.text("attention_kernel")
    known = [*ATTENTION_KERNELS, FITTED]
    require_known(kernel, known, where=where, field="cost.attention_kernel", error=CostModelError)
    return Stack(
        name=file.text("name"),
        description=file.text("description"),
        launch_overhead_s=cost.seconds("launch_overhead", zero_ok=True),
        communication_overhead_s=_optional_s(cost, "communication_overhead", default_of="launch_overhead"),
        collective_skew_s=_optional_s(cost, "collective_skew"),
        pass_wait_s=_optional_s(cost, "pass_wait"),
        step_wait_s=_optional_s(cost, "step_wait"),
        slowdowns={
            name: cost.number(f"{name}_slowdown") if f"{name}_slowdown" in cost else 1.0
            for name in _SLOWDOWNS
        },
        step_error=cost.error("step_error") if "step_error" in cost else None,
        run_ahead_kernels=cost.integer("run_ahead") if "run_ahead" in cost else None,
        blocking=_tasks(cost, "blocking", where=where),
        awaited=_tasks(cost, "awaited", where=where),
        attention_kernel=kernel,
        contention="contention" not in cost or cost.flag("contention"),
        expandable_segments="expandable_segments" in cost and cost.flag("expandable_segments"),
        model=file.mapping("model"),
        strategy=file.mapping("strategy"),
        sources={"cost": cost.source},
    )


def _tasks(cost: Section, key: str, *, where: str) -> tuple[str, ...]:
    """Return a list of kinds of tasks, which may be left out."""
    names = tuple(cost.texts(key)) if key in cost else ()
    for name in names:
        require_known(name, TASKS, where=where, field=f"cost.{key}", error=CostModelError)
    return names


def _optional_s(cost: Section, key: str, *, default_of: str | None = None) -> float:
    """Return a time that may be left out: that of another key, or 0 s."""
    if key in cost:
        return cost.seconds(key, zero_ok=True)
    return cost.seconds(default_of, zero_ok=True) if default_of else 0.0


def _content(path: Path, folder: _Folder, *, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    content = with_table_beside(
        _catalogue_file(path) if path.is_relative_to(_PACKAGE) else read_yaml(path), path
    )
    content = _with_replaced(content, kind=folder.kind.lower())
    where = _shown(path)
    if content.get("schema_version") != SCHEMA_VERSION or isinstance(content["schema_version"], bool):
        raise CostModelError(
            where=where,
            field="schema_version",
            value=content.get("schema_version"),
            rule=f"must be {SCHEMA_VERSION}",
            fix=f"write schema_version: {SCHEMA_VERSION}",
        )
    if "extends" not in content:
        return content
    base = content.pop("extends")
    if not isinstance(base, str) or path in chain:
        fix = f"name another {folder.kind} or its file"
        rule = "must be a name or a file that does not extend this one"
        raise CostModelError(where=where, field="extends", value=base, rule=rule, fix=fix)
    base_path = folder.path(base, beside=path)
    below = _content(base_path, folder, chain=(*chain, path))
    merged = below | {key: _inherited(key, value, below, where=where) for key, value in content.items()}
    if TRAINING not in content:  # of another device, or of the same one only if the file says so
        merged.pop(TRAINING, None)
    if folder is _CLUSTER and "gpu" not in content and isinstance(merged.get("gpu"), str):
        merged["gpu"] = str(_GPU.path(merged["gpu"], beside=base_path))
    return merged


def _inherited(key: str, value: Any, below: Mapping[str, Any], *, where: str) -> Any:
    """Return a section; one that says `inherit: true` on top of that of the file below."""
    if not isinstance(value, dict) or "inherit" not in value:
        return value
    base = below.get(key)
    if value["inherit"] is not True or not isinstance(base, dict):
        raise CostModelError(
            where=where,
            field=f"{key}.inherit",
            value=value["inherit"],
            rule="must be true, in a section that the extended file has",
            fix="leave inherit out and give every figure of the section",
        )
    own = {name: entry for name, entry in value.items() if name != "inherit"}
    merged = _merged(base, own)
    both = (own.get("source"), base.get("source"))
    if "source" not in own:
        del merged["source"]
    elif all(isinstance(source, str) for source in both):
        merged["source"] = f"{own['source'].rstrip('. ')}. Otherwise as {below.get('name')}: {base['source']}"
    return merged


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the entries of `own`, mappings inside merged likewise."""
    merged = dict(base)
    for name, entry in own.items():
        below = base.get(name)
        if isinstance(entry, dict) and isinstance(below, dict):
            merged[name] = _merged(below, entry)
        else:
            merged[name] = entry
    return merged


def _with_replaced(content: dict[str, Any], *, kind: str) -> dict[str, Any]:
    """Return the content of a file with the figures that `REPLACED` has for it."""
    prefix = f"{kind}:{content.get('name')}:"
    for name, value in REPLACED.get().items():
        if name.startswith(prefix):
            content = _replaced(content, name.removeprefix(prefix).split("."), value)
    return content


def _replaced(content: dict[str, Any], keys: list[str], value: str | float) -> dict[str, Any]:
    key, *rest = keys
    inside = content.get(key, {"inherit": True})
    return content | {key: _replaced(dict(inside), rest, value) if rest else value}


def _shown(path: Path) -> str:
    return f"{path.parent.name}/{path.name}" if path.is_relative_to(_PACKAGE) else str(path)
