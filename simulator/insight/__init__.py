"""Insight: what decides the end of a step, how late everything else may be, and what a change would gain."""

from simulator.insight.critical_path import CriticalPath, PathPart, critical_path
from simulator.insight.slack import latest_end_ns, slack_ns
from simulator.insight.slowed import Slowed, slowed_on_path
from simulator.insight.what_if import ScaledCostModel, Scales, WhatIf, try_changes

__all__ = [
    "CriticalPath",
    "PathPart",
    "ScaledCostModel",
    "Scales",
    "Slowed",
    "WhatIf",
    "critical_path",
    "latest_end_ns",
    "slack_ns",
    "slowed_on_path",
    "try_changes",
]
