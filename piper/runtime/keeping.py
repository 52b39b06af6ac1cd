"""What autograd keeps of a part between its F and its B, where the plan says that some of it goes away.

[Note: what goes away]
Tensors at the borders of segments stay; of the others, those of segments that an R makes again go with the
end of the segment (all, or results of some kinds of operations), those that the host keeps go with OFFLOAD.
The graph stays: what went comes back to where autograd will look for it, from an R that runs the whole
segment on the same inputs, or from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.errors import check_invariant
from piper.capture.operations import kind_of
from piper.runtime.ledger import Elsewhere, Ledger, Saved
from piper.runtime.trace import tensors_in

Run = Callable[..., tuple[Tensor, ...]]
"""A segment's code."""
Given = tuple[Sequence[Tensor], Sequence[object]]
"""What it takes: tensors of other segments; parameters, buffers and the place where it runs."""


@dataclass(slots=True, kw_only=True)
class Keeping:
    """What one part keeps for one microbatch.

    Args:
        ledger: counts it.
        elsewhere: as in `Ledger.saved`.
        remade: segment -> the kinds of operations whose results are thrown away at once; None: all.
        saved: remade segment -> what autograd saved while it ran, in order.
        inside: segment -> what it saved and did not throw away, other than tensors at its borders.
        inputs: remade segment -> the tensors that it took from others.
    """

    ledger: Ledger
    elsewhere: Elsewhere
    remade: Mapping[int, frozenset[str] | None]
    saved: dict[int, list[Saved]] = field(default_factory=dict)
    inside: dict[int, list[Saved]] = field(default_factory=dict)
    inputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def run(self, number: int, run: Run, given: Given) -> tuple[Tensor, ...]:
        """Run a segment and keep what its backward needs, unless that is made again."""
        inputs, others = given
        found: list[Saved] = []
        kinds = self.remade.get(number)
        makers = _Makers()
        with self.ledger.saved(self.elsewhere, found), makers if kinds else nullcontext():
            made = run(*inputs, *others)
        borders = {_address(tensor) for tensor in (*inputs, *others, *made) if isinstance(tensor, Tensor)}
        inside = [saved for saved in found if saved.address not in borders]
        if number in self.remade:
            self.inputs[number] = tuple(_cut_off(tensor) for tensor in inputs)
            self.saved[number] = found
            for saved in inside:
                if kinds is None or makers.kinds.get(saved.address) in kinds:
                    saved.leave()
        self.inside[number] = [saved for saved in inside if not saved.is_away]
        return made

    def run_again(self, number: int, run: Run, others: Sequence[object]) -> None:
        """Run a remade segment again and let what it saves take the places of what went away."""
        found: list[Saved] = []
        with torch.enable_grad(), self.ledger.saved(self.elsewhere, found):
            made = run(*self.inputs.pop(number), *others)
        places, kept = self.saved.pop(number), set(map(id, self.inside[number]))
        check_invariant(len(found) == len(places), f"segment {number} saves something else when made again")
        for place, new in zip(places, found, strict=True):
            if id(place) not in kept and place.is_away:
                place.come_back(new.tensor)
        del made

    def take(self, first: int, size_bytes: int) -> OnHost:
        """Return the insides of segments from `first` on, as many as weigh `size_bytes`."""
        taken: list[Saved] = []
        for number in sorted(number for number in self.inside if number >= first):
            if OnHost(taken).size_bytes == size_bytes:
                break
            taken += self.inside[number]
        return OnHost(taken)


class _Makers(TorchDispatchMode):
    """Notes what kind of operation made each tensor last, as capture does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinds: dict[int, str] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler (seconds) to switch it off for this mode."""
        return False

    def __torch_dispatch__(  # noqa: PLR0917  torch fixes the signature
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run and note one operator."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            reads, writes = list(tensors_in((args, kwargs or {}))), list(tensors_in(result))
            kind = kind_of(func.overloadpacket.__name__, args, reads=reads, writes=writes)
            self.kinds |= dict.fromkeys(map(_address, writes), kind.value)
        return result


def _cut_off(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class OnHost:
    """Storages that wait on the host, and what autograd saved of them.

    Args:
        saved: all of one copy.
    """

    def __init__(self, saved: Sequence[Saved]) -> None:
        self._groups: dict[int, list[Saved]] = {}
        for one in saved:
            self._groups.setdefault(one.address, []).append(one)
        self._copies: dict[int, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all storages."""
        return sum(group[0].tensor.untyped_storage().nbytes() for group in self._groups.values())

    def leave(self) -> None:
        """Copy everything to the host and give its memory up."""
        for address, group in self._groups.items():
            self._copies[address] = whole(group[0].tensor).clone()
            for saved in group:
                saved.leave()

    def come_back(self) -> None:
        """Bring everything back."""
        for address, group in self._groups.items():
            memory = self._copies.pop(address).clone().untyped_storage()
            for saved in group:
                saved.come_back_in(memory)
        self._groups.clear()


def whole(tensor: Tensor) -> Tensor:
    """Return the whole memory of a tensor, flat, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
