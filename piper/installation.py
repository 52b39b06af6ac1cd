"""Are `cost_models` and `simulator` ours? Both are names that a user's own folder may have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_COMPANIONS = ("cost_models", "simulator")


def foreign_packages() -> dict[str, str]:
    """Return name -> place of every companion package that does not lie beside `piper`; imports nothing."""
    home = Path(__file__).resolve().parent.parent
    found = {}
    for name in _COMPANIONS:
        spec = importlib.util.find_spec(name)
        place = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if place is None or place.parent.parent != home:
            found[name] = str(place or "nowhere")
    return found


def check_packages() -> None:
    """Raise ImportError when a package of the user hides one of ours, naming it and the fix."""
    for name, place in foreign_packages().items():
        raise ImportError(
            f"installation: {name} = {place} hides the package of that name which belongs to piper\n"
            "fix: rename that file or folder, or start Python elsewhere; or install piper-train again"
        )
