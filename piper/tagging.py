"""`piper.annotate_modules`: tag the submodules of a model from outside, without touching its source.

[Note: tags from outside]
A tagged module opens its scopes around its own `forward`, exactly as `with piper.annotate(...)` around it
would. Parameter names and `state_dict` stay as they are, a copy of the model is tagged too, and outside of
Piper the model behaves as before. A module that is called again opens its scopes again.

Indices: where one pattern alone gives a tag, and has one `{i}`, that number is the index. Else scopes count
up as they open. "PP" always counts, because the order of the pipeline is that of the calls; modules that a
pattern with `{i}` makes pipeline units are layers, and also get "LAYER" unless some pattern gives it.

What runs outside of every tagged module belongs to the segment that ran before it, and before the first one
to the first: a residual sum or final norm in the parent to the layer before, the loss to the head.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cost_models.errors import nearest
from piper.annotation import annotate
from piper.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

WHERE = "piper.annotate_modules"
UNIT, LAYER = "PP", "LAYER"
_NUMBER = re.compile(r"\{[A-Za-z_]\w*\}")

Tag = tuple[str, int | None]
"""Name and index; None: counted as scopes open."""


@dataclass(slots=True, eq=False)
class TaggedForward:
    """Stands in for the `forward` of a tagged module; a copy of the module gets a copy of it.

    Args:
        module: whose forward it is.
        tags: outer to inner.
        own: the `forward` that the instance had of its own, or None: that of its class.
        is_default: whether it is a unit by default, around which the rest forms units of its own.

    Attributes:
        called: whether it ran since this was last set to False.
    """

    module: nn.Module
    tags: tuple[Tag, ...]
    own: Callable[..., Any] | None = None
    is_default: bool = False
    called: bool = False

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the module's forward; `inspect.signature` looks here."""
        return self.own or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward inside its scopes."""
        self.called = True
        with ExitStack() as scopes:
            for name, index in self.tags:
                scopes.enter_context(annotate(name, index))
            return self.__wrapped__(*args, **kwargs)


def annotate_modules(model: nn.Module, tags: Mapping[str, str | Sequence[str]]) -> nn.Module:
    """Tag submodules by name, and return the model [Note: tags from outside].

    Args:
        model: changed in place: its tagged modules get another `forward`.
        tags: pattern -> tag or tags, outer to inner. A pattern is a name of `model.named_modules()` in
            which `{i}` stands for a number and `*` for any part of a name without dots. A module that
            several patterns match gets the tags of all, in their order.
    Raises: ModelError for a pattern that matches nothing, a tag given twice, a module that is never
        called, or a model that is tagged already.
    """
    if is_tagged(model):
        raise ModelError(
            where=WHERE, field="model", value=type(model).__name__, rule="is tagged already",
            fix="give all patterns in one call",
        )  # fmt: skip
    named = dict(model.named_modules(remove_duplicate=False))
    rules = [(pattern, _names_of(given, pattern)) for pattern, given in tags.items()]
    users = Counter(name for _, names in rules for name in set(names))
    found: dict[int, tuple[nn.Module, dict[str, int | None]]] = {}
    for pattern, names in rules:
        for path, numbers in _matches(pattern, list(named)):
            module, given = found.setdefault(id(named[path]), (named[path], {}))
            _require_callable(module, path=path, pattern=pattern)
            for name in _with_layer(names, pattern, known=users):
                fixed = numbers[0] if _is_numbered(name, numbers, users) else None
                if name in given and not _is_alias(named, path, module):
                    raise ModelError(
                        where=WHERE, field="tags", value=name, rule=f"is given to {path} twice",
                        fix="let one pattern give it",
                    )  # fmt: skip
                given.setdefault(name, fixed)
    for module, given in found.values():
        tag(module, tuple(given.items()))
    return model


def tag(module: nn.Module, tags: tuple[Tag, ...]) -> None:
    """Let a module open scopes around its forward."""
    module.__dict__["forward"] = TaggedForward(module, tags, own=module.__dict__.get("forward"))


def tagged_forwards(model: nn.Module) -> Iterator[tuple[str, TaggedForward]]:
    """Yield the tagged modules of a model: name and forward."""
    for path, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, TaggedForward):
            yield path, forward


def is_tagged(model: nn.Module) -> bool:
    """Return whether any module in a model was tagged from outside."""
    return any(True for _ in tagged_forwards(model))


@contextmanager
def all_called(model: nn.Module, *, where: str) -> Iterator[None]:
    """Raise ModelError at the end of the block when a tagged module has not run in it."""
    forwards = dict(tagged_forwards(model))
    for forward in forwards.values():
        forward.called = False
    yield
    idle = [path for path, forward in forwards.items() if not forward.called]
    if idle:
        raise ModelError(
            where=where, field="annotate_modules", value=idle[0], rule="is tagged but never called",
            fix="tag the modules that forward calls, or the one around them",
        )  # fmt: skip


def _names_of(given: str | Sequence[str], pattern: str) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names or ("",):
        with annotate(name):  # the rules for names are those of annotate
            pass
    if len(set(names)) < len(names):
        raise ModelError(
            where=WHERE, field=pattern, value=", ".join(names), rule="gives a tag twice", fix="give it once"
        )
    return names


def _matches(pattern: str, paths: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield the names that a pattern matches, with the numbers that stand for `{i}`."""
    parts = re.split(r"(\{[A-Za-z_]\w*\}|\*)", pattern)
    text = "".join(
        r"(\d+)" if _NUMBER.fullmatch(part) else r"[^.]*" if part == "*" else re.escape(part)
        for part in parts
    )
    hits = [(path, match) for path in paths if path and (match := re.fullmatch(text, path))]
    if not hits:
        known = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "{i}", path) for path in paths if path)
        raise ModelError(
            where=WHERE, field="pattern", value=pattern, rule="matches no module",
            fix=nearest(pattern, list(known)),
        )  # fmt: skip
    for path, match in hits:
        yield path, [int(number) for number in match.groups()]


def _with_layer(names: Sequence[str], pattern: str, *, known: Mapping[str, int]) -> tuple[str, ...]:
    if UNIT not in names or LAYER in known or not _NUMBER.search(pattern):
        return tuple(names)
    at = names.index(UNIT) + 1
    return (*names[:at], LAYER, *names[at:])


def _is_numbered(name: str, numbers: Sequence[int], users: Mapping[str, int]) -> bool:
    return name != UNIT and users.get(name) == 1 and len(numbers) == 1


def _is_alias(named: Mapping[str, nn.Module], path: str, module: nn.Module) -> bool:
    """Return whether a module has an earlier name than `path`."""
    return next(name for name, other in named.items() if other is module) != path


def _require_callable(module: nn.Module, *, path: str, pattern: str) -> None:
    if getattr(type(module).forward, "__name__", "") == "_forward_unimplemented":
        raise ModelError(
            where=WHERE, field=pattern, value=f"{path} ({type(module).__name__})",
            rule="is never called: it only holds others", fix=f'tag its children: "{path}.{{i}}"',
        )  # fmt: skip
