"""Costs of passes: exact numbers in, clear refusals for the rest."""

from fractions import Fraction

import pytest

from piper.errors import StrategyError
from piper.schedules import parse_costs


def test_costs_left_out_are_one_unit_and_free_communication():
    assert parse_costs() == {"F": 1, "BI": 1, "BW": 1, "B": 2, "FB": 3, "comm": 0}


def test_costs_are_kept_exact():
    costs = parse_costs("F=0.1, BI=1/3, BW=2e-1, comm=0")
    assert costs["F"] == Fraction(1, 10)
    assert costs["B"] == Fraction(1, 3) + Fraction(1, 5)
    assert costs["FB"] == Fraction(1, 10) + Fraction(8, 15)


def test_a_whole_backward_is_halved_unless_its_halves_are_given():
    assert parse_costs("F=1,B=1") == parse_costs("F=1,BI=1/2,BW=0.5")
    assert parse_costs("B=3,FB=F+B")["FB"] == 4
    with pytest.raises(StrategyError, match=r"is BI \+ BW, which is given too"):
        parse_costs("B=2,BI=1")


def test_an_overlapped_slot_costs_a_number_or_a_sum():
    assert parse_costs("F=2,BI=3,FB=F+BI")["FB"] == 5
    assert parse_costs("F=2,FB=B+0.5")["FB"] == Fraction(5, 2)
    assert parse_costs("FB=2.5")["FB"] == Fraction(5, 2)


@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        ("F=0", "F", "must be > 0"),
        ("BI=-1", "BI", "must be > 0"),
        ("BW=nan", "BW", "must be a number"),
        ("F=inf", "F", "must be a number"),
        ("F=one", "F", "must be a number"),
        ("F=1/0", "F", "must be a number"),
        ("F=", "F", "must be a number"),
        ("BI=F+1", "BI", "must be a number"),
        ("comm=-0.5", "comm", "must be >= 0"),
        ("FB=0", "FB", "must be > 0"),
        ("F", "cost", "has no value"),
        ("F=1,F=2", "cost", "is given twice"),
    ],
)
def test_what_is_no_cost_is_refused(text, field, rule):
    with pytest.raises(StrategyError) as caught:
        parse_costs(text)
    assert (caught.value.field, caught.value.rule) == (field, rule)
    assert "F=1,BI=1,BW=1" in caught.value.fix


def test_an_unknown_cost_gets_a_did_you_mean():
    with pytest.raises(StrategyError) as caught:
        parse_costs("com=1", where="--costs")
    assert caught.value.where == "--costs"
    assert "'comm'" in caught.value.fix


@pytest.mark.parametrize("text", ["1e999999999", "1e-999999999"])
def test_a_number_with_more_digits_than_memory_is_refused(text):
    with pytest.raises(StrategyError) as caught:
        parse_costs(f"F={text}")
    assert (caught.value.field, caught.value.value) == ("F", text)
    assert "F=1" in caught.value.fix


def test_the_share_that_waits_for_weight_gradients_is_between_none_and_all_of_the_memory():
    assert parse_costs("kept=2/5")["kept"] == Fraction(2, 5)
    assert parse_costs("kept=0")["kept"] == 0
    with pytest.raises(StrategyError, match="must be at most 1: it is a share"):
        parse_costs("kept=1.5")
