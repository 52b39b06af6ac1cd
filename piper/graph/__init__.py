"""The global training graph."""
