"""Measure this machine: kernels, collectives, contention, host costs, into a table (`docs/calibration.md`).

cases.py                what is measured (no torch)
clock.py                samples -> median and spread
kernels.py              a case -> the call that is timed
group.py                collectives, and several processes that compute at once
passes.py               what the runtime itself costs, by tasks of tiny models
machine.py              all of it, within a time limit -> rows
probe.py                what torch can do here, for `piper doctor`
"""
