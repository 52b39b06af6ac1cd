"""What publishers print of a catalogue entry, and whether our exact counts are theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_models.errors import check_invariant

_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Published numbers of parameters.

    Args:
        parameters: exact, or as printed ("671B").
        active: as printed, or None.
        includes, leaves_out: parameters that are counted there and not here, or the other way round.
        active_leaves_out: parameters that `active` does not count and we do.
        why: what these are, or "".
        source: who prints it.
    """

    parameters: int | str
    active: int | str | None
    includes: int
    leaves_out: int
    active_leaves_out: int
    why: str
    source: str

    def agrees(self, n_parameters: int, n_active_parameters: int) -> bool:
        """Tell whether both counts are the published ones.

        A printed number may be rounded or cut: it stands for what differs by less than one unit of its last
        digit.
        """
        ours = n_parameters + self.includes - self.leaves_out
        if not _agrees(self.parameters, ours):
            return False
        return self.active is None or _agrees(self.active, n_active_parameters - self.active_leaves_out)


def read_published(entry: Mapping[str, Any]) -> Published | None:
    """Return the published numbers of a catalogue entry; None where none are printed."""
    stated = entry.get("published")
    if stated is None:
        return None
    differs = {name: stated.get(name) for name in ("includes", "leaves_out", "active_leaves_out")}
    counts = {name: value["count"] if value else 0 for name, value in differs.items()}
    why = [f"{name.replace('_', ' ')} {value['what']}" for name, value in differs.items() if value]
    return Published(
        parameters=stated["parameters"], active=stated.get("active"), why="; ".join(why),
        source=stated["source"], **counts,
    )  # fmt: skip


def _agrees(printed: int | str, ours: int) -> bool:
    if isinstance(printed, int):
        return printed == ours
    check_invariant(printed[-1] in _UNITS, f"a printed number ends with one of {', '.join(_UNITS)}")
    digits, whole = printed[:-1], _UNITS[printed[-1]]
    last_digit = whole / 10 ** len(digits.partition(".")[2])
    return bool(abs(ours - float(digits) * whole) < last_digit)
