"""What a device is asked for, in which order: a CPU needs little of it, a GPU all."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from piper.errors import JobError, RunFailedError
from piper.runtime.devices import cuda, open_device
from piper.runtime.devices.cpu import CpuDevice
from piper.runtime.devices.cuda import CudaDevice
from piper.runtime.groups import TransferKey, transfer_table
from piper.runtime.handlers import transfers
from piper.runtime.launch import run_rank
from piper.runtime.runnable import require_runnable_on_gpus
from piper.runtime.worker import Worker
from simulator.plan import RECV_KINDS, SEND_KINDS, Plan, TaskKind
from tests.piper.runtime.jobs import plan_of, train
from tests.piper.runtime.named_runs import compiled_job, require_equal, run_job
from tests.piper.runtime.toy import toy

Call = tuple[str, Any]


@dataclass(frozen=True)
class Moment:
    """A mark of `one_thread`: a time, and the transfers of the stream so far."""

    time_ns: int
    works: tuple[Any, ...]


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue everything from one thread, in the plan's order, as on a GPU: transfers go on by themselves.

    Only a stream that waits for a mark waits for the transfers before it.
    """
    works: dict[str, list[Any]] = {"": []}
    kept: list[torch.Tensor] = []
    current = [""]

    @contextmanager
    def on_stream(_self: CpuDevice, name: str) -> Iterator[None]:
        works.setdefault(name, [])
        current.append(name)
        yield
        current.pop()

    def issued(call: Any) -> Any:
        def issue(tensor: torch.Tensor, **where: Any) -> None:
            kept.append(tensor)
            works[current[-1]].append(cache(call(tensor, **where).wait))  # gloo would wait for another one

        return issue

    def wait(_self: CpuDevice, mark: Moment, **_: float) -> None:
        for finish in mark.works:
            finish()

    def mark(_self: CpuDevice) -> Moment:
        return Moment(perf_counter_ns(), tuple(works[current[-1]]))

    for name, value in {
        "threads": False,
        "counts_bytes": False,
        "on_stream": on_stream,
        "mark": mark,
    }.items():
        monkeypatch.setattr(CpuDevice, name, value)
    monkeypatch.setattr(CpuDevice, "wait", wait)
    monkeypatch.setattr(CpuDevice, "reach", wait)
    monkeypatch.setattr(CpuDevice, "ns", lambda _self, mark: mark.time_ns)
    monkeypatch.setattr(transfers, "dist", SimpleNamespace(send=issued(dist.isend), recv=issued(dist.irecv)))


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("dp=2,zero=3", {}),
        ("pp=2,dp=2,schedule=1f1b,zero=1", {"tied": True}),
        ("pp=2,schedule=zbv", {"crossing": True}),
        ("pp=2,vp=2,schedule=interleaved_1f1b,recompute=full", {"dropout": 0.1}),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_one_thread_that_follows_the_dispatch_order_trains_the_same(text: str, model: dict[str, Any]) -> None:
    require_equal(train(plan_of(text, clip=0.1, **model), model=model, timeout_s=10.0))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("strategy", ["tp=2", "dp=2,ep=2"])
def test_so_it_does_where_tensors_are_cut(strategy: str) -> None:
    job = compiled_job("tiny-moe", strategy, optimizer="sgd", global_batch=2)
    assert run_job(job, steps=2).result["verified"] is True


@pytest.mark.usefixtures("one_thread")
def test_a_loss_that_is_read_at_the_end_of_a_step_must_be_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    original = transfers.send_activations

    def broken(context: Any, step: Any, task: Any) -> None:
        for parameter in context.state.parameters.values():
            parameter.data.fill_(float("nan"))
        original(context, step, task)

    monkeypatch.setattr(transfers, "send_activations", broken)
    with pytest.raises(RunFailedError, match=r"the loss of microbatch \d in step 0 is nan"):
        train(plan_of("pp=2"), verify=False)


def written_down(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write what each rank asks of its device to a file."""
    calls: list[tuple[int, str, Any]] = []
    numbers, here = count(), threading.local()

    def note(name: str, what: Any) -> None:
        calls.append((threading.get_ident(), name, what))

    @contextmanager
    def on_stream(_self: CpuDevice, name: str) -> Iterator[None]:
        note("stream", name)
        here.name = name
        yield

    def mark(_self: CpuDevice) -> int:
        number = perf_counter_ns() + next(numbers)  # no two are equal
        note("mark", number)
        return number

    def close(worker: Worker) -> None:
        original(worker)
        (folder / f"{worker.context.rank}.pickle").write_bytes(pickle.dumps(calls))

    original = Worker.close
    monkeypatch.setattr(CpuDevice, "on_stream", on_stream)
    monkeypatch.setattr(CpuDevice, "mark", mark)
    monkeypatch.setattr(CpuDevice, "wait", lambda _self, mark: note("wait", mark))
    monkeypatch.setattr(CpuDevice, "used_here", lambda _self, tensor: note("used", tuple(tensor.shape)))
    monkeypatch.setattr(Worker, "close", close)


@pytest.mark.parametrize("text", ["pp=2,dp=2,schedule=zb_h1,zero=1", "dp=2,zero=3"])
def test_a_stream_waits_for_all_that_the_plan_says_before_a_task_begins(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(text, clip=0.1, global_batch=4)
    written_down(tmp_path, monkeypatch)
    train(plan, steps=2, verify=False)
    for rank in range(plan.num_ranks):
        calls = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        check_waits(plan, rank, calls)


def check_waits(plan: Plan, rank: int, calls: list[tuple[int, str, Any]]) -> None:
    device = plan.device_plans[plan.pipeline_rank_of(rank)]
    tasks, steps = list(device.tasks), 2
    blocks = {name: blocks_of(calls, name) for name in device.streams}
    ends: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, int], list[Call]] = {}
    for step in range(steps):
        for position, task in enumerate(tasks):
            block = found[step, position] = next(blocks[device.streams[task.stream]])
            ends[step, position] = [what for name, what in block if name == "mark"][-1]
    for (step, position), block in found.items():
        begin = next(at for at, (name, _) in enumerate(block) if name == "mark")
        waited = [what for name, what in block[:begin] if name == "wait"]
        wanted = [ends[step, other] for other in tasks[position].waits]
        if step > 0:
            wanted += [ends[step - 1, other] for other in tasks[position].previous_step_waits]
        assert waited == wanted, device.codes()[position]


def blocks_of(calls: list[tuple[int, str, Any]], stream: str) -> Iterator[list[Call]]:
    """Yield what was asked for each task of a stream; the thread is found by its first task."""
    block: list[Call] | None = None
    threads = {thread for thread, name, what in calls if (name, what) == ("stream", stream)}
    assert len(threads) == 1
    for thread, name, what in calls:
        if thread in threads and name == "stream":
            if block:
                yield block
            block = [] if what == stream else None
        elif thread in threads and block is not None:
            block.append((name, what))
    if block:
        yield block


def test_what_one_stream_made_and_another_reads_is_kept_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("pp=2", global_batch=2)
    written_down(tmp_path, monkeypatch)
    train(plan, steps=1, verify=False)
    for rank, sends, takes in ((0, "send_f>1", 1), (1, "send_b>0", 1)):
        calls = pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        for block in blocks_of(calls, sends):
            assert [name for name, _ in block if name == "used"] == ["used"] * takes


SCHEDULES = [
    "pp=4,schedule=1f1b",
    "pp=2,vp=2,schedule=interleaved_1f1b",
    "pp=2,vp=2,schedule=interleaved_zb",
    "pp=2,schedule=dualpipe_v",
    "pp=4,schedule=dualpipe",
    "pp=3,schedule=v_half",
    "pp=2,vp=3,schedule=looped_bfs",
]


@pytest.mark.parametrize("text", SCHEDULES)
def test_both_ends_of_a_way_list_its_transfers_in_the_same_order(text: str) -> None:
    """Without tags, that is what makes a receive get its own send [Note: one group per direction]."""
    plan = plan_of(text)
    sent, received = (transfers_of(plan, kinds) for kinds in (SEND_KINDS, RECV_KINDS))
    assert sent == received
    assert set(sent) == set(transfer_table(plan))


def transfers_of(plan: Plan, kinds: frozenset[TaskKind]) -> dict[TransferKey, list[tuple[int, int]]]:
    found: dict[TransferKey, list[tuple[int, int]]] = {}
    for device in plan.device_plans:
        for task in device.tasks:
            if task.kind in kinds:
                phase = "F" if task.kind in {TaskKind.SEND_F, TaskKind.RECV_F} else "B"
                for rank in plan.mesh.ranks(pp=device.pipeline_rank):
                    peer = plan.peer_rank(rank, task.peer)
                    ends = (rank, peer) if task.kind in SEND_KINDS else (peer, rank)
                    found.setdefault((*ends, phase), []).append((task.edge, task.microbatch))
    return found


class FakeEvent:
    def __init__(self, log: list[Call], *, enable_timing: bool) -> None:
        assert enable_timing
        self.log, self.reached = log, True

    def record(self) -> None:
        self.log.append(("record", self))

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.log.append(("synchronize", self))

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(self.log.index(("record", other)))  # milliseconds


class FakeStream:
    def __init__(self, log: list[Call], place: torch.device, *, priority: int) -> None:
        self.log, self.place, self.priority = log, place, priority

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(("wait_event", (self, event)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[CudaDevice, list[Call]]:
    """Open a device whose driver writes down what it is asked for."""
    log: list[Call] = []
    current: list[FakeStream] = []

    @contextmanager
    def stream(chosen: FakeStream) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "set_device", lambda index: log.append(("set_device", index)))
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(log, **options))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *where, **options: FakeStream(log, *where, **options))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append(("synchronize", "device")))
    found = open_device("cuda", index=3, priorities={"ep": 2})
    assert isinstance(found, CudaDevice)
    return found, log


def test_a_gpu_is_chosen_before_anything_is_recorded_on_it(gpu: tuple[CudaDevice, list[Call]]) -> None:
    device, log = gpu
    assert [name for name, _ in log] == ["set_device", "record", "synchronize"]
    assert device.place == torch.device("cuda", 3)


def test_each_stream_of_the_plan_is_one_of_the_gpu_and_urgent_ones_win(
    gpu: tuple[CudaDevice, list[Call]],
) -> None:
    device, _ = gpu
    with device.on_stream("compute"):
        compute = torch.cuda.current_stream()
    with device.on_stream("ep"):
        urgent = torch.cuda.current_stream()
    with device.on_stream("compute"):
        assert torch.cuda.current_stream() is compute
    assert urgent is not compute
    assert (urgent.priority, compute.priority) == (-2, 0)  # lower numbers win in torch


def test_a_wait_is_made_by_the_stream_that_waits(gpu: tuple[CudaDevice, list[Call]]) -> None:
    device, log = gpu
    with device.on_stream("send_f>1"):
        mark = device.mark()
    with device.on_stream("compute"):
        device.wait(mark)
        assert log[-1] == ("wait_event", (torch.cuda.current_stream(), mark))
    assert device.ns(mark) - device._origin_ns == pytest.approx(1e6 * log.index(("record", mark)))


def test_the_host_gives_up_a_moment_that_never_comes(gpu: tuple[CudaDevice, list[Call]]) -> None:
    device, _ = gpu
    mark = device.mark()
    device.reach(mark, limit_s=0.01)
    mark.reached = False
    with pytest.raises(RunFailedError, match=r"in 0\.01 s"):
        device.reach(mark, limit_s=0.01)


@pytest.mark.parametrize(("members", "warmed"), [([0, 2], True), ([1, 3], False)])
def test_a_communicator_is_made_at_once_and_warmed_up_by_its_members(
    members: list[int], warmed: bool, gpu: tuple[CudaDevice, list[Call]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, log = gpu
    place, device.place = device.place, torch.device("cpu")
    asked: dict[str, Any] = {}

    def new_group(chosen: list[int], **options: Any) -> str:
        asked.update(options, members=chosen)
        return "group"

    monkeypatch.setattr(cuda.dist, "new_group", new_group)
    monkeypatch.setattr(cuda.dist, "get_rank", lambda: 2)
    monkeypatch.setattr(cuda.dist, "all_reduce", lambda _, group: log.append(("all_reduce", group)))
    found = device.group(members, timeout=timedelta(seconds=1))
    assert (asked["backend"], asked["members"]) == ("nccl", members)
    assert asked["device_id"] == device.place != place
    assert (found == "group") is warmed
    assert [name for name, _ in log[3:]] == (["all_reduce", "synchronize"] if warmed else [])


@pytest.mark.parametrize(
    ("model", "strategy", "what"),
    [
        ("tiny-llama", "dp=2,zero=1,offload=optimizer", "offload on GPUs"),
        ("tiny-llama", "cp=2", "rings of attention on GPUs"),
        ("tiny-llama", "tp=2,async_tp=on", "async_tp on GPUs"),
    ],
)
def test_what_only_cpu_processes_run_is_refused_on_gpus(model: str, strategy: str, what: str) -> None:
    plan = compiled_job(model, strategy).plan
    with pytest.raises(JobError, match=f"(?s){what}.*--device cpu"):
        require_runnable_on_gpus(plan, verify=False)


def test_a_comparison_with_one_process_is_made_on_cpus() -> None:
    require_runnable_on_gpus(plan_of("pp=2,dp=2,zero=1"), verify=False)
    with pytest.raises(JobError, match=r"(?s)--verify on GPUs.*--local N"):
        require_runnable_on_gpus(plan_of("pp=2"), verify=True)


@pytest.mark.parametrize(("name", "rule"), [("cuda", "needs a GPU"), ("cud", "did you mean 'cuda'")])
def test_a_device_that_is_not_there_is_refused(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(JobError, match=rule):
        run_rank(plan_of("dp=1"), toy(), steps=1, device=name)
