"""From measurements of a machine to its cluster file (`docs/calibration.md`).

table.py       rows of CSV files, as `piper profile` writes them
operation.py   a row -> the operation that it timed
fit.py         robust least squares over figures of a catalogue file
device.py      rows of kernels -> figures of a device
network.py     rows of collectives and transfers -> curves of a cluster
host.py        rows of processes at once, launches and passes -> cores and costs of a host
calibrate.py   all of it: rows + the nearest cluster of the catalogue -> content of a file, errors
anchor.py      a calibrated cluster -> one whose predictions agree with a measured job, within bounds
"""

from cost_models.calibration.calibrate import Calibration, calibrate
from cost_models.calibration.table import Measurement, read_table, write_table

__all__ = ["Calibration", "Measurement", "calibrate", "read_table", "write_table"]
