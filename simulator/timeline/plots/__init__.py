"""Pictures of a timeline: who runs what when, and memory over time (matplotlib is loaded on first use)."""

from simulator.timeline.plots.memory import plot_memory
from simulator.timeline.plots.steps import plot_timeline

__all__ = ["plot_memory", "plot_timeline"]
