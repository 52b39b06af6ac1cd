"""Pipeline units of a model without any annotation: its repeated blocks.

[Note: default units]
Of the lists of a model (`nn.ModuleList`, `nn.Sequential`) in which at least two children are alike (class
and shapes of their parameters), the one with the most parameters is the stack of layers: each child is a
"PP" unit and a "LAYER". What runs before the first of them is one unit (embedding), what runs after the
last is one unit (head and loss), and what runs between two belongs to the one before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from torch import nn

from piper.tagging import LAYER, UNIT, TaggedForward, is_tagged


def tag_repeated_blocks(model: nn.Module) -> str | None:
    """Tag the default units of a model [Note: default units].

    Returns: what to tell the user; None when there are no repeated blocks, or the model has tags already.
    """
    found = None if is_tagged(model) else _stack_of(model)
    if found is None:
        return None
    path, blocks = found
    for block in blocks:
        block.__dict__["forward"] = TaggedForward(
            block, ((UNIT, None), (LAYER, None)), own=block.__dict__.get("forward"), is_default=True
        )
    return (
        f"the model has no annotations: each of the {len(blocks)} blocks of {path} is a pipeline unit, what "
        "runs before them is another, and what runs after them; piper.annotate_modules says otherwise"
    )


def _stack_of(model: nn.Module) -> tuple[str, list[nn.Module]] | None:
    """Return the stack of layers: its name and children."""
    best: tuple[str, list[nn.Module]] | None = None
    most = 0
    for path, module in model.named_modules():
        children = [child for child in module._modules.values() if child is not None]  # shared ones too
        counts = Counter(_shape_of(child) for child in children)
        alike = isinstance(module, nn.ModuleList | nn.Sequential) and max(counts.values(), default=0) > 1
        size = sum(p.numel() for child in children for p in child.parameters()) if alike else 0
        if path and size > most:
            best, most = (path, list(dict.fromkeys(children))), size
    return best


def _shape_of(module: nn.Module) -> Hashable:
    return type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
