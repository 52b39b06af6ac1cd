"""A backward in two halves: what gradients of inputs need runs in BI, everything else waits for BW.

[Note: split backward]
The same slice as in capture, over the operators that autograd really calls: one belongs to BI if it writes
what a gradient that leaves its segment is computed from, so that linear layers, grouped products, embeddings,
biases and whatever a user wrote are put off by their dataflow, not by their names. A kernel that makes both
kinds of gradients (a fused norm) runs in BI; what it made for a parameter waits for BW. BW makes the calls
with the same arguments and in the order in which B would have made them: equal in every bit.

[Note: rehearsal]
Autograd calls the same operators for every microbatch of a size, because a trace fixes all shapes. Which of
them can wait is found once, before the first step, by running each part forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.errors import check_invariant
from piper.runtime.ledger import Elsewhere, Ledger, nowhere
from piper.runtime.trace import replace_leaves, tensors_in
from simulator.plan import MemoryClass


class Layout(NamedTuple):
    """What is known of a tensor before it is made."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Argument(NamedTuple):
    """The argument that an operator in place returns."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of a backward.

    Args:
        function: of ATen.
        late: whether it waits for BW.
        results: late: a `LateTensor` in place of each tensor that it returns, or the `Argument` that it is.
        anew: late: whether some result is an argument, or a view: then each microbatch gets others, else all
            have the same stand-ins.
    """

    function: Callable[..., Any]
    late: bool
    results: Any = None
    anew: bool = False


_NOTHING = Operator(function=tuple, late=False)
"""Behind the last operator."""

Halves = tuple[Operator, ...]
"""All operators of one backward, in order."""


class LateTensor(Tensor):
    """Stands for a tensor that BW will make: a layout and a number, no memory."""

    planned: Layout
    number: int

    @classmethod
    def standing_for(cls, layout: Layout, number: int) -> LateTensor:
        """Return a stand-in."""
        found: LateTensor = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, strides=layout.strides, dtype=layout.dtype, device=layout.device
        )
        found.planned, found.number = layout, number
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # noqa: PLR0917  torch fixes the signature
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse: operators on what is not there yet wait, too."""
        check_invariant(False, f"{func} needs what only BW makes")


class _Call(NamedTuple):
    """A call that waits; tensors that are not there yet are `LateTensor`s, also in the results."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: Any
    held: Sequence[int]


@dataclass(slots=True, kw_only=True)
class LateWork:
    """What BI of one part leaves to BW.

    Args:
        ledger: counts what the calls keep alive.
        calls: in the order of B.
        gradients: parameter -> its gradient: made already, a stand-in, or None.
        held: ledger keys of gradients that are there already.
        elsewhere: as in `Ledger.saved`: what lies there is gone when BW comes, so its calls get copies.
    """

    ledger: Ledger
    elsewhere: Elsewhere = nowhere
    calls: list[_Call] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)

    def own(self, leaf: Any) -> Any:
        """Return an argument that lasts until BW."""
        lies = isinstance(leaf, Tensor) and not isinstance(leaf, LateTensor)
        return leaf.clone() if lies and self.elsewhere(leaf) is not None else leaf

    def keep(self, gradients: dict[str, Tensor | None]) -> None:
        """Take the gradients of parameters as BI ends."""
        self.gradients = gradients
        made = [g for g in gradients.values() if g is not None and not isinstance(g, LateTensor)]
        self.held = [self.ledger.hold(gradient, MemoryClass.ACTIVATIONS) for gradient in made]

    def finish(self) -> Iterator[tuple[str, Tensor | None]]:
        """Make the calls; yield each gradient of a parameter as soon as it is there, and forget it."""
        wanted: dict[int, list[str]] = {}
        for name, gradient in self.gradients.items():
            if isinstance(gradient, LateTensor):
                wanted.setdefault(gradient.number, []).append(name)
            else:
                yield name, gradient
        self.gradients = {}
        for key in self.held:
            self.ledger.release(key)
        self.held = []
        last_use = self._last_uses(set(wanted))
        made: dict[int, Tensor] = {}
        for position in range(len(self.calls)):
            call = self.calls[position]
            self.calls[position] = _DONE
            _perform(call, made)
            done = [late.number for late in tensors_in(call.results) if isinstance(late, LateTensor)]
            for number in [number for number in done if number in wanted and last_use[number] <= position]:
                names = wanted.pop(number)
                gradient = made.pop(number)
                for name in names:
                    yield name, gradient
                del gradient
            for number in [number for number in made if last_use.get(number, -1) <= position]:
                del made[number]
            for key in call.held:
                self.ledger.release(key)
            del call
        check_invariant(not wanted, "a gradient that no call makes")
        self.calls = []

    def _last_uses(self, wanted: set[int]) -> dict[int, int]:
        """Return stand-in -> the last call that takes it."""
        found = dict.fromkeys(wanted, -1)
        for position, call in enumerate(self.calls):
            for tensor in tensors_in((call.args, call.kwargs)):
                if isinstance(tensor, LateTensor):
                    found[tensor.number] = position
        return found


_DONE = _Call(torch.empty, (), {}, None, ())


def _perform(call: _Call, made: dict[int, Tensor]) -> None:
    def real(leaf: Any) -> Any:
        return made[leaf.number] if isinstance(leaf, LateTensor) else leaf

    args, kwargs = replace_leaves((call.args, call.kwargs), real)
    found = call.function(*args, **kwargs)
    for late, tensor in zip(tensors_in(call.results), tensors_in(found), strict=True):
        if isinstance(late, LateTensor):
            made[late.number] = tensor


class Deferring(TorchDispatchMode):
    """Runs the early operators of a backward and keeps the late ones.

    Args:
        halves: from the rehearsal.
        work: takes the late calls.
    """

    def __init__(self, halves: Halves, work: LateWork) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._halves = halves
        self._work = work
        self._at = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler (seconds) to switch it off for this mode."""
        return False

    def __torch_dispatch__(  # noqa: PLR0917  torch fixes the signature
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run or keep one operator."""
        operator = self._halves[self._at] if self._at < len(self._halves) else _NOTHING
        if operator.function is not func:
            check_invariant(False, f"{func} where the rehearsal had {operator.function}")
        self._at += 1
        if not operator.late:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._work.elsewhere is not nowhere:
            args, kwargs = replace_leaves((args, kwargs), self._work.own)
        results = _anew(operator.results, args) if operator.anew else operator.results
        hold = self._work.ledger.hold
        held = [hold(tensor, MemoryClass.ACTIVATIONS) for tensor in _given(args, kwargs)]
        self._work.calls.append(_Call(func, args, kwargs or {}, results, held))
        return results

    def check_complete(self) -> None:
        """Raise InternalError if the backward had fewer operators than its rehearsal."""
        check_invariant(self._at == len(self._halves), "a backward is shorter than its rehearsal")


def _given(args: Sequence[Any], kwargs: dict[str, Any] | None) -> list[Tensor]:
    """Return the arguments that are tensors already; arguments of ATen are flat, but for lists."""
    found: list[Tensor] = []
    for given in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(given, Tensor):
            if type(given) is not LateTensor:
                found.append(given)
        elif isinstance(given, list | tuple):
            found += [t for t in given if isinstance(t, Tensor) and type(t) is not LateTensor]
    return found


def _anew(results: Any, args: Sequence[Any]) -> Any:
    """Return stand-ins of this call; autograd makes a view of what a view operator returns, once."""
    if isinstance(results, LateTensor):
        return LateTensor.standing_for(results.planned, results.number)
    if isinstance(results, Argument):
        return args[results.position]
    return None if results is None else type(results)(_anew(item, args) for item in results)


@dataclass(slots=True)
class _Seen:
    """An operator as the rehearsal saw it; storages by number. Without layouts of results it cannot wait."""

    function: Callable[..., Any]
    reads: frozenset[int]
    writes: frozenset[int]
    changes: frozenset[int]
    results: Any

    @property
    def is_view(self) -> bool:
        """Return whether it gives back a view, and computes nothing."""
        schema = self.function._schema  # type: ignore[attr-defined]
        return not schema.is_mutable and any(made.alias_info is not None for made in schema.returns)


class Rehearsal(TorchDispatchMode):
    """Watches the backward of one part, to find out what can wait.

    Attributes:
        wanted: storages of the gradients that leave a segment.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wanted: set[int] = set()
        self._seen: list[_Seen] = []
        self._known: dict[int, StorageWeakRef] = {}  # a known storage's address does not come again

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler (seconds) to switch it off for this mode."""
        return False

    def want(self, gradient: Tensor) -> None:
        """Note a gradient that leaves a segment."""
        self.wanted.add(self._storage(gradient))

    def halves(self) -> Halves:
        """Return what was seen, cut in two [Note: split backward]."""
        numbers = count()
        late = self._without_views(
            self._late(forced={i for i, seen in enumerate(self._seen) if seen.results is None})
        )
        return tuple(
            _waiting(seen, numbers) if i in late else Operator(function=seen.function, late=False)
            for i, seen in enumerate(self._seen)
        )

    def __torch_dispatch__(  # noqa: PLR0917  torch fixes the signature
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run and note one operator."""
        result = func(*args, **(kwargs or {}))
        given = list(tensors_in((args, kwargs or {})))
        changed = given[:1] if func._schema.is_mutable else []
        storages = [self._storage(tensor) for tensor in given]
        made = [self._storage(tensor) for tensor in tensors_in(result)]
        put_off = isinstance(result, Tensor) or _only_tensors(result)
        changes = frozenset(map(self._storage, changed))
        self._seen.append(
            _Seen(
                function=func,
                reads=frozenset(storages),
                writes=changes.union(made),
                changes=changes,
                results=_layouts(result, args) if put_off else None,
            )
        )
        return result

    def _late(self, *, forced: set[int]) -> set[int]:
        """Return the operators that can wait; those in `forced` cannot."""
        wanted, late = set(self.wanted), set()
        for i in reversed(range(len(self._seen))):
            seen = self._seen[i]
            if i in forced or not wanted.isdisjoint(seen.writes):
                wanted |= seen.reads
            else:
                late.add(i)
        changed_later: set[int] = set()
        overtaken = set()
        for i in reversed(range(len(self._seen))):
            if i not in late:
                changed_later |= self._seen[i].changes
            elif not changed_later.isdisjoint(self._seen[i].reads):
                overtaken.add(i)  # it would read what BI has changed since
        return self._late(forced=forced | overtaken) if overtaken else late

    def _without_views(self, late: set[int]) -> set[int]:
        """Return what waits, less the views of what is there: they cost less than to wait."""
        found: set[int] = set()
        made: set[int] = set()
        for i in sorted(late):
            seen = self._seen[i]
            if not seen.is_view or not made.isdisjoint(seen.reads):
                found.add(i)
                made |= seen.writes
        return found

    def _storage(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        address = int(storage._cdata)
        if address not in self._known:
            self._known[address] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return address


def _waiting(seen: _Seen, numbers: Iterator[int]) -> Operator:
    """Return an operator that waits, with stand-ins for its results."""

    def stand_in(layout: Any) -> Any:
        if isinstance(layout, Layout):
            return LateTensor.standing_for(layout, next(numbers))
        if layout is None or isinstance(layout, Argument):
            return layout
        return type(layout)(stand_in(item) for item in layout)

    results = stand_in(seen.results)
    anew = seen.is_view or bool(seen.changes)
    return Operator(function=seen.function, late=True, results=results, anew=anew)


def _only_tensors(result: Any) -> bool:
    """Return whether an operator gave back tensors (or None) and nothing else; only then can it wait."""
    return isinstance(result, list | tuple) and all(
        item is None or isinstance(item, Tensor) for item in result
    )


def _layouts(result: Any, args: Sequence[Any]) -> Any:
    """Return the layouts of results; the position of the argument where one is returned itself."""
    if result is None:
        return None
    if not isinstance(result, Tensor):
        return type(result)(_layouts(item, args) for item in result)
    for position, given in enumerate(args):
        if given is result:
            return Argument(position)
    return Layout(result.shape, result.stride(), result.dtype, result.device)
