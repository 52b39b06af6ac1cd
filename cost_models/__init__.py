"""Cost models: what an operation, a transfer or a collective costs on given hardware."""
