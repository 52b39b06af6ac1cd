"""Rank groups: which ranks run a collective together, by what they communicate for (DESIGN 3).

[Note: rank groups]
Within a pipeline rank, ranks count tp fastest, then cp, then dp; the same ranks count etp fastest, then ep,
then expert_dp for experts. A name ends with what it depends on, the pipeline rank first:
  tp2, cp2               ranks that share one layer; one sequence
  dp2                    the replicas of dense parameters (dp x cp), a set per rank of tp
  dp2tp                  replicas and ranks of tp together: gradients that are partial over tp
  dp2h4, dp2h4copies     4 of the replicas, over which state is cut; the replicas that hold the same shard
  ep2e8t2                the ep x etp ranks that hold all experts once
  edp2e8t2               those that hold the same experts; edp2e8t2h4, ...copies: as for dp
  pp2n4s2                4 ranks, 2 apart, that regroup what comes from a stage with another mesh
A communicator belongs to one stream, so the same ranks on another stream than the usual one are another
group, its name with the stream behind: "dp2 on prefetch".
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import numpy.typing as npt

from cost_models.errors import check_invariant
from piper.graph.facts import ExpertSharding
from piper.graph.graph import Graph
from simulator.plan import Group

Ranks = npt.NDArray[np.int64]


def tensor_group(graph: Graph, pipeline_rank: int) -> Group:
    """Return the ranks that cut the same layers for the same tokens."""
    grid = _grid(graph, pipeline_rank)
    return _group(f"tp{pipeline_rank}", pipeline_rank, grid.reshape(-1, grid.shape[2]), axis="tp")


def context_group(graph: Graph, pipeline_rank: int) -> Group:
    """Return the ranks that cut the same sequences."""
    grid = _grid(graph, pipeline_rank)
    sets = np.moveaxis(grid, 1, 2).reshape(-1, grid.shape[1])
    return _group(f"cp{pipeline_rank}", pipeline_rank, sets, axis="cp")


def replica_group(graph: Graph, pipeline_rank: int, *, partial: bool = False) -> Group:
    """Return the replicas of dense parameters; `partial`: with all ranks of tp."""
    grid = _grid(graph, pipeline_rank)
    if partial:
        return _group(f"dp{pipeline_rank}tp", pipeline_rank, grid.reshape(1, -1))
    return _group(f"dp{pipeline_rank}", pipeline_rank, grid.reshape(-1, grid.shape[2]).T)


def shard_group(graph: Graph, pipeline_rank: int, *, shards: int) -> Group:
    """Return neighbouring replicas, over which the state of dense parameters is cut."""
    if shards == replica_count(graph, pipeline_rank):
        return replica_group(graph, pipeline_rank)
    sets = _shard_grid(graph, pipeline_rank, shards).reshape(-1, shards)
    return _group(f"dp{pipeline_rank}h{shards}", pipeline_rank, sets)


def copies_group(graph: Graph, pipeline_rank: int, *, shards: int, partial: bool = False) -> Group:
    """Return the replicas that hold the same shard of dense parameters; `partial`: with all ranks of tp."""
    grid = np.swapaxes(_shard_grid(graph, pipeline_rank, shards), 1, 2)  # [tp, shards, copies]
    name = f"dp{pipeline_rank}h{shards}copies"
    if partial:
        sets = np.moveaxis(grid, 0, 1).reshape(shards, -1)
        return _group(f"{name}tp", pipeline_rank, sets)
    return _group(name, pipeline_rank, grid.reshape(-1, grid.shape[2]))


def expert_group(graph: Graph, pipeline_rank: int, fact: ExpertSharding) -> Group:
    """Return the ranks between which tokens travel to their experts."""
    name = f"ep{pipeline_rank}e{fact.degree}t{fact.tensor_degree}"
    sets = _grid(graph, pipeline_rank).reshape(-1, fact.degree * fact.tensor_degree)
    return _group(name, pipeline_rank, sets, axis="ep")


def expert_replica_group(graph: Graph, pipeline_rank: int, fact: ExpertSharding) -> Group:
    """Return the ranks that hold the same experts."""
    sets = _grid(graph, pipeline_rank).reshape(-1, fact.degree * fact.tensor_degree).T
    return _group(_expert_name(pipeline_rank, fact), pipeline_rank, sets)


def expert_shard_group(graph: Graph, pipeline_rank: int, fact: ExpertSharding, *, shards: int) -> Group:
    """Return neighbouring ranks with the same experts, over which the experts' state is cut."""
    whole = expert_replica_group(graph, pipeline_rank, fact)
    if shards == whole.size:
        return whole
    sets = np.array(whole.members).reshape(-1, shards)
    return _group(f"{whole.name}h{shards}", pipeline_rank, sets)


def expert_copies_group(graph: Graph, pipeline_rank: int, fact: ExpertSharding, *, shards: int) -> Group:
    """Return the ranks that hold the same shard of the same experts."""
    whole = expert_replica_group(graph, pipeline_rank, fact)
    grid = np.array(whole.members).reshape(len(whole.members), -1, shards)
    sets = np.swapaxes(grid, 1, 2).reshape(-1, whole.size // shards)
    return _group(f"{whole.name}h{shards}copies", pipeline_rank, sets)


def regrouping_group(graph: Graph, pipeline_rank: int, *, count: int, stride: int) -> Group:
    """Return ranks, `stride` apart, that together got all that each of them needs."""
    grid = np.array(_ranks(graph, pipeline_rank), dtype=np.int64).reshape(-1, count, stride)
    sets = np.swapaxes(grid, 1, 2).reshape(-1, count)
    return _group(f"pp{pipeline_rank}n{count}s{stride}", pipeline_rank, sets, axis="pp")


def tied_group(graph: Graph, name: str, pipeline_ranks: tuple[int, ...]) -> Group:
    """Return the holders of shared parameters: one set for each replica and rank of tp."""
    sets = np.stack([_grid(graph, rank).ravel() for rank in pipeline_ranks], axis=1)
    return Group(name=name, axis="pp", pipeline_ranks=pipeline_ranks, members=_sorted(sets))


def world_group(graph: Graph) -> Group:
    """Return all ranks of the job."""
    everyone = tuple(range(graph.num_pipeline_ranks))
    return Group(name="world", axis="dp", pipeline_ranks=everyone, members=(graph.placed_mesh.ranks(),))


def on_stream(group: Group, stream: str) -> Group:
    """Return the same ranks as a group for the collectives of one stream."""
    return replace(group, name=name_on_stream(group.name, stream, usual=group.axis))


def name_on_stream(name: str, stream: str, *, usual: str) -> str:
    """Return the name of the same ranks' group on a stream; `usual`: the stream that needs no mention."""
    base = name.partition(" on ")[0]
    return base if stream == usual else f"{base} on {stream}"


def replica_count(graph: Graph, pipeline_rank: int) -> int:
    """Return how many replicas of dense parameters a pipeline rank has: dp x cp."""
    grid = _grid(graph, pipeline_rank)
    return int(grid.shape[0] * grid.shape[1])


def _expert_name(pipeline_rank: int, fact: ExpertSharding) -> str:
    return f"edp{pipeline_rank}e{fact.degree}t{fact.tensor_degree}"


def _shard_grid(graph: Graph, pipeline_rank: int, shards: int) -> Ranks:
    """Return the ranks of a pipeline rank as [tp, copies, shards]."""
    grid = _grid(graph, pipeline_rank)
    return grid.reshape(-1, grid.shape[2]).T.reshape(grid.shape[2], -1, shards)


def _grid(graph: Graph, pipeline_rank: int) -> Ranks:
    """Return the ranks of a pipeline rank as [dp, cp, tp]."""
    ranks = _ranks(graph, pipeline_rank)
    if graph.stage_meshes:
        stage = graph.stages_of_rank(pipeline_rank)[0]
        shape = tuple(graph.axis_size(axis, stage=stage) for axis in ("dp", "cp", "tp"))
    else:
        shape = tuple(graph.placed_mesh.size(axis) for axis in ("dp", "cp", "tp"))
    check_invariant(prod(shape) == len(ranks), f"{shape} ranks of {len(ranks)}")
    return np.array(ranks, dtype=np.int64).reshape(shape)


def _ranks(graph: Graph, pipeline_rank: int) -> tuple[int, ...]:
    mesh = graph.placed_mesh
    return mesh.ranks(pp=pipeline_rank) if mesh.size("pp") > 1 else mesh.ranks()


def _group(name: str, pipeline_rank: int, sets: Ranks, *, axis: str = "dp") -> Group:
    return Group(name=name, axis=axis, pipeline_ranks=(pipeline_rank,), members=_sorted(sets))


def _sorted(sets: Ranks) -> tuple[tuple[int, ...], ...]:
    """Return sets of ranks, each rising, by their first."""
    return tuple(sorted(tuple(row) for row in np.sort(sets, axis=1).tolist()))
