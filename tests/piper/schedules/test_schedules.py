"""Contract of every schedule in the table, over a grid of pipeline ranks and microbatches."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper.errors import StrategyError
from piper.schedules import (
    SCHEDULES,
    copies_of,
    default_virtual_stages,
    find_schedule,
    parse_costs,
    register,
    schedule_rows,
    show_rows,
    stages_of,
    unchecked_rows,
)
from piper.schedules.copies import Copies
from piper.schedules.rows import row_violations
from simulator.plan.task import TaskKind
from tests.piper.schedules.oracles import parse, rows_or_none, torch_rows

GRID = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in (1, 2, 3, 4, 7, 8, 12, 16, 20, 32)]
FEWEST_LEGAL = 17
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
    "synthesized",
    "synthesized_v",
]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_microbatch_runs_forward_and_backward_once_on_each_stage_and_the_rows_can_run(name):
    found = 0
    for v in (1, 2, 4):
        for p, m in GRID:
            rows = rows_or_none(name, p, m, v)
            if rows is None:
                continue
            found += 1
            stages = stages_of(name, num_pipeline_ranks=p, virtual_stages_per_rank=v)
            copies = copies_of(find_schedule(name))
            assert row_violations(rows, stages=stages, num_microbatches=m, copies=copies) == ()
            order = Copies(num_stages=p * v, count=copies)
            assert passes_of(rows) == [(s, mb) for s in range(p * v) for mb in order.microbatches(s, m)]
    assert found >= FEWEST_LEGAL, found


def passes_of(rows) -> list[tuple[int, int]]:
    """Return stage and microbatch of every F, each of which has either one B or one BI and one BW."""
    listed = {
        kind: sorted(
            (task.stage, task.microbatch)
            for row in rows
            for slot in row
            for task in slot
            if task.kind is kind
        )
        for kind in (TaskKind.F, TaskKind.B, TaskKind.BI, TaskKind.BW)
    }
    assert listed[TaskKind.BI] == listed[TaskKind.BW]
    assert sorted(listed[TaskKind.B] + listed[TaskKind.BI]) == listed[TaskKind.F]
    return listed[TaskKind.F]


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_have_the_form_that_users_write(name):
    for v in (1, 2):
        counts = {"num_pipeline_ranks": 4, "num_microbatches": 8, "virtual_stages_per_rank": v}
        rows = rows_or_none(name, 4, 8, v)
        if rows is not None:
            raw = find_schedule(name)(**counts, costs=parse_costs(), memory_cap=None)
            assert show_rows(rows) == raw


TORCH_GRID = [(p, times * p) for p in (2, 4, 8) for times in (1, 2, 3, 4)] + [(1, 3), (2, 5), (4, 9), (8, 11)]


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


@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize(
    ("name", "in_torch"),
    [
        ("interleaved_1f1b", "Interleaved1F1B"),
        ("looped_bfs", "LoopedBFS"),
        ("interleaved_zb", "InterleavedZeroBubble"),
    ],
)
def test_rows_of_several_stages_on_a_rank_equal_those_of_torch(name, in_torch, v):
    compared = 0
    for p, m in [*TORCH_GRID, (4, 3), (4, 10), (8, 1), (3, 14)]:
        rows = rows_or_none(name, p, m, v)
        if rows is None:
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                torch_rows(in_torch, p, m, v)
        else:
            compared += 1
            assert show_rows(rows) == torch_rows(in_torch, p, m, v), (p, m)
    assert compared >= 15


@pytest.mark.parametrize(("name", "in_torch"), [("zbv", "ZBVZeroBubble"), ("dualpipe_v", "DualPipeV")])
def test_rows_in_a_v_equal_those_of_torch_and_refuse_the_counts_that_it_refuses(name, in_torch):
    """Pairs that overlap included; torch takes any count for ZBV, from as many as stages for DualPipeV."""
    compared = 0
    for p, m in [*TORCH_GRID, (1, 1), (1, 2), (3, 6), (3, 7), (4, 1), (4, 7), (8, 15), (5, 12)]:
        rows = rows_or_none(name, p, m, 2)
        if rows is None:
            with pytest.raises(ValueError, match="at least as many microbatches as stages"):
                torch_rows(in_torch, p, m, 2)
        else:
            compared += 1
            assert show_rows(rows) == torch_rows(in_torch, p, m, 2), (p, m)
    assert compared >= 15


def moved(slot, stages: dict[int, int], microbatches: dict[int, int]):
    """Return a slot with other stage numbers, and microbatches from another start on each."""
    if isinstance(slot, list):
        return [moved(code, stages, microbatches) for code in slot]
    stage, kind, microbatch = parse(slot)
    return f"{stages[stage]}{kind}{microbatch + microbatches[stage]}"


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 14), (6, 12), (8, 16), (8, 20), (16, 64)])
def test_each_half_of_dualpipe_is_the_dualpipe_v_of_torch_on_half_the_ranks(p, m):
    """A V folds the ranks of the second half onto those of the first; unfolded, both halves do the same."""
    rows = show_rows(
        schedule_rows("dualpipe", num_pipeline_ranks=p, num_microbatches=m, virtual_stages_per_rank=2)
    )
    for r, row in enumerate(torch_rows("DualPipeV", p // 2, m // 2, 2)):
        here = {r: r, p - 1 - r: 2 * p - 1 - r}
        there = {r: p + r, p - 1 - r: p - 1 - r}
        assert rows[r] == [moved(slot, here, {r: 0, p - 1 - r: m // 2}) for slot in row]
        assert rows[p - 1 - r] == [moved(slot, there, {r: m // 2, p - 1 - r: 0}) for slot in row]


def phases(half: int, ranks: int, n: int) -> list[tuple[str, int]]:
    """Return the published phases of a rank: what repeats (0 near, 1 far, {} overlapped), and how often.

    DeepSeek-AI, `dualpipe.py`: nF0, nF0F1, nB1W1F1, nF0B1F1B0, nB1F1B0, nB1B0, nWB0, nW; `half` counts from
    the outer end, n is the microbatches of one direction.
    """
    inner = ranks // 2 - half - 1
    main = n - ranks + half + 1
    turn = (
        [("F0 B1 {F1 B0}", 1), ("{F0 B1} {F1 B0}", main - 1)] if inner == 0 else [("{F0 B1} {F1 B0}", main)]
    )
    return [
        ("F0", 2 * inner),
        ("F0 F1", half + 1),
        ("BI1 BW F1", inner),
        *turn,
        ("B1 {F1 B0}", inner),
        *[("B1", 1) if number % 2 == 0 else ("B0", 1) for number in range(half + 1)],
        *[("BI1", 1) if number % 2 == 0 else ("BI0", 1) for number in range(half + 1, 2 * half + 2)],
        ("BW BI0", inner),
        ("BW", half + 1),
    ]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (6, 18), (8, 20)])
def test_dualpipe_rows_are_the_published_phases(p, m):
    rows = schedule_rows("dualpipe", num_pipeline_ranks=p, num_microbatches=m, virtual_stages_per_rank=2)
    for rank, row in enumerate(rows):
        far = 2 * p - 1 - rank if rank < p // 2 else rank
        told = []
        for slot in row:
            names = [
                task.kind.name + ("" if task.kind is TaskKind.BW else str(int(task.stage == far)))
                for task in slot
            ]
            told += [names[0]] if len(names) == 1 else ["{" + names[0], names[1] + "}"]
        want = [
            part
            for what, times in phases(min(rank, p - 1 - rank), p, m // 2)
            for part in what.split() * times
        ]
        assert told == want, rank
        for kinds in ({TaskKind.F}, {TaskKind.B, TaskKind.BI}):
            for stage in {task.stage for slot in row for task in slot}:
                order = [t.microbatch for slot in row for t in slot if t.stage == stage and t.kind in kinds]
                assert order == list(range(m // 2)) or order == list(range(m // 2, m))
        queue = [(t.stage, t.microbatch) for slot in row for t in slot if t.kind is TaskKind.BI]
        assert queue == [(t.stage, t.microbatch) for slot in row for t in slot if t.kind is TaskKind.BW]


@pytest.mark.parametrize(
    ("p", "m", "near"),
    [
        (4, 9, "use 8 or 10 microbatches"),
        (4, 6, "use 8 or more, an even number"),
        (3, 8, "use 2 or 4 ranks"),
        (1, 8, "use 2 ranks"),
    ],
)
def test_dualpipe_refuses_odd_counts_and_too_few_microbatches_with_the_nearest_legal_ones(p, m, near):
    with pytest.raises(StrategyError) as caught:
        schedule_rows("dualpipe", num_pipeline_ranks=p, num_microbatches=m, virtual_stages_per_rank=2)
    assert near in caught.value.rule


def published_1f1b_row(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Return the row of the published system's 1F1B builder: some forwards, then F and B in turn."""
    warm_up = min(ranks - 1 - rank, microbatches)
    row = [f"{rank}F{m}" for m in range(warm_up)]
    for m in range(microbatches):
        row += [f"{rank}F{warm_up + m}"] if warm_up + m < microbatches else []
        row.append(f"{rank}B{m}")
    return row


def published_interleaved_row(rank: int, ranks: int, microbatches: int, *, v: int) -> list[str]:
    """Return the row of its interleaved builder: each stage counts its own microbatches."""
    total = microbatches * v
    warm_up = min((v - 1) * ranks + 2 * (ranks - 1 - rank), total)
    stage_of_step = [(step // ranks) % v for step in range(total)]
    seen = {kind: [0] * v for kind in "FB"}

    def run(kind: str, local: int) -> str:
        seen[kind][local] += 1
        return f"{local * ranks + rank}{kind}{seen[kind][local] - 1}"

    row = [run("F", stage_of_step[step]) for step in range(warm_up)]
    for step in range(warm_up, total):
        row.append(run("F", stage_of_step[step]))
        row.append(run("B", v - 1 - stage_of_step[step - warm_up]))
    return row + [run("B", v - 1 - stage_of_step[step]) for step in range(total - warm_up, total)]


def published_zero_bubble_row(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Return the row of its zero-bubble builder: 1F1B of BI, each BW once more than `rank` BIs are done."""
    row: list[str] = []
    inputs = weights = 0
    for code in published_1f1b_row(rank, ranks, microbatches):
        row.append(code.replace("B", "BI"))
        inputs += "B" in code
        if "B" in code and inputs > rank:
            row.append(f"{rank}BW{weights}")
            weights += 1
    return row + [f"{rank}BW{m}" for m in range(weights, microbatches)]


def test_rows_equal_those_of_the_published_systems_builders():
    """The interleaved builder knows whole rounds only: microbatches are a multiple of the ranks."""
    for p, m in TORCH_GRID:
        counts = {"num_pipeline_ranks": p, "num_microbatches": m}
        ranks = range(p)
        assert show_rows(schedule_rows("1f1b", **counts)) == [published_1f1b_row(r, p, m) for r in ranks]
        assert show_rows(schedule_rows("zb_h1", **counts)) == [
            published_zero_bubble_row(r, p, m) for r in ranks
        ]
        for v in (1, 2, 4) if m % p == 0 else ():
            rows = schedule_rows("interleaved_1f1b", **counts, virtual_stages_per_rank=v)
            assert show_rows(rows) == [published_interleaved_row(r, p, m, v=v) for r in ranks]


def test_interleaved_zero_bubble_with_one_stage_on_each_rank_is_zb_h1():
    for p, m in TORCH_GRID:
        rows = rows_or_none("interleaved_zb", p, m)
        assert rows is None or rows == rows_or_none("zb_h1", p, m)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zb"])
@pytest.mark.parametrize("v", [1, 2])
def test_interleaved_schedules_take_the_counts_that_divide_into_rounds(name, v):
    """Cases of torch's flexible rounds: 4 ranks take 10, 3 and 7 microbatches, not 9."""
    for m in (10, 3, 7):
        assert rows_or_none(name, 4, m, v) is not None
    for m, near in [(9, "use 8 or 10"), (13, "use 12 or 15"), (11, "use 10 or 12")]:
        with pytest.raises(StrategyError) as caught:
            schedule_rows(name, num_pipeline_ranks=4, num_microbatches=m, virtual_stages_per_rank=v)
        assert near in caught.value.rule
        assert f"{m // 4} rounds" in caught.value.rule


def test_interleaved_schedules_refuse_the_counts_that_torch_refuses_and_no_others():
    for p in (1, 2, 3, 4, 8):
        for m in range(1, 5 * p + 1):
            legal = m % max(1, m // p) == 0
            assert (rows_or_none("interleaved_1f1b", p, m, 2) is not None) is legal, (p, m)


def test_1f1b_with_fewer_microbatches_than_ranks_warms_up_with_all_of_them():
    rows = show_rows(schedule_rows("1f1b", num_pipeline_ranks=4, num_microbatches=2))
    assert rows[0] == ["0F0", "0F1", "0B0", "0B1"]
    assert rows[3] == ["3F0", "3B0", "3F1", "3B1"]


def test_the_table_has_the_names_of_the_contract():
    assert sorted(SCHEDULES) == sorted(CONTRACT_NAMES)


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


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("gpipe", "looped_bfs"),
        ("1f1b", "interleaved_1f1b"),
        ("zb_h1", "interleaved_zb"),
        ("zb_h2", "interleaved_zb"),
        ("zb_1p", "interleaved_zb"),
        ("zb_2p", "interleaved_zb"),
    ],
)
def test_virtual_stages_are_refused_with_the_schedule_for_them(name, instead):
    with pytest.raises(ValueError, match="one stage on each pipeline rank, not 2"):
        find_schedule(name)(
            num_pipeline_ranks=2, num_microbatches=2, virtual_stages_per_rank=2, costs={}, memory_cap=None
        )
    with pytest.raises(StrategyError) as caught:
        schedule_rows(name, num_pipeline_ranks=2, num_microbatches=2, virtual_stages_per_rank=2)
    assert caught.value.field == "schedule"
    assert instead in caught.value.rule


@pytest.mark.parametrize("name", ["zbv", "v_half", "v_min", "dualpipe", "dualpipe_v"])
@pytest.mark.parametrize("v", [1, 3])
def test_a_v_takes_two_stages_on_each_rank(name, v):
    with pytest.raises(StrategyError) as caught:
        schedule_rows(name, num_pipeline_ranks=2, num_microbatches=8, virtual_stages_per_rank=v)
    assert f"two stages on each pipeline rank, not {v}; use 2" in caught.value.rule
    assert default_virtual_stages(name) == 2
    assert stages_of(name, num_pipeline_ranks=2, virtual_stages_per_rank=2) == ((0, 3), (1, 2))


@pytest.mark.parametrize("name", ["zbv", "v_half", "v_min"])
def test_zero_bubble_rows_in_a_v_take_any_number_of_microbatches(name):
    for p in range(1, 13):
        for m in range(1, 14):
            assert rows_or_none(name, p, m, 2) is not None, (p, m)


def test_dualpipe_v_refuses_fewer_microbatches_than_stages_and_names_the_fewest():
    assert rows_or_none("dualpipe_v", 4, 8, 2) is not None
    with pytest.raises(StrategyError, match="use 8 or more microbatches"):
        schedule_rows("dualpipe_v", num_pipeline_ranks=4, num_microbatches=7, virtual_stages_per_rank=2)


CAPS = [("zbv", 4, 2), ("v_half", 3, 2), ("v_min", 2, 2), ("dualpipe", 5, 2), ("dualpipe_v", "9/2", 2),
        ("gpipe", 8, 1), ("1f1b", 4, 1), ("zb_h1", 4, 1), ("zb_h2", 7, 1), ("looped_bfs", 8, 2),
        ("interleaved_1f1b", "11/2", 2), ("interleaved_zb", 4, 2), ("interleaved_zb", 4, 1)]  # fmt: skip


@pytest.mark.parametrize(("name", "needs", "v"), CAPS)
def test_a_memory_cap_that_the_schedule_cannot_keep_is_refused(name, needs, v):
    counts = {"num_pipeline_ranks": 4, "num_microbatches": 8, "virtual_stages_per_rank": v}
    assert schedule_rows(name, **counts, memory_cap=Fraction(needs))
    with pytest.raises(StrategyError, match=f"keeps {needs} microbatches in flight"):
        schedule_rows(name, **counts, memory_cap=Fraction(needs) - Fraction(1, 3))


@given(
    p=st.integers(1, 12), m=st.integers(1, 30), v=st.integers(1, 3), name=st.sampled_from(sorted(SCHEDULES))
)
@settings(max_examples=40, deadline=None)
def test_any_count_gives_rows_that_can_run_or_is_refused(*, p, m, v, name):
    rows = rows_or_none(name, p, m, v)
    if rows is not None:
        stages = stages_of(name, num_pipeline_ranks=p, virtual_stages_per_rank=v)
        copies = copies_of(find_schedule(name))
        assert row_violations(rows, stages=stages, num_microbatches=m, copies=copies) == ()


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

def narrow(num_pipeline_ranks, num_microbatches): return []

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
        ("mine", "mine.py:4)"),
        ("lossy", "stage 0 microbatch 0: there are 0 B, 0 BI, 0 BW"),
        ("broken", "fails: KeyError: 'colour'"),
        ("broken", "mine.py:15)"),
        ("narrow", "fails: TypeError: narrow() got an unexpected keyword argument"),
        ("narrow", "mine.py:17)"),
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


def test_a_users_rows_that_hold_more_than_the_memory_cap_are_refused(user_file):
    name, counts = f"{user_file}:mine", {"num_pipeline_ranks": 2, "num_microbatches": 4}
    assert schedule_rows(name, **counts, memory_cap=Fraction(4))
    with pytest.raises(StrategyError, match="it keeps 4 microbatches in flight, the memory cap is 3"):
        schedule_rows(name, **counts, memory_cap=Fraction(3))


def test_a_file_with_a_slip_is_named_with_the_line(tmp_path):
    for text, line in [("x = 1\ndef f(:\n", 2), ("\n\nint('x')\n", 3)]:
        (tmp_path / "slip.py").write_text(text)
        with pytest.raises(StrategyError, match=rf"slip.py:{line}\)"):
            find_schedule(f"{tmp_path / 'slip.py'}:f")


def test_the_examples_pass_the_contract_of_the_table():
    file = Path(__file__).resolve().parents[3] / "examples" / "schedules.py"
    for name in ("in_pairs", "three_p"):
        for p, m in [(1, 2), (2, 2), (3, 4), (4, 8), (8, 6)]:
            rows = schedule_rows(f"{file}:{name}", num_pipeline_ranks=p, num_microbatches=m)
            assert passes_of(rows) == [(rank, mb) for rank in range(p) for mb in range(m)]
    with pytest.raises(StrategyError, match="even number of microbatches"):
        schedule_rows(f"{file}:in_pairs", num_pipeline_ranks=2, num_microbatches=3)


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
