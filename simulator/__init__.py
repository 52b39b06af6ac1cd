"""Simulator: plan in, timeline out; never imports piper or torch."""
