"""Tables of measurements: what is written is read, and what is broken is named by line and column."""

from pathlib import Path

import pytest

from cost_models.calibration import Measurement, read_table, write_table
from cost_models.errors import CostModelError

ROW = Measurement(
    device="Some CPU, 3 GHz", op="matmul", kernel="mm", dtype="fp32", shape=(1, 64, 32, 16),
    direction="wgrad", ranks=1, time_s=4.25e-6, repeats=7, spread=0.0125, versions="torch 2.13 gloo",
)  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    write_table(path, [ROW])
    assert read_table(path) == [ROW]


@pytest.mark.parametrize(
    ("before", "after", "field", "rule"),
    [
        ("matmul", "matmull", "op", "is not known"),
        ("1x64x32x16", "1x64x-3x16", "shape", "must be whole numbers >= 1"),
        ("4.2500", "nan", "time_us", "must be a number > 0"),
        ("0.0125", "-1", "spread", "must be a number >= 0"),
        ("wgrad", "back", "direction", "is not known"),
        ("fp32", "fp31", "dtype", "is not known"),
    ],
)
def test_a_broken_field_names_line_column_and_rule(
    before: str, after: str, field: str, rule: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    write_table(path, [ROW])
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(CostModelError) as error:
        read_table(path)
    assert (error.value.where, error.value.field) == (f"{path}:2", field)
    assert rule in error.value.rule


def test_a_file_without_the_columns_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("op,time\nmatmul,3\n")
    with pytest.raises(CostModelError, match="lacks device, kernel, dtype"):
        read_table(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match=r"TABLE = .*absent\.csv"):
        read_table(tmp_path / "absent.csv")
