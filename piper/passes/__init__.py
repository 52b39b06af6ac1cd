"""Passes by name."""
