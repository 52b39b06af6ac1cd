"""Schedules that weigh passes get the model's own FLOPs."""

from __future__ import annotations

from dataclasses import replace

from piper.graph import CapturedModel
from piper.graph.captured import NOTHING, PassCost
from piper.schedules import parse_costs
from piper.strategy.pass_costs import pass_costs
from tests.models import captured


def weighed(forward: int, inputs: int, weights: int) -> CapturedModel:
    """Return the toy model with every pass so many times its first kernel."""
    model = captured()

    def times(count: int) -> PassCost:
        kernel = model.segments[1].forward.operations[0]
        return PassCost(operations=(replace(kernel, count=count),), workspace_bytes=0) if count else NOTHING

    return replace(
        model,
        segments=tuple(
            replace(
                segment,
                forward=times(forward),
                backward_inputs=times(inputs),
                backward_weights=times(weights),
            )
            for segment in model.segments
        ),
    )


def test_costs_are_percents_of_the_flops_of_all_passes() -> None:
    assert pass_costs(weighed(1, 1, 1)) == parse_costs("F=33,BI=33,BW=33")
    assert pass_costs(weighed(5, 8, 7)) == parse_costs("F=25,BI=40,BW=35")


def test_a_pass_without_flops_leaves_equal_costs() -> None:
    assert pass_costs(weighed(1, 1, 0)) == parse_costs("")
    assert pass_costs(weighed(1, 1, 1000)) == parse_costs("")
