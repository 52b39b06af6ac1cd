"""Piper: plan, simulate, search and run distributed training."""
