"""What a filter means, and how a bad one is refused."""

from __future__ import annotations

import pytest

from piper.errors import StrategyError
from piper.graph import Filter


def matches(value: object, tags: dict[str, int], kind: str = "F") -> bool:
    return Filter.parse(value, where="s.json:1").matches(tags, kind)


@pytest.mark.parametrize(
    ("value", "tags", "expected"),
    [
        ({}, {}, True),
        ({"PP": 0}, {"PP": 0, "EP": 3}, True),
        ({"PP": 0}, {"PP": 1}, False),
        ({"PP": "2"}, {"PP": 2}, True),
        ({"PP": "*"}, {"PP": 7}, True),
        ({"EP": "*"}, {"PP": 7}, False),
        ({"PP": [0, 2]}, {"PP": 2}, True),
        ({"PP": "0-3,7"}, {"PP": 7}, True),
        ({"PP": "0-3,7"}, {"PP": 5}, False),
        ({"EP": {"not": "*"}}, {"PP": 1}, True),
        ({"EP": {"not": "*"}}, {"EP": 1}, False),
        ({"PP": {"not": [0, 1]}}, {"PP": 2}, True),
    ],
)
def test_a_filter_is_a_conjunction_over_tags(value: object, tags: dict[str, int], expected: bool) -> None:
    assert matches(value, tags) is expected


def test_pass_selects_by_letter_or_list() -> None:
    assert matches({"PASS": "B"}, {}, "B")
    assert not matches({"PASS": "B"}, {}, "F")
    assert matches({"PASS": ["B", "BW"]}, {}, "BW")


@pytest.mark.parametrize("value", [-1, True, "x", "3-1", [], 1.5, {"no": 1}, float("nan")])
def test_a_bad_index_names_the_tag(value: object) -> None:
    with pytest.raises(StrategyError) as caught:
        Filter.parse({"PP": value}, where="s.json:4")
    assert caught.value.field.startswith("filter.PP")
    assert caught.value.where == "s.json:4"
    assert caught.value.fix


@pytest.mark.parametrize("value", ["*", "G", [], 3])
def test_a_bad_pass_is_refused(value: object) -> None:
    with pytest.raises(StrategyError, match="must be F, B, BI, BW"):
        Filter.parse({"PASS": value}, where="s.json:4")


def test_a_filter_must_be_an_object() -> None:
    with pytest.raises(StrategyError, match="must be an object"):
        Filter.parse([1], where="s.json:4")


@pytest.mark.parametrize("text", ["0-99999999999", "²", "0-²", "9" * 5000, "3-", "-3", "5-4"])
def test_a_range_of_what_no_model_has_is_refused_at_once(text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        Filter.parse({"PP": text}, where="s.json:1", field="place.filter")
    assert caught.value.field == "place.filter.PP"
    assert caught.value.fix == "say which indices of the tag are meant"
