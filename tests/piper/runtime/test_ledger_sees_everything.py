"""The ledger's storages are all that there are: after compute tasks every living tensor is searched for.

Python knows all tensors (also what autograd saved, which hooks keep as Python objects). Of those that are
alive after a compute task, and were not before the first, each must be in the ledger, and each of the
ledger's must be alive. Left out: the batch of the step, which waits on the host, and messages on their way.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed

from piper.errors import RunFailedError
from piper.runtime.handlers import transfers
from piper.runtime.ledger import Ledger
from piper.runtime.step import StepState
from piper.runtime.worker import Flight, Worker
from tests.piper.runtime.jobs import plan_of, train
from tests.piper.runtime.named_runs import compiled_job
from tests.piper.runtime.test_ledger_equality import run
from tests.piper.runtime.toy import SEQ

ROUNDS, PAUSE_S = 50, 0.01
"""Other streams may be between making a tensor and holding it: what is wrong stays wrong."""


def living(*, besides: Iterable[torch.Tensor]) -> dict[int, tuple[int, ...]]:
    """Return address -> shape of a tensor that has it."""
    found = {
        thing.untyped_storage().data_ptr(): tuple(thing.shape)
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu" and thing.numel()
    }
    for tensor in besides:
        found.pop(tensor.untyped_storage().data_ptr(), None)
    return found


class Messages:
    """Stands for `torch.distributed` in the transfers, and knows what is on its way."""

    def __init__(self) -> None:
        self.on_their_way: dict[int, torch.Tensor] = {}

    def send(self, tensor: torch.Tensor, **options: Any) -> None:
        self._move(torch.distributed.send, tensor, options)

    def recv(self, tensor: torch.Tensor, **options: Any) -> None:
        self._move(torch.distributed.recv, tensor, options)

    def _move(self, function: Any, tensor: torch.Tensor, options: dict[str, Any]) -> None:
        self.on_their_way[id(tensor)] = tensor
        try:
            function(tensor, **options)
        finally:
            del self.on_their_way[id(tensor)]


@pytest.fixture
def _audited(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, before = Messages(), {}
    original = Worker._perform

    def perform(worker: Worker, flight: Flight, position: int, dispatch_ns: int) -> None:
        states = [known.state for known in worker._flights]

        def all_living() -> dict[int, tuple[int, ...]]:
            waiting = [tensor for state in states for tensor in (state.batch, state.squares)]
            sent = list(messages.on_their_way.values())
            return living(besides=[tensor for tensor in (*waiting, *sent) if tensor is not None])

        if not before:
            before.update(all_living())
        original(worker, flight, position, dispatch_ns)
        if worker._tasks[position].stream:
            return
        for _ in range(ROUNDS):
            alive, held = all_living(), dict(worker.context.ledger._held)
            unknown = [shape for key, shape in alive.items() if key not in held and key not in before]
            dead = [entry for key, entry in held.items() if key not in alive and entry[2]]
            if not unknown and not dead:
                return
            sleep(PAUSE_S)
        raise RunFailedError(f"alive and not in the ledger: {unknown}; in it and dead: {dead}")

    monkeypatch.setattr(Worker, "_perform", perform)
    monkeypatch.setattr(transfers, "dist", messages)


@pytest.mark.usefixtures("_audited")
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("tiny-llama", "pp=1"),
        ("tiny-llama", "pp=2,recompute=full"),
        ("tiny-moe", "pp=2,zero=1"),
        ("tests.piper.runtime.toy:crossing", "pp=2,recompute=full"),
        ("tests.piper.runtime.toy:frozen", "pp=2"),
    ],
)
def test_no_tensor_lives_outside_of_the_ledger(model: str, strategy: str) -> None:
    sizes = {"global_batch": 2} | ({"seq_len": SEQ} if "toy" in model else {})
    run(compiled_job(model, strategy, **sizes))


@pytest.mark.usefixtures("_audited")
def test_a_tensor_that_is_kept_in_secret_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    secret: list[torch.Tensor] = []

    def read_loss(*_: object) -> None:
        secret.append(torch.ones(3, 5))

    monkeypatch.setattr(StepState, "_read_loss", read_loss)
    with pytest.raises(RunFailedError, match=r"alive and not in the ledger: \[\(3, 5\)\]"):
        run(compiled_job("tiny-llama", "pp=1", global_batch=1))


def test_steps_like_those_before_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the fourth step on a ledger says what it knows, and autograd runs without hooks."""

    def alone(*_: object) -> None:
        raise AssertionError("counted")

    plan = plan_of("pp=1")
    counted = train(plan, steps=5, verify=False).ledgers[0].task_bytes
    assert (counted == counted[0]).all()
    original = Worker.run_step

    def watched(self: Worker, number: int) -> StepState:
        if number == 3:
            monkeypatch.setattr(Ledger, "_add", alone)
        return original(self, number)

    monkeypatch.setattr(Worker, "run_step", watched)
    again = train(plan, steps=5, verify=False).ledgers[0].task_bytes
    assert (again == counted).all()
