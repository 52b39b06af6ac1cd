"""Capture: an annotated module becomes segments with their operations and memory."""
