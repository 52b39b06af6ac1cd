"""`piper.annotate`: name regions of a model's forward, so that directives can speak about them.

[Note: annotation]
A scope gives every operation inside it a tag (name, index). Indices count up per name through the whole
model, from 0, in tracing order, unless given: a given index re-opens an earlier scope or skips ahead, and
counting goes on behind the highest one. With nested scopes of one name the inner one wins. The name "PP"
marks the units at which the model may be cut into pipeline stages. Outside of tracing a scope does nothing.

[Note: outside of scopes]
What runs in no scope is refused, except where nobody could have put it into one: in a model that was tagged
from outside (`piper.tagging`), and in a loss that Piper computes. There it belongs to the segment that ran
before it, or, before the first one, to the first. With units by default, what runs before the first and
after the last of them is a "PP" unit of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from piper.errors import ModelError


@dataclass(frozen=True, slots=True)
class Annotation:
    """One open scope: its tag name, its index, and a number unique among all scopes of the trace.

    `counted`: the index came from counting the entries of this name, not from the user.
    """

    name: str
    index: int
    uid: int
    counted: bool = True


Stack = tuple[Annotation, ...]
"""Open scopes, outer to inner."""


@dataclass(slots=True)
class Trace:
    """State of one tracing of a model.

    Args:
        on_enter: called with the new stack when a scope opens; the context it returns closes with the
            scope (an exporter marks its own graph so).
        stack: the scopes open now.
        joins: whether what runs in no scope joins the segment before it [Note: outside of scopes].
        units: how many outermost scopes open between the unit before and the unit after; None: no such.
    """

    on_enter: Callable[[Stack], AbstractContextManager[object]] | None = None
    stack: Stack = ()
    joins: bool = False
    units: int | None = None
    _outermost: int = 0
    _around: dict[int, Stack] = field(default_factory=dict)
    _next_index: dict[str, int] = field(default_factory=dict)
    _next_uid: int = 0

    def open(self, name: str, index: int | None) -> Annotation:
        """Push a scope; the index is the next one of its name unless given."""
        self._outermost += not self.stack
        number = self._next_index.get(name, 0) if index is None else index
        self._next_index[name] = max(self._next_index.get(name, 0), number + 1)
        annotation = Annotation(name, number, self._next_uid, counted=index is None)
        self._next_uid += 1
        self.stack = (*self.stack, annotation)
        return annotation

    @property
    def here(self) -> Stack:
        """Return the scopes of what runs now; empty: those of what ran before [Note: outside of scopes]."""
        if self.stack or self.units is None or 0 < self._outermost < self.units:
            return self.stack
        opened = self._outermost
        if opened not in self._around:
            self._around[opened] = (self.open("PP", None),)
            self.stack, self._outermost = (), opened
        return self._around[opened]


_TRACE: ContextVar[Trace | None] = ContextVar("piper_trace", default=None)


@contextmanager
def annotate(name: str, index: int | None = None) -> Iterator[Annotation | None]:
    """Tag the operations of the `with` block; yields the annotation while tracing, else None.

    Args:
        name: tag name, not empty; "PP" marks a unit of the pipeline cut.
        index: explicit index (may re-open an earlier one); default: one more than the highest so far.
    Raises: ModelError for an empty name or a negative index.
    """
    if not isinstance(name, str) or not name or name in {"PASS", "MB"}:
        raise ModelError(
            where="piper.annotate",
            field="name",
            value=name,
            rule="must be a non-empty text other than PASS and MB",
            fix='use a tag such as "PP"',
        )
    if index is not None and (isinstance(index, bool) or not isinstance(index, int) or index < 0):
        raise ModelError(
            where="piper.annotate",
            field="index",
            value=index,
            rule="must be a whole number >= 0",
            fix="leave it out to count scopes automatically",
        )
    trace = _TRACE.get()
    if trace is None:
        yield None
        return
    outer = trace.stack
    annotation = trace.open(name, index)
    with ExitStack() as scope:
        scope.callback(setattr, trace, "stack", outer)
        if trace.on_enter is not None:
            scope.enter_context(trace.on_enter(trace.stack))
        yield annotation


@contextmanager
def joined(*, units: int | None = None) -> Iterator[None]:
    """Let what runs in the block outside of scopes join what ran before it [Note: outside of scopes].

    Args:
        units: how many outermost scopes will open, before and after which are units; None: no such.
    """
    trace = _TRACE.get()
    if trace is None:
        yield
        return
    before, trace.joins = trace.joins, True
    trace.units = units if trace.units is None else trace.units
    try:
        yield
    finally:
        trace.joins = before


@contextmanager
def tracing(
    on_enter: Callable[[Stack], AbstractContextManager[object]] | None = None,
) -> Iterator[Trace]:
    """Collect annotations of the block with fresh counters."""
    trace = Trace(on_enter=on_enter)
    token = _TRACE.set(trace)
    try:
        yield trace
    finally:
        _TRACE.reset(token)


def tags_of(stack: Stack) -> tuple[tuple[str, int], ...]:
    """Return the tags of a stack, sorted by name; of equal names the inner scope wins."""
    return tuple(sorted({annotation.name: annotation.index for annotation in stack}.items()))
