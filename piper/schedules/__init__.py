"""Schedules by name."""
