"""Fits: figures of GPUs, clusters and stacks -> those with which published runs are predicted best.

A step time is linear in the prices of what lies on its critical path as long as the path stays the same. So
each run is simulated once (`composition`), its step time is written as counts of operations, transfers,
collectives, launches and waits, and the parameters (`parameters`) are fitted to these sums by a damped
Gauss-Newton method with a robust loss and log-normal priors (`solver`). The result is simulated anew; a few
rounds suffice.
"""
