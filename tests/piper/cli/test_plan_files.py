"""Plans that nobody compiled: written by hand, simulated from their file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from piper.cli import main
from simulator.plan import DevicePlan, Group, Mesh, Plan, StreamRuleFacts, Task, TaskKind, Work
from simulator.plan.codec import load_plan, save_plan
from tests.models import matmul
from tests.simulator.plan.pipelines import change, find, insert, pipeline_plan

K = TaskKind
MIB = 2**20
MESH = Mesh(axes=(("tp", 2), ("cp", 2), ("dp", 2), ("pp", 2)))
STREAMS = ("tp", "cp", "ep", "host")
SERIES = (
    (K.ALL_GATHER, "tp", K.F),
    (K.RING_SHIFT, "cp", K.F),
    (K.ALL_TO_ALL, "ep", K.F),
    (K.OFFLOAD, "host", K.F),
    (K.RELOAD, "host", K.B),
)


def wide(plan: Plan) -> Plan:
    """Cut every rank of a plan into 2 x 2 ranks of tensor and context parallelism."""

    def members(group: Group) -> tuple[tuple[int, ...], ...]:
        if group.name == "world":
            return (MESH.ranks(),)
        if group.axis == "pp":
            return tuple(zip(*(MESH.ranks(pp=p) for p in group.pipeline_ranks), strict=True))
        (rank,) = group.pipeline_ranks
        return tuple(MESH.ranks(pp=rank, tp=tp) for tp in range(2))

    return replace(
        plan, mesh=MESH, groups=tuple(replace(group, members=members(group)) for group in plan.groups)
    )


def exchange_groups(rank: int) -> tuple[Group, ...]:
    """Return the groups of a pipeline rank: neighbours, every second rank, both together."""
    pairs = [(a, b) for a in range(2) for b in range(2)]
    sets = {
        "tp": tuple(MESH.ranks(pp=rank, cp=cp, dp=dp) for cp, dp in pairs),
        "cp": tuple(MESH.ranks(pp=rank, tp=tp, dp=dp) for tp, dp in pairs),
        "ep": tuple(MESH.ranks(pp=rank, dp=dp) for dp in range(2)),
    }
    return tuple(
        Group(name=f"{axis}{rank}", axis=axis, pipeline_ranks=(rank,), members=members)
        for axis, members in sets.items()
    )


def exchanging() -> Plan:
    """Between forward and backward, every microbatch gathers, shifts, exchanges, leaves and returns."""
    plan = wide(pipeline_plan())
    first = len(plan.groups)
    plan = replace(
        plan,
        training=replace(plan.training, dtype="bf16"),
        works=tuple(Work(label=work.label, operations=(matmul(work.label, 4096),)) for work in plan.works),
        groups=(*plan.groups, *exchange_groups(0), *exchange_groups(1)),
        device_plans=tuple(with_streams(device) for device in plan.device_plans),
    )
    for rank in range(2):
        for microbatch in range(4):
            before = f"{rank}F{microbatch}"
            for kind, stream, phase in SERIES:
                task = Task(
                    kind=kind, stage=rank, microbatch=microbatch, phase=phase, part=2 * rank,
                    stream=plan.device_plans[rank].streams.index(stream), size_bytes=MIB,
                    group=-1 if stream == "host" else first + 3 * rank + STREAMS.index(stream),
                )  # fmt: skip
                plan = insert(plan, rank, task, after=before, waits=(before,))
                before = f"{rank}{kind.name}:{phase.name}{microbatch}/{2 * rank}"
            plan = waiting(plan, rank, f"{rank}B{microbatch}", for_whom=before)
    return plan


def with_streams(device: DevicePlan) -> DevicePlan:
    streams = (*device.streams, *STREAMS)
    rule = StreamRuleFacts(stream=streams.index("tp"), priority=1, sms=16)
    return replace(device, streams=streams, stream_rules=(rule,))


def waiting(plan: Plan, rank: int, code: str, *, for_whom: str) -> Plan:
    position = find(plan, rank, for_whom)
    return change(
        plan, rank, code, edit=lambda task: replace(task, waits=tuple(sorted({*task.waits, position})))
    )


def test_exchanges_ring_shifts_and_host_copies_of_a_file_are_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json.gz"
    save_plan(exchanging(), file)
    assert main(["simulate", str(file), "--cluster", "dgx-h100", "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    parts = found["breakdown_s"]
    assert sum(parts.values()) == pytest.approx(found["step_time_s"], rel=1e-9)
    for name in ("compute", "exposed_tp", "exposed_cp", "exposed_ep", "exposed_offload"):
        assert parts[name] > 0, name
    # The last rank waits for every copy: 4 microbatches, both directions, 1 MiB at 0.82 of 63 GB/s and 10 us.
    assert parts["exposed_offload"] >= 4 * 2 * (MIB / (0.82 * 63e9) + 10e-6) / 2
    assert found["n_gpus"] == 16
    assert [rank["n_devices"] for rank in found["ranks"]] == [8, 8]


def test_rules_of_streams_come_back_from_the_file_and_with_fewer_processors_collectives_take_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = exchanging()
    ruled, plain = tmp_path / "ruled.json", tmp_path / "plain.json"
    save_plan(plan, ruled)
    save_plan(
        replace(plan, device_plans=tuple(replace(d, stream_rules=()) for d in plan.device_plans)), plain
    )
    assert load_plan(ruled).device_plans[0].stream_rules == (StreamRuleFacts(stream=4, priority=1, sms=16),)
    times = []
    for file in (ruled, plain):
        assert main(["simulate", str(file), "--json"]) == 0, capsys.readouterr().err
        times.append(json.loads(capsys.readouterr().out)["breakdown_s"])
    assert sum(times[0].values()) > sum(times[1].values())


def test_a_plan_meets_another_allocator_but_keeps_its_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json")
    assert main(["simulate", "tiny-llama", "--strategy", "pp=2", "--plan-out", plan]) == 0
    capsys.readouterr()
    assert main(["simulate", plan, "--set", "cost.expandable_segments=true", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expandable_segments"] is True
    assert main(["simulate", plan, "--set", "model.attention=math"]) == 2
    assert "which is compiled already" in capsys.readouterr().err
