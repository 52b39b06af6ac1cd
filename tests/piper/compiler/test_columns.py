"""Tasks added in any order come out in dispatch order, with every reference rewritten."""

from __future__ import annotations

import numpy as np

from piper.compiler.columns import TaskColumns
from simulator.plan import NONE, TaskKind


def numbers(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_tasks_are_sorted_by_key_then_rank_then_number() -> None:
    columns = TaskColumns()
    columns.add({"kind": int(TaskKind.F), "stage": numbers(0, 1, 2, 3)}, numbers(5, 1, 5, 5))
    table = columns.table(columns.keys(), numbers(0, 0, 1, 0))
    assert table.stage.tolist() == [1, 0, 3, 2]


def test_fields_broadcast_over_templates_and_microbatches() -> None:
    columns = TaskColumns()
    keys = np.arange(6, dtype=np.int64).reshape(2, 3)
    tasks = columns.add({"stage": numbers(7, 8)[:, None], "microbatch": numbers(0, 1, 2)}, keys)
    assert tasks.tolist() == [[0, 1, 2], [3, 4, 5]]
    table = columns.table(columns.keys(), np.zeros(6, dtype=np.int64))
    assert table.stage.tolist() == [7, 7, 7, 8, 8, 8]
    assert table.microbatch.tolist() == [0, 1, 2, 0, 1, 2]
    assert set(table.peer.tolist()) == {NONE}
    assert set(table.size_bytes.tolist()) == {0}


def test_waits_name_positions_and_buffers_stay_numbers() -> None:
    columns = TaskColumns()
    columns.add({"kind": int(TaskKind.F)}, numbers(20, 10))
    columns.link("waits", numbers(0, 0), numbers(1, 1))
    columns.link("allocates", numbers(0), numbers(9))
    table = columns.table(columns.keys(), numbers(0, 0))
    assert [table.waits.row(i) for i in range(2)] == [(), (0,)]
    assert [table.allocates.row(i) for i in range(2)] == [(), (9,)]
    assert table.frees.row(1) == ()
