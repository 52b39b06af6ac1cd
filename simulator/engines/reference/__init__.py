"""The reference engine: the definition of the semantics, as SimPy processes."""

from simulator.engines.reference.engine import run

__all__ = ["run"]
