"""What predictions of many jobs share, so that hardware, models and graphs are made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

from piper.plan_store import PlanStore

T = TypeVar("T")

MOST = {"hardware": 64, "source": 256, "fingerprint": 256, "capture": 64, "graph": 4}
"""How many things of each kind are kept: those used last."""


class Workbench:
    """Keeps what was made; predictions with one are those without.

    Files (clusters, stacks, configs) are read once, so a workbench is for as long as they stay as they are.

    Args:
        plans: where plans are kept for other processes, or None: nowhere.
    """

    def __init__(self, *, plans: PlanStore | None = None) -> None:
        self.plans = plans
        self._kept: dict[str, OrderedDict[Hashable, object]] = {kind: OrderedDict() for kind in MOST}

    def once(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned for a key the last time, or returns now.

        Args:
            kind: a key of `MOST`; decides the type.
            key: all that decides what is made; None: it is not known, and nothing is kept.
            make: makes it.
        """
        if key is None:
            return make()
        kept = self._kept[kind]
        if key in kept:
            kept.move_to_end(key)
            return kept[key]  # type: ignore[return-value]
        made = make()
        kept[key] = made
        if len(kept) > MOST[kind]:
            kept.popitem(last=False)
        return made
