"""Profiling: what this machine is and does."""
