"""Space files: values, ranges, pins, refusals, spare memory; and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from cost_models.errors import InputError
from piper.search.space_file import read_space_file

FULL = """
schema_version: 1
values:
  tp: [1, 2, 4]
  micro_batch: {from: 1, to: 4}
  sp: on
  schedule: [1f1b, zbv]
  vp: 2
pin: {pp: 4, async_tp: off}
forbid: {recompute: [full, selective], zero: 3}
reserve: 4GiB
runnable: true
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return str(path)


def test_a_space_file_says_all_that_options_say(tmp_path: Path) -> None:
    file = read_space_file(written(tmp_path, FULL))
    assert file.values == {
        "tp": (1, 2, 4), "micro_batch": (1, 2, 3, 4), "sp": ("on",), "schedule": ("1f1b", "zbv"), "vp": (2,),
    }  # fmt: skip
    assert file.pin == {"pp": "4", "async_tp": "off"}
    assert file.forbid == (("recompute", "full"), ("recompute", "selective"), ("zero", "3"))
    assert (file.reserve_bytes, file.only_runnable) == (4 * 2**30, True)


def test_everything_but_the_version_may_be_left_out(tmp_path: Path) -> None:
    file = read_space_file(written(tmp_path, "schema_version: 1\n"))
    assert (file.values, file.pin, file.forbid, file.reserve_bytes) == ({}, {}, (), 0)
    assert not file.only_runnable


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("values: {tp: [1]}\n", "schema_version"),
        ("schema_version: 2\n", "schema_version"),
        ("schema_version: 1\nvalue: {tp: [1]}\n", "value"),
        ("schema_version: 1\nvalues: {tpp: [1]}\n", "dimension"),
        ("schema_version: 1\nvalues: {tp: [0]}\n", "tp"),
        ("schema_version: 1\nvalues: {tp: []}\n", "values.tp"),
        ("schema_version: 1\nvalues: {tp: [1.5]}\n", "values.tp"),
        ("schema_version: 1\nvalues: {tp: {from: 4, to: 1}}\n", "values.tp"),
        ("schema_version: 1\nvalues: {tp: {from: 1, to: 100000}}\n", "values.tp"),
        ("schema_version: 1\nvalues: {tp: {from: 1}}\n", "values.tp"),
        ("schema_version: 1\npin: {schedule: gpip}\n", "schedule"),
        ("schema_version: 1\npin: {pp: [1, 2]}\n", "pin.pp"),
        ("schema_version: 1\nforbid: {zero: 7}\n", "zero"),
        ("schema_version: 1\nreserve: 4 parsecs\n", "reserve"),
        ("schema_version: 1\nrunnable: perhaps\n", "runnable"),
        ("[1, 2]\n", "file"),
    ],
)
def test_a_bad_file_names_its_field(text: str, field: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_space_file(written(tmp_path, text))
    assert caught.value.field == field
    assert caught.value.fix
