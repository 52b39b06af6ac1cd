"""The fast engine: the answers of the reference engine, at millions of tasks per second."""

from simulator.engines.fast.engine import run

__all__ = ["run"]
