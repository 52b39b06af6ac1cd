"""What the passes of a model cost beside each other, for schedules that weigh them: FLOPs, in percent."""

from __future__ import annotations

from fractions import Fraction

from piper.graph import CapturedModel
from piper.schedules import Costs, parse_costs


def pass_costs(model: CapturedModel) -> Costs:
    """Return the costs of F, BI and BW as whole percents of all three, by the FLOPs of all segments.

    A schedule is chosen before anything is priced, for every stage alike. 1 each where a pass has no FLOPs.
    """
    flops = [
        sum(operation.flops * operation.count for cost in costs for operation in cost.operations)
        for costs in (
            [segment.forward for segment in model.segments],
            [segment.backward_inputs for segment in model.segments],
            [segment.backward_weights for segment in model.segments],
        )
    ]
    percents = [round(Fraction(100 * each, max(sum(flops), 1))) for each in flops]
    if not all(percents):
        return parse_costs()
    return parse_costs("F={},BI={},BW={}".format(*percents))
