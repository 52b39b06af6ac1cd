"""Schedules in CSV files: torch's form and the table, read, written, and read by torch itself."""

from pathlib import Path
from unittest import mock

import pytest

from piper.errors import StrategyError
from piper.schedules import (
    SCHEDULES,
    copies_of,
    csv_table,
    csv_torch,
    default_virtual_stages,
    find_schedule,
    schedule_rows,
    show_rows,
    stages_of,
)
from piper.schedules.entries import entries_of, with_transfers
from piper.schedules.file_check import file_violations
from piper.schedules.preview import preview_schedule
from piper.schedules.schedule_file import load_schedule_file
from tests.piper.schedules.oracles import codes_of_torch, rows_or_none

GRID = [(p, times * p, v) for p in (2, 4, 8) for times in (1, 2, 3) for v in (1, 2, 4)]
OVERLAPPED = [
    ["0F0", "0F1", "3F0", "3B0", ["0F2", "3B1"], "0F3", "3F1"],
    ["1F0", "2F0"],
]


def torch_runtime(p: int, m: int, v: int):
    """Return torch's schedule runtime on stages that are mocks."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, p, p * v, None
    return _PipelineScheduleRuntime([stage] * v, m)


def saved(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_cells_of_every_kind_are_read_and_what_follows_from_the_strategy_is_left_out(tmp_path):
    text = (
        "0UNSHARD,0F0,0SEND_F0,, 0F1 ,3RECV_F0,3F0,3I0,3W0,(0F2;3B1)OVERLAP_F_B,3REDUCE_GRAD\n"
        "\n1RECV_F0,1F0,2F0,2B0,1BI0,1SEND_B0,1BW0,1RESHARD\n\n"
    )
    file = load_schedule_file(saved(tmp_path / "a.csv", text))
    assert show_rows(file.rows) == [
        ["0F0", "0F1", "3F0", "3BI0", "3BW0", ["0F2", "3B1"]],
        [],
        ["1F0", "2F0", "2B0", "1BI0", "1BW0"],
    ]
    assert file.stage_of_rank == ((0, 3), (), (1, 2))
    assert [entry.code for entry in file.entries[2]] == [
        "1RECV_F0", "1F0", "2F0", "2B0", "1BI0", "1SEND_B0", "1BW0",
    ]  # fmt: skip
    assert file.num_microbatches == 3


@pytest.mark.parametrize(
    ("cell", "rule"),
    [
        ("0F", "has no microbatch"),
        ("0SEND_F", "has no microbatch"),
        ("F0", "must be stage, task and microbatch"),
        ("0X0", "must be stage, task and microbatch"),
        ("0F0;1F0", "must be stage, task and microbatch"),
        ("0f0", "must be stage, task and microbatch"),
        ("-1F0", "must be stage, task and microbatch"),
        ("0F0x", "must be stage, task and microbatch"),
        ("0F99999999999", "must be stage, task and microbatch"),
        ("0ALL_REDUCE0", "must be stage, task and microbatch"),
        ("(0F1;0SEND_F0)OVERLAP_F_B", "may overlap passes only"),
        ("(0F1;)OVERLAP_F_B", "must be stage, task and microbatch"),
        ("(0F1;1B0)", "must be stage, task and microbatch"),
    ],
)
def test_a_cell_that_is_no_task_is_named_by_line_and_place(tmp_path, cell, rule):
    path = saved(tmp_path / "bad.csv", f"0F0,0B0\n1F0,,{cell},1B0\n")
    with pytest.raises(StrategyError) as caught:
        schedule_rows(path, num_pipeline_ranks=2, num_microbatches=1)
    error = caught.value
    assert (error.where, error.field, error.value, error.rule) == (f"{path}:2", "cell 3", cell, rule)
    assert "(0F7;7B3)OVERLAP_F_B" in error.fix


@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        ("rank,op,stag\n", "column", "is not known"),
        ("rank,op,op\n", "column", "is given twice"),
        ("rank,stage\n", "columns", "must have op"),
        ("rank,op,stage,microbatch\n0,F,0\n", "line", "has 3 values for 4 columns"),
        ("rank,op,stage,microbatch\n-1,F,0,0\n", "rank", "must be a whole number from 0 to"),
        ("rank,op,stage,microbatch\n0,G,0,0\n", "op", "is not known"),
        ("rank,op,stage,microbatch\n0,F,,0\n", "stage", "must be a whole number from 0 to"),
        ("rank,op,stage,microbatch\n0,F,0,1.5\n", "microbatch", "must be a whole number from 0 to"),
        ("rank,order,op,stage,microbatch\n0,,F,0,0\n", "order", "must be a whole number from 0 to"),
        ("rank,op,stage,microbatch,peer\n1,SEND_F,0,0,1\n", "peer", "is the rank itself"),
        ("rank,op,tensor,peer\n1,send,x,\n", "peer", "must be given for SEND"),
        ("rank,op,tensor,peer\n1,recv,,0\n", "tensor", "must be given for RECV"),
        (
            "rank,order,op,stage,microbatch\n0,0,F,0,0\n0,0,SEND_F,0,0\n",
            "order",
            "joins a pass and a transfer, which cannot start together",
        ),
    ],
)
def test_a_line_of_a_table_that_is_no_task_is_named_with_its_column(tmp_path, text, field, rule):
    path = saved(tmp_path / "bad.csv", text)
    with pytest.raises(StrategyError) as caught:
        load_schedule_file(path)
    assert caught.value.where == f"{path}:{len(text.splitlines())}"
    assert caught.value.field == field
    assert caught.value.rule.startswith(rule)
    assert caught.value.fix


def test_a_table_gives_the_order_by_number_and_what_shares_one_starts_together(tmp_path):
    text = (
        "rank,order,op,stage,microbatch,peer\n"
        "0,9,B,0,0,\n0,0,f,0,0,\n0,4,RECV_B,0,0,1\n0,2,F,0,1,\n0,1,SEND_F,0,0,1\n0,9,F,0,2,\n1,5,F,1,0,\n"
    )
    file = load_schedule_file(saved(tmp_path / "a.csv", text))
    assert show_rows(file.rows) == [["0F0", "0F1", ["0B0", "0F2"]], ["1F0"]]
    assert [entry.code for entry in file.entries[0]] == [
        "0F0", "0SEND_F0", "0F1", "0RECV_B0", "0B0 + 0F2",
    ]  # fmt: skip
    assert file.entries[0][1].transfers[0].peer == 1


@pytest.mark.parametrize("form", ["passes", "transfers", "table"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_is_read_back_and_legal(tmp_path, name, form):
    found = 0
    for p, m, v in GRID:
        rows = rows_or_none(name, p, m, v)
        if rows is None or p * m * v > 128:
            continue
        found += 1
        stages = stages_of(name, num_pipeline_ranks=p, virtual_stages_per_rank=v)
        copies = copies_of(find_schedule(name))
        entries = entries_of(rows) if form == "passes" else with_transfers(rows, stages=stages, copies=copies)
        text = csv_table.write(entries) if form == "table" else csv_torch.write(entries)
        path = saved(tmp_path / f"{p}_{m}_{v}.csv", text)
        file = load_schedule_file(path)
        assert file.rows == rows
        assert (file.stage_of_rank, file.copies) == (stages, copies)
        assert [[entry.code for entry in row] for row in file.entries] == [
            [entry.code for entry in row] for row in entries
        ]
        assert file_violations(file) == ()
    assert found > 3


def test_overlapping_passes_are_written_as_torch_writes_them():
    from piper.schedules.rows import parse_rows

    entries = entries_of(parse_rows(OVERLAPPED, where="test"))
    assert csv_torch.write(entries).splitlines()[0] == "0F0,0F1,3F0,3B0,(0F2;3B1)OVERLAP_F_B,0F3,3F1"
    assert csv_torch.read(csv_torch.write(entries), where="x")[0][4].code == "0F2 + 3B1"


IN_TORCH = {
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


@pytest.mark.parametrize("name", IN_TORCH)
def test_torch_reads_what_is_written_and_finds_that_its_transfers_progress(tmp_path, name):
    from torch.distributed.pipelining.schedules import _simulate_comms_compute

    found = 0
    for p, m, v in [(2, 2, 2), (2, 6, 4), (2, 6, 2), (4, 8, 2), (4, 4, 2), (4, 11, 2)]:
        rows = rows_or_none(name, p, m, v)
        if rows is None:
            continue
        found += 1
        stages = stages_of(name, num_pipeline_ranks=p, virtual_stages_per_rank=v)
        runtime = torch_runtime(p, m, v)
        runtime._load_csv(saved(tmp_path / "passes.csv", csv_torch.write(entries_of(rows))))
        assert [codes_of_torch(runtime.pipeline_order[rank]) for rank in range(p)] == show_rows(rows)
        text = csv_torch.write(with_transfers(rows, stages=stages))
        runtime._load_csv(saved(tmp_path / "transfers.csv", text), format="compute_comms")
        loaded = runtime.pipeline_order_with_comms
        assert [codes_of_torch(loaded[rank]) for rank in range(p)] == show_rows(rows)
        owner = {stage: rank for rank, held in enumerate(stages) for stage in held}
        single = {rank: [part for action in row for part in action.sub_actions or (action,)]
                  for rank, row in loaded.items()}  # fmt: skip
        ran = _simulate_comms_compute(single, owner.__getitem__, p * v)
        assert sum(action is not None for row in ran.values() for action in row) == sum(
            map(len, single.values())
        )
    assert found >= 3


@pytest.mark.parametrize("name", IN_TORCH)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_what_torch_writes_is_read_as_the_same_schedule_and_is_legal(tmp_path, name, form):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    counts = [(2, 4, 2), (4, 8, 2), (4, 3, 2), (4, 12, 2)]
    legal = [(p, m, v) for p, m, v in counts if rows_or_none(name, p, m, v) is not None]
    assert len(legal) >= 3
    for p, m, v in legal:
        runtime = torch_runtime(p, m, v)
        runtime.pipeline_order = dict(enumerate(get_schedule_ops(IN_TORCH[name], p, m, v)))
        runtime._prepare_schedule_with_comms(runtime.pipeline_order)
        path = str(tmp_path / f"{p}_{m}.csv")
        runtime._dump_csv(path, format=form)
        file = load_schedule_file(path)
        assert file.rows == rows_or_none(name, p, m, v)
        assert file.lists_transfers is (form == "compute_comms")
        assert file_violations(file) == ()


def test_transfers_of_the_v_that_torch_writes_are_legal_too(tmp_path):
    """In a V two stages that follow each other share a rank: nothing is sent between them."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for name, p, m in [("ZBVZeroBubble", 4, 8), ("DualPipeV", 2, 4), ("DualPipeV", 4, 8)]:
        runtime = torch_runtime(p, m, 2)
        runtime.pipeline_order = dict(enumerate(get_schedule_ops(name, p, m, 2)))
        runtime._prepare_schedule_with_comms(runtime.pipeline_order)
        path = str(tmp_path / f"{name}_{p}.csv")
        runtime._dump_csv(path)
        file = load_schedule_file(path)
        assert file.stage_of_rank == tuple((rank, 2 * p - 1 - rank) for rank in range(p))
        assert file_violations(file) == ()
        again = csv_torch.read(
            csv_torch.write(with_transfers(file.rows, stages=file.stage_of_rank)), where=""
        )
        assert file.rows == tuple(tuple(e.passes for e in row if e.passes) for row in again)


V_FILE = "0F0,0F1,3F0,3B0,3F1,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n"


def test_a_file_is_a_schedule_wherever_a_name_is_one_and_says_where_stages_lie(tmp_path):
    path = saved(tmp_path / "v.csv", V_FILE)
    assert default_virtual_stages(path) == 2
    assert stages_of(path, num_pipeline_ranks=2, virtual_stages_per_rank=2) == ((0, 3), (1, 2))
    counts = {"num_pipeline_ranks": 2, "num_microbatches": 2, "virtual_stages_per_rank": 2}
    assert show_rows(schedule_rows(path, **counts)) == [line.split(",") for line in V_FILE.splitlines()]
    assert preview_schedule(path, **counts).in_flight == (1.5, 2)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_pipeline_ranks", 4, "the file lists 2 pipeline ranks, not 4; ask for 2"),
        ("num_microbatches", 8, "the file lists 2 microbatches, not 8; ask for 2"),
        ("virtual_stages_per_rank", 1, "the file lists 2 stages on a rank, not 1; ask for 2"),
        ("memory_cap", 1, "keeps 2 microbatches in flight, the memory cap is 1"),
    ],
)
def test_counts_other_than_those_of_the_file_are_refused(tmp_path, field, value, rule):
    path = saved(tmp_path / "v.csv", V_FILE)
    counts = {"num_pipeline_ranks": 2, "num_microbatches": 2, "virtual_stages_per_rank": 2}
    with pytest.raises(StrategyError) as caught:
        schedule_rows(path, **(counts | {field: value}))
    assert rule in caught.value.rule


def test_a_file_that_is_no_schedule_is_refused(tmp_path):
    with pytest.raises(StrategyError, match="names a file that does not exist") as caught:
        find_schedule(str(tmp_path / "none.csv"), where="--strategy")
    assert caught.value.where == "--strategy"
    with pytest.raises(StrategyError, match="lists nothing"):
        find_schedule(saved(tmp_path / "empty.csv", "\n\n"))
    with pytest.raises(StrategyError, match="the most of a step"):
        find_schedule(saved(tmp_path / "large.csv", "0F0,99999F99999\n"))
    with pytest.raises(StrategyError, match="is no CSV"):
        find_schedule(saved(tmp_path / "long.csv", "0" * 200_000))
