"""Stages with meshes of their own: what ranks hold, send and exchange, sample by sample, token by token.

Each rank holds a set of (sample, token) cells at a border; the sets are derived here from the meshes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import lcm, prod

import numpy as np
import pytest

from cost_models.ops import DTYPE_BYTES, OpKind
from piper.graph import StageMesh, TensorSharding
from simulator.plan import COLLECTIVE_KINDS, NONE, RECV_KINDS, DevicePlan, Mesh, Plan, Task, TaskKind, Work
from simulator.plan.check import check_plan
from tests.facts import PLAIN_TP, TP
from tests.graphs import fused
from tests.mutations.groups import without_regrouping
from tests.piper.compiler.test_facts_to_plans import plan_of
from tests.strategies import Draft, compile_drawn, drawn

Cells = frozenset[tuple[int, int]]
CASES = ("meshes", "meshes_plain", "meshes_cp", "meshes_asynchronous", "meshes_ep")
WITHOUT_SEQUENCE_PARALLEL = ("meshes_plain", "meshes_cp")


@cache
def drawn_with_meshes(number: int) -> tuple[Draft, ...]:
    """Return the first random strategies that have stages with meshes of their own."""
    found: list[Draft] = []
    seed = 0
    while len(found) < number:
        draft = drawn(seed)
        found += [draft] if draft.meshes else []
        seed += 1
    return tuple(found)


def is_cut_over_tokens(draft: Draft) -> bool:
    cuts = [entry for entry in draft.directives if entry["op"] == "shard_tensor"]
    return cuts[0].get("sequence_parallel", True)


@cache
def plans() -> tuple[tuple[str, Plan, bool], ...]:
    """Return name, plan, and whether tokens are cut over tp between the regions."""
    facts = [(name, plan_of(name), name not in WITHOUT_SEQUENCE_PARALLEL) for name in CASES]
    drafts = drawn_with_meshes(25)
    return (*facts, *((str(draft), compile_drawn(draft), is_cut_over_tokens(draft)) for draft in drafts))


@dataclass(frozen=True, kw_only=True)
class Border:
    """What arrives at a device from one with another number of replicas.

    Args:
        plan: the plan.
        device: the receiver.
        received: its receive.
        whole: whether tokens are whole along tp.
    """

    plan: Plan
    device: DevicePlan
    received: Task
    whole: bool

    @property
    def meshes(self) -> tuple[Mesh, Mesh]:
        sender = self.plan.device_plans[self.received.peer]
        return tuple(one.mesh or self.plan.mesh for one in (sender, self.device))  # type: ignore[return-value]

    @property
    def grid(self) -> tuple[int, int]:
        """Return samples and tokens fine enough for both ends."""
        parts = [mesh.size("cp") * (1 if self.whole else mesh.size("tp")) for mesh in self.meshes]
        return lcm(*(mesh.size("dp") for mesh in self.meshes)), lcm(*parts)

    def held(self, mesh: Mesh, rank: int) -> Cells:
        """Return the cells of the rank at this place of a stage, tp counted fastest."""
        samples, tokens = self.grid
        tp, cp, dp = (mesh.size(axis) for axis in ("tp", "cp", "dp"))
        t, c, d = rank % tp, rank // tp % cp, rank // (tp * cp)
        position, parts = (c, cp) if self.whole else (c * tp + t, cp * tp)
        return cells(share(samples, d, dp), share(tokens, position, parts))

    def sent(self, rank: int) -> Cells:
        """Return what a rank sends: all it holds, or (whole tokens) its part of the samples."""
        sender, receiver = self.meshes
        held = self.held(sender, rank)
        pieces = receiver.size("dp") // sender.size("dp")
        if not self.whole or pieces <= 1:
            return held
        samples = sorted({sample for sample, _ in held})
        part = rank % sender.size("tp") // receiver.size("tp")
        chosen = {samples[at] for at in share(len(samples), part, pieces)}
        return frozenset(cell for cell in held if cell[0] in chosen)

    @property
    def regrouping(self) -> Task | None:
        phase = TaskKind.F if self.received.kind is TaskKind.RECV_F else TaskKind.B
        found = [
            task
            for task in self.device.tasks
            if task.kind in COLLECTIVE_KINDS
            and (task.stage, task.microbatch) == (self.received.stage, self.received.microbatch)
            and task.phase == phase
            and self.plan.groups[task.group].axis == "pp"
        ]
        assert len(found) <= 1
        return found[0] if found else None

    def members(self, rank: int) -> Sequence[int]:
        """Return the places of the ranks with which one regroups; itself where nothing is regrouped."""
        if self.regrouping is None:
            return [rank]
        first = self.device.pipeline_rank * self.plan.replicas
        return [other - first for other in self.plan.groups[self.regrouping.group].of(first + rank)]

    @property
    def cell_bytes(self) -> float:
        """Return the bytes of a cell of a microbatch, from the shapes of the edge's tensors."""
        edge = self.plan.edges[self.received.edge]
        training = self.plan.training
        scale = training.micro_batch_sizes[self.received.microbatch] / training.micro_batch_sizes[0]
        values = edge.values if self.received.kind is TaskKind.RECV_F else edge.grad_values
        specs = [self.plan.segments[segment].outputs[output] for segment, output in values]
        assert all(spec.batch_dim == 0 for spec in specs)
        replica = scale * sum(prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in specs)
        return replica * self.plan.mesh.size("dp") / prod(self.grid)


def cells(samples: range, tokens: range) -> Cells:
    return frozenset(product(samples, tokens))


def share(total: int, position: int, parts: int) -> range:
    return range(position * total // parts, (position + 1) * total // parts)


def borders(plan: Plan, *, sequence_parallel: bool) -> Iterator[Border]:
    """Yield every border, for one microbatch of each size."""
    sizes = plan.training.micro_batch_sizes
    for device in plan.device_plans:
        received = [task for task in device.tasks if task.kind in RECV_KINDS]
        for task in {(one.kind, one.edge, sizes[one.microbatch]): one for one in received}.values():
            border = Border(plan=plan, device=device, received=task, whole=not sequence_parallel)
            if len({mesh.size("dp") for mesh in border.meshes}) > 1:
                yield border


def test_every_rank_ends_with_the_cells_that_its_mesh_gives_it() -> None:
    seen = 0
    for name, plan, sequence_parallel in plans():
        for border in borders(plan, sequence_parallel=sequence_parallel):
            seen += 1
            for rank in range(plan.replicas):
                needed = border.held(border.meshes[1], rank)
                got = frozenset[tuple[int, int]]().union(
                    *(border.sent(other) for other in border.members(rank))
                )
                assert needed <= got, name
    assert seen > 60


def test_ranks_regroup_with_those_of_their_samples_only() -> None:
    for name, plan, sequence_parallel in plans():
        for border in borders(plan, sequence_parallel=sequence_parallel):
            coarse = min(border.meshes, key=lambda mesh: mesh.size("dp"))
            for rank in range(plan.replicas):
                of_replica = {sample for sample, _ in border.held(coarse, rank)}
                for other in border.members(rank):
                    assert {sample for sample, _ in border.sent(other)} <= of_replica, name


def test_messages_and_regroupings_weigh_exactly_what_they_move() -> None:
    for name, plan, sequence_parallel in plans():
        for border in borders(plan, sequence_parallel=sequence_parallel):
            sent, needed = border.sent(0), border.held(border.meshes[1], 0)
            assert border.received.size_bytes == len(sent) * border.cell_bytes, name
            if border.regrouping is not None:
                assert border.regrouping.size_bytes == len(needed) * border.cell_bytes, name


def matmul_flops(work: Work) -> int:
    return sum(one.flops * one.count for one in work.operations if one.kind is OpKind.MATMUL)


def test_all_ranks_together_do_the_matmuls_of_the_model_once() -> None:
    """With sequence parallelism nothing is repeated, whatever the meshes."""
    seen = 0
    for draft in drawn_with_meshes(25):
        if draft.regions != "dense" or not is_cut_over_tokens(draft):
            continue
        plan = compile_drawn(draft)
        seen += 1
        done = sum(
            matmul_flops(plan.works[task.work]) * plan.replicas
            for device in plan.device_plans
            for task in device.tasks
            if task.kind is TaskKind.F
        )
        model = draft.model(1)
        each = sum(
            one.flops * one.count
            for segment in model.segments
            for one in segment.forward.operations
            if one.kind is OpKind.MATMUL
        )
        assert done == each * plan.training.global_batch, draft
    assert seen > 5


def test_every_rank_of_a_stage_does_as_much_in_any_mesh() -> None:
    """Half of the sequences, with weights cut half as fine: what a rank computes in a region is the same."""
    one, other = plan_of("meshes"), plan_of("meshes", stage_meshes=())
    for device, same in zip(one.device_plans, other.device_plans, strict=True):
        for kind in (TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.BW):
            flops = [
                sum(
                    matmul_flops(plan.works[task.work])
                    for task in found.tasks
                    if task.kind is kind and task.work >= 0
                )
                for plan, found in ((one, device), (other, same))
            ]
            assert flops[0] == flops[1], kind


@pytest.mark.parametrize("name", CASES)
def test_tensors_that_nobody_regroups_are_found(name: str) -> None:
    plan = plan_of(name)
    found = [without_regrouping(plan, *place) for place in regroupings(plan)]
    assert found
    for mutant in found:
        assert "never-regrouped" in {violation.rule for violation in check_plan(mutant)}


def regroupings(plan: Plan) -> list[tuple[int, int, int]]:
    """Return (pipeline rank, stage, phase) of all that is regrouped."""
    return sorted(
        {
            (device.pipeline_rank, task.stage, task.phase)
            for device in plan.device_plans
            for task in device.tasks
            if task.kind in COLLECTIVE_KINDS
            and task.bucket == NONE
            and task.microbatch != NONE
            and plan.groups[task.group].axis == "pp"
        }
    )


@pytest.mark.parametrize("name", CASES)
def test_a_device_that_says_the_mesh_of_another_is_found(name: str) -> None:
    plan = plan_of(name)
    for number, device in enumerate(plan.device_plans):
        if device.mesh is not None:
            devices = list(plan.device_plans)
            devices[number] = replace(device, mesh=None)
            rules = {violation.rule for violation in check_plan(replace(plan, device_plans=tuple(devices)))}
            assert rules & {"never-reduced", "transfer-bytes"}, name


@pytest.mark.parametrize(
    ("axes", "rule"),
    [
        ((("tp", 8),), "must be the 4 ranks"),
        ((("tp", 2), ("pp", 2)), "must name tp, cp and dp"),
        ((("tp", 4), ("tp", 1)), "each at most once"),
        ((("tp", -4), ("dp", -1)), "must be >= 1"),
    ],
)
def test_a_device_mesh_that_is_none_of_its_ranks_is_a_fault(
    axes: tuple[tuple[str, int], ...], rule: str
) -> None:
    plan = plan_of("meshes")
    devices = (replace(plan.device_plans[0], mesh=Mesh(axes=axes)), *plan.device_plans[1:])
    (found,) = check_plan(replace(plan, device_plans=devices))
    assert found.rule == "index"
    assert rule in found.message
    assert "device_plans[0].mesh.axes" in found.message


def test_a_device_mesh_whose_replicas_share_a_sequence_is_a_fault() -> None:
    plan = plan_of("meshes_cp")
    mesh = Mesh(axes=(("tp", 1), ("cp", 1), ("dp", 4)))
    devices = (replace(plan.device_plans[0], mesh=mesh), *plan.device_plans[1:])
    found = check_plan(replace(plan, device_plans=devices))
    assert {one.rule for one in found} == {"index"}
    assert "must divide a microbatch of 1 x 2 sequences" in found[0].message


@pytest.mark.parametrize(
    ("cut", "names"),
    [(TP, {"2ALL_TO_ALL:F0"}), (PLAIN_TP, {"2ALL_GATHER:F0/1", "2ALL_GATHER:F0/2"})],
    ids=["sequence_parallel", "whole_tokens"],
)
def test_what_a_stage_receives_from_two_other_meshes_is_regrouped_together_or_by_its_own_name(
    cut: TensorSharding, names: set[str]
) -> None:
    """The residual comes from stage 0, the attention from stage 1, and both have more replicas."""
    meshes = (
        StageMesh(segments=(0,), axes=(("tp", 1), ("cp", 1), ("dp", 4))),
        StageMesh(segments=(5, 6, 7, 8), axes=(("tp", 4), ("cp", 1), ("dp", 1))),
    )
    plan = plan_of(
        "meshes", stages=[0, 1, 1, 1, 1, 2, 2, 2, 2], rows=fused(3, 2), stage_meshes=meshes,
        tensor_shardings=(cut,),
    )  # fmt: skip
    assert check_plan(plan) == []
    codes = plan.device_plans[2].codes()
    assert len(set(codes)) == len(codes)
    assert sum(rank == 2 for rank, *_ in regroupings(plan)) == 1
    of_pp = [task.group >= 0 and plan.groups[task.group].axis == "pp" for task in plan.device_plans[2].tasks]
    first = {code for code, mine in zip(codes, of_pp, strict=True) if mine and "F0" in code}
    assert first == names


def test_a_plan_without_meshes_of_its_own_says_none() -> None:
    assert {device.mesh for device in plan_of("tp_split").device_plans} == {None}
    same = plan_of("meshes", stage_meshes=())
    assert np.array_equal([device.mesh for device in same.device_plans], [None, None])
