"""`ModelSource`: which model, and how to build it; free of torch until it is built."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piper.errors import ModelError
from piper.models.fused import with_fused_projections
from piper.models.shape import DecoderShape
from piper.user_code import user_code
from simulator.plan import ModelFacts

if TYPE_CHECKING:
    from torch import nn

    from piper.capture import KernelChoice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelSource:
    """A model by name, by `config.json`, or by factory.

    Args:
        name: shown in reports.
        kind: "catalogue", "config" or "factory".
        where: the catalogue entry, file or factory text, for messages.
        family: key of `piper.models.MODELS`; None for a factory.
        config: the Hugging Face config; None for a factory.
        shape: what the config describes; None for a factory.
        factory: "package.module:function"; None for a family.
        context_length: longest sequence that the model was made for; None when unknown (factory).
        default_seq_len: the sequence length when the user gives none; None when unknown (factory).
        n_parameters, facts: exact, without torch; None for a factory (known after capture).
        assumed: config keys that were left out, with the value taken.
        origin: who published the shape.
    """

    name: str
    kind: str
    where: str
    family: str | None = None
    config: Mapping[str, Any] | None = None
    shape: DecoderShape | None = None
    factory: str | None = None
    context_length: int | None = None
    default_seq_len: int | None = None
    n_parameters: int | None = None
    facts: ModelFacts | None = None
    assumed: tuple[str, ...] = ()
    origin: str = ""

    @property
    def length_breaks(self) -> tuple[int, ...]:
        """Return sequence lengths up to which the module runs one way, and beyond them another: windows."""
        layers = self.shape.layers if self.shape else ()
        windows = {getattr(layer.attention, "window", None) for layer in layers}
        return tuple(sorted(window for window in windows if window is not None))

    @property
    def num_layers(self) -> int | None:
        """Return the number of layers; None where only code knows it."""
        return len(self.shape.layers) if self.shape else None

    def fingerprint(self) -> str | None:
        """Return a key of everything about the model that decides what capture finds; None: not cacheable."""
        if self.shape is None:
            return None
        parts = [repr(replace(self.shape, assumed=(), notices=()))]
        files = sorted(Path(__file__).parent.glob("*.py"))
        parts += [file.read_text(encoding="utf-8") for file in files]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def written_for(self, kernels: KernelChoice) -> ModelSource:
        """Return the model as a framework with these kernels writes it: see `piper.models.fused`."""
        if kernels.projections == "separate" or self.shape is None:
            return self
        return replace(self, shape=with_fused_projections(self.shape))

    def build(self, *, dtype: str, device: str, seq_len: int | None = None) -> nn.Module:
        """Return the module; see `piper.models.build_module`."""
        from piper.models.build import build_module

        return build_module(self, dtype=dtype, device=device, seq_len=seq_len)


def load(target: str) -> Any:
    """Import one of our own "module:name" table entries."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def put_working_folder_on_path() -> None:
    """Let a factory be found in the folder where the user stands, as `python -m` would."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def resolve_factory(target: str, *, where: str) -> Any:
    """Import the user's "package.module:function"; each failure is a ModelError naming the part at fault."""
    module_name, _, attribute = target.partition(":")
    if not (
        module_name and attribute.isidentifier() and all(p.isidentifier() for p in module_name.split("."))
    ):
        raise ModelError(
            where=where, field="factory", value=target, rule="must be package.module:function",
            fix="write for example my_models.tiny:build",
        )  # fmt: skip
    put_working_folder_on_path()
    try:
        with user_code():
            module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        raise ModelError(
            where=where, field="module", value=missing or module_name,
            rule="cannot be found" if missing else f"fails to import: {type(error).__name__}: {error}",
            fix="install it, or start piper in the folder that holds it" if missing else "mend the module",
        ) from error  # fmt: skip
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ModelError(
            where=where, field="function", value=attribute,
            rule=f"is not a function of {module_name}" if found is None else "cannot be called",
            fix=_callables(module),
        )  # fmt: skip
    return found


def _callables(module: Any) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and inspect.getmodule(value) is module
    ]
    return f"it has: {', '.join(own)}" if own else "define a function there that returns the module"
