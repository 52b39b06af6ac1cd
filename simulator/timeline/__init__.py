"""Timelines: spans, memory curves, attribution, traces, pictures."""
