"""Directives by name."""
