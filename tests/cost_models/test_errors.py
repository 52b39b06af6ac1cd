"""What an error shows of the value that it refuses, and which numbers are refused everywhere."""

import math
import pickle

import pytest

from cost_models.errors import (
    LARGEST_COUNT,
    InputError,
    InternalError,
    as_float,
    require_positive,
    require_positive_int,
    whole_number,
)
from piper.capture.run import UnannotatedError
from piper.cli.failures import ResultDoesNotFitError, RunDiffersError


def shown(value):
    return InputError(where="here", field="it", value=value, rule="is bad", fix="mend it").message()


@pytest.mark.parametrize("text", ["\x1b[31mred", "two\nlines", "\ud800"])
def test_text_that_would_act_on_a_terminal_is_escaped(text):
    message = shown(text)
    assert message.isprintable()
    assert message.startswith("here: it = '")
    assert shown("größer") == "here: it = größer is bad"


def test_a_value_that_stands_for_more_text_than_memory_is_cut():
    bomb = ["x"]
    for _ in range(40):
        bomb = [bomb] * 9
    assert len(shown(bomb)) < 100_000
    assert len(shown("x" * 10**6)) < 1000
    error = InputError(where="here", field="it", value=bomb, rule="is bad", fix="mend it")
    assert len(str(error)) < 100_000


@pytest.mark.parametrize("value", [LARGEST_COUNT + 1, 10**30, 10**400])
def test_a_count_larger_than_any_is_refused_with_the_limit(value):
    with pytest.raises(InputError) as caught:
        require_positive_int(value, where="here", field="gpus", fix="write 8")
    assert caught.value.field == "gpus"
    assert caught.value.rule == f"must be at most 2^40 = {LARGEST_COUNT}"
    assert caught.value.fix == "write 8"
    assert require_positive_int(LARGEST_COUNT, where="", field="", fix="") == LARGEST_COUNT


@pytest.mark.parametrize("value", [10**400, True, "1", math.inf, math.nan, None, -1.0, 0])
def test_what_no_float_holds_is_no_positive_number(value):
    with pytest.raises(InputError) as caught:
        require_positive(value, where="here", field="norm", fix="write 1.0")
    assert (caught.value.field, caught.value.fix) == ("norm", "write 1.0")


def test_numbers_and_nothing_else_become_floats():
    assert as_float(3) == 3.0
    assert all(math.isnan(as_float(value)) for value in (True, "3", None, 10**400))


@pytest.mark.parametrize("text", ["", "-1", "1.0", "1e3", "٣", "²", " 1", "1_000", "9" * 5000])
def test_text_that_is_not_digits_spells_no_number(text):
    assert whole_number(text) is None


def test_digits_spell_a_number():
    assert whole_number("0042") == 42


def test_errors_of_other_processes_say_the_same():
    needs = {"strategy": "pp=2", "needed_memory_bytes": 2**40, "device_memory_bytes": 2**36}
    for error in (
        InputError(where="here", field="it", value=1, rule="is bad", fix="mend it"),
        UnannotatedError(where="here", field="it", value=1, rule="is bad", fix="mend it"),
        ResultDoesNotFitError(needs | {"strategy": {"shorthand": "pp=2"}}),
        RunDiffersError("another loss", result={"loss": 1.0}),
        InternalError("broken"),
    ):
        found = pickle.loads(pickle.dumps(error))
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
