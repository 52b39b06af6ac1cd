"""The shorthand: round trip, and every refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper.errors import StrategyError
from piper.strategy import Shorthand, Strategy
from piper.strategy.shorthand import parse_shorthand

degree = st.one_of(st.none(), st.integers(1, 4096))


@given(
    pp=degree,
    dp=degree,
    zero=st.one_of(st.none(), st.integers(0, 3)),
    schedule=st.sampled_from([None, "1f1b", "gpipe", "my.py:f"]),
    recompute=st.sampled_from([None, "none", "full", "selective", "full:3"]),
)
def test_parse_is_the_inverse_of_print(**stated: object) -> None:
    shorthand = Shorthand(**stated)  # type: ignore[arg-type]
    if str(shorthand):
        assert parse_shorthand(str(shorthand)) == shorthand


@pytest.mark.parametrize(
    ("text", "field", "fix"),
    [
        ("ppp=4", "ppp", "did you mean 'pp'"),
        ("pp=0", "pp", "pp=1"),
        ("pp=-2", "pp", "pp=1"),
        ("pp=nan", "pp", "pp=1"),
        ("pp=four", "pp", "pp=1"),
        ("pp=1.5", "pp", "pp=1"),
        ("pp=4,pp=2", "pp", "keep one"),
        ("pp", "strategy", "pp=4"),
        ("pp=", "strategy", "pp=4"),
        (",", "strategy", "pp=4"),
        ("zero=4", "zero", "zero=1"),
        ("recompute=some", "recompute", "recompute=full"),
        ("recompute=full:0", "recompute", "recompute=full"),
        ("sp=yes", "sp", "known: on, off"),
        ("offload=disk", "offload", "none"),
    ],
)
def test_a_bad_shorthand_names_key_and_fix(text: str, field: str, fix: str) -> None:
    with pytest.raises(StrategyError) as caught:
        parse_shorthand(text)
    assert caught.value.field == field
    assert fix in caught.value.fix


def test_an_empty_text_states_nothing() -> None:
    assert Strategy.parse("").shorthand == ""
