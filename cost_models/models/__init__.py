"""Cost models by name."""
