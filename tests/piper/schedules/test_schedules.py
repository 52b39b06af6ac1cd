"""Contract of every schedule in the table, over a grid of pipeline ranks and microbatches."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.errors import StrategyError
from piper.schedules import (
    PLANNED,
    SCHEDULES,
    find_schedule,
    parse_costs,
    register,
    schedule_rows,
    show_rows,
    stages_of,
    unchecked_rows,
)
from piper.schedules.rows import row_violations
from tests.piper.schedules.oracles import parse, torch_rows

GRID = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 8, 16)]
CONTRACT_NAMES = [
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zb",
    "zb_h1",
    "zb_h2",
    "zb_1p",
    "zb_2p",
    "zbv",
    "v_half",
    "v_min",
    "dualpipe",
    "dualpipe_v",
]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_microbatch_runs_forward_and_backward_once_on_each_stage_and_the_rows_can_run(name):
    for p, m in GRID:
        rows = schedule_rows(name, num_pipeline_ranks=p, num_microbatches=m)
        stages = stages_of(name, num_pipeline_ranks=p)
        assert row_violations(rows, stages=stages, num_microbatches=m) == ()
        listed = sorted(task.code for row in rows for slot in row for task in slot)
        wanted = sorted(f"{stage}{kind}{mb}" for stage in range(p) for kind in "FB" for mb in range(m))
        assert listed == wanted


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_have_the_form_that_users_write(name):
    raw = find_schedule(name)(
        num_pipeline_ranks=3,
        num_microbatches=5,
        virtual_stages_per_rank=1,
        costs=parse_costs(),
        memory_cap=None,
    )
    rows = schedule_rows(name, num_pipeline_ranks=3, num_microbatches=5)
    assert show_rows(rows) == raw
    assert all(parse(code)[0] == rank for rank, row in enumerate(raw) for code in row)


TORCH_GRID = [(1, 3), (2, 2), (2, 5), (4, 4), (4, 9), (8, 8), (8, 24)]


def test_gpipe_rows_equal_those_of_torch():
    for p, m in TORCH_GRID:
        rows = show_rows(schedule_rows("gpipe", num_pipeline_ranks=p, num_microbatches=m))
        assert rows == torch_rows("GPipe", p, m)


def test_1f1b_rows_equal_those_of_torch():
    """In torch 2.13 the printed order of the last rank counts forwards from 1: shifted back here."""
    for p, m in TORCH_GRID:
        *rows, last = show_rows(schedule_rows("1f1b", num_pipeline_ranks=p, num_microbatches=m))
        *torch_others, torch_last = torch_rows("1F1B", p, m)
        assert rows == torch_others
        moved = [(stage, kind, mb - (kind == "F")) for stage, kind, mb in map(parse, torch_last)]
        assert list(map(parse, last)) == moved


def test_1f1b_with_fewer_microbatches_than_ranks_warms_up_with_all_of_them():
    rows = show_rows(schedule_rows("1f1b", num_pipeline_ranks=4, num_microbatches=2))
    assert rows[0] == ["0F0", "0F1", "0B0", "0B1"]
    assert rows[3] == ["3F0", "3B0", "3F1", "3B1"]


def test_the_table_and_the_planned_names_are_those_of_the_contract():
    assert sorted([*SCHEDULES, *PLANNED]) == sorted(CONTRACT_NAMES)


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_schedule_is_refused_honestly(name):
    with pytest.raises(StrategyError) as caught:
        find_schedule(name)
    error = caught.value
    assert (error.field, error.value) == ("schedule", name)
    assert error.rule == "is not available in this version"
    assert "gpipe, 1f1b" in error.fix
    assert error.exit_code == 2


def test_a_csv_schedule_is_refused_honestly():
    with pytest.raises(StrategyError, match="is not available in this version") as caught:
        find_schedule("orders.csv")
    assert "my.py:function" in caught.value.fix


@pytest.mark.parametrize(("name", "near"), [("1f1bb", "'1f1b'"), ("gpype", "'gpipe'"), ("zbh1", "'zb_h1'")])
def test_an_unknown_schedule_gets_a_did_you_mean_over_all_names(name, near):
    with pytest.raises(StrategyError) as caught:
        find_schedule(name, where="--strategy")
    assert caught.value.rule == "is not known"
    assert caught.value.where == "--strategy"
    assert near in caught.value.fix


def test_names_ignore_case():
    assert find_schedule("1F1B") is SCHEDULES["1f1b"].rows


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "4", None, float("nan")])
@pytest.mark.parametrize("field", ["num_pipeline_ranks", "num_microbatches", "virtual_stages_per_rank"])
def test_counts_must_be_whole_and_positive(field, value):
    counts = {"num_pipeline_ranks": 2, "num_microbatches": 2, "virtual_stages_per_rank": 1} | {field: value}
    with pytest.raises(StrategyError) as caught:
        schedule_rows("1f1b", **counts)
    assert caught.value.field == field
    assert caught.value.rule == "must be a whole number >= 1"


@pytest.mark.parametrize(("name", "instead"), [("gpipe", "looped_bfs"), ("1f1b", "interleaved_1f1b")])
def test_virtual_stages_are_refused_with_the_schedule_for_them(name, instead):
    with pytest.raises(ValueError, match="one stage on each pipeline rank, not 2"):
        find_schedule(name)(
            num_pipeline_ranks=2, num_microbatches=2, virtual_stages_per_rank=2, costs={}, memory_cap=None
        )
    with pytest.raises(StrategyError) as caught:
        schedule_rows(name, num_pipeline_ranks=2, num_microbatches=2, virtual_stages_per_rank=2)
    assert caught.value.field == "schedule"
    assert instead in caught.value.rule


@pytest.mark.parametrize(("name", "needs"), [("gpipe", 6), ("1f1b", 4)])
def test_a_memory_cap_that_the_schedule_cannot_keep_is_refused(name, needs):
    counts = {"num_pipeline_ranks": 4, "num_microbatches": 6}
    assert schedule_rows(name, **counts, memory_cap=Fraction(needs))
    with pytest.raises(StrategyError, match=f"keeps {needs} microbatches in flight"):
        schedule_rows(name, **counts, memory_cap=Fraction(needs) - Fraction(1, 2))


@given(p=st.integers(1, 12), m=st.integers(1, 30), name=st.sampled_from(sorted(SCHEDULES)))
@settings(max_examples=40)
def test_any_count_gives_rows_that_can_run(p, m, name):
    rows = schedule_rows(name, num_pipeline_ranks=p, num_microbatches=m)
    assert row_violations(rows, stages=tuple((r,) for r in range(p)), num_microbatches=m) == ()


USER_FILE = """
def mine(*, num_pipeline_ranks, num_microbatches, virtual_stages_per_rank, costs, memory_cap):
    if num_microbatches % 2:
        raise ValueError("needs an even number of microbatches")
    forward = range(num_microbatches)
    return [
        [f"{r}F{m}" for m in forward] + [f"{r}B{m}" for m in reversed(forward)]
        for r in range(num_pipeline_ranks)
    ]

def lossy(*, num_pipeline_ranks, **others):
    return [[f"{r}F0"] for r in range(num_pipeline_ranks)]

def broken(**counts):
    return counts["colour"]

SIZE = 3
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


def test_a_users_function_is_loaded_from_its_file_and_checked(user_file):
    rows = schedule_rows(f"{user_file}:mine", num_pipeline_ranks=2, num_microbatches=2)
    assert show_rows(rows) == [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]]


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        ("mine", "cannot be used: needs an even number of microbatches"),
        ("lossy", "stage 0 microbatch 0: there are 0 B, 0 BI, 0 BW"),
        ("broken", "fails: KeyError: 'colour'"),
        ("SIZE", "names no function of that file"),
        ("absent", "names no function of that file"),
    ],
)
def test_a_users_function_that_is_wrong_is_an_input_error(user_file, function, rule):
    with pytest.raises(StrategyError) as caught:
        schedule_rows(f"{user_file}:{function}", num_pipeline_ranks=2, num_microbatches=3)
    assert rule in caught.value.rule
    assert caught.value.fix


def test_rows_can_be_had_unchecked_to_list_what_is_wrong_with_them(user_file):
    rows = unchecked_rows(f"{user_file}:lossy", num_pipeline_ranks=2, num_microbatches=1)
    assert show_rows(rows) == [["0F0"], ["1F0"]]
    with pytest.raises(StrategyError, match="keeps 3 microbatches in flight"):
        unchecked_rows("gpipe", num_pipeline_ranks=2, num_microbatches=3, memory_cap=Fraction(2))


def test_a_users_file_that_is_missing_or_fails_is_an_input_error(tmp_path):
    with pytest.raises(StrategyError, match="does not exist"):
        find_schedule(f"{tmp_path / 'none.py'}:mine")
    (tmp_path / "bad.py").write_text("import nothing_of_that_name")
    with pytest.raises(StrategyError, match="fails: ModuleNotFoundError") as caught:
        find_schedule(f"{tmp_path / 'bad.py'}:mine")
    assert "bad.py" in caught.value.fix


def test_a_registered_schedule_is_found_by_its_name_and_takes_no_other_one():
    def backwards(*, num_pipeline_ranks, num_microbatches, **_others):
        return SCHEDULES["gpipe"].rows(
            num_pipeline_ranks=num_pipeline_ranks, num_microbatches=num_microbatches,
            virtual_stages_per_rank=1, costs={}, memory_cap=None,
        )  # fmt: skip

    register("only_in_this_test", backwards)
    register("only_in_this_test", backwards)
    assert find_schedule("only_in_this_test") is backwards
    for name, function, rule in [
        ("1f1b", backwards, "is taken"),
        ("zbv", backwards, "is taken"),
        ("only_in_this_test", len, "is taken"),
        ("another", 3, "must be a new name and a function"),
    ]:
        with pytest.raises(StrategyError, match=rule) as caught:
            register(name, function)
        assert "a name of your own" in caught.value.fix


def test_more_passes_than_a_plan_can_list_are_refused():
    with pytest.raises(StrategyError) as caught:
        schedule_rows("1f1b", num_pipeline_ranks=4, num_microbatches=10**12)
    assert caught.value.field == "num_microbatches"
    assert str(2**20) in caught.value.rule
    assert caught.value.fix == "use fewer microbatches or stages"
