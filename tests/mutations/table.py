"""Ways to break a legal plan, each a true defect: `(plan, choose) -> Mutant`, or None where it has no place.

A mutant is wrong for a reason that is stated here and does not come from the checker: what a device must
order is written down once more, in `needs` and `cross_step_needs`, and an order is lost only when neither
streams nor waits keep it (`Order`, an exact search). Bookkeeping is kept right around the defect (a task
that goes takes its buffers along, those who waited for it wait for what it waited for), so that a mutant
is not found by its debris.

To add one: a function in the file of its kind, and one line in `MUTATIONS`.
"""

from __future__ import annotations

from simulator.plan import RECV_KINDS, SEND_KINDS
from tests.mutations.buckets import parameter_in_no_bucket, parameter_in_two_buckets, reduce_wrong_bucket
from tests.mutations.buffers import free_early, free_twice, never_allocate, never_free, shrink_buffer
from tests.mutations.groups import (
    drop_regrouping,
    experts_apart,
    ranks_apart,
    replicas_apart,
)
from tests.mutations.mutant import PASSES, K, Mutation
from tests.mutations.orders import (
    backward_before_forward,
    drop_wait,
    drop_wait_across_steps,
    other_stream,
    swap_collectives,
    swap_receives,
    swap_sends,
    wait_for_the_answer,
    wait_in_a_circle,
)
from tests.mutations.transfers import (
    drop_transfer,
    wrong_edge,
    wrong_peer,
    wrong_size_at_both_ends,
    wrong_size_at_one_end,
    wrong_tensor,
    wrong_transfer_microbatch,
)
from tests.mutations.work import (
    double,
    double_exchange,
    drop,
    drop_exchange,
    drop_norm,
    drop_recompute,
    is_bucket,
    is_gather_after_update,
    is_norm,
    lose_layer,
    lose_microbatch,
    repeat_layer,
    wrong_microbatch,
)
from tests.plan_edits import REDUCTIONS

MUTATIONS: dict[str, Mutation] = {
    "drop wait": drop_wait,
    "drop wait across steps": drop_wait_across_steps,
    "other stream": other_stream,
    "swap sends": swap_sends,
    "swap receives": swap_receives,
    "swap collectives": swap_collectives,
    "backward before forward": backward_before_forward,
    "wrong microbatch": wrong_microbatch,
    "drop pass": drop(PASSES),
    "drop recompute": drop_recompute,
    "drop send": drop(SEND_KINDS),
    "drop receive": drop(RECV_KINDS),
    "drop transfer": drop_transfer,
    "drop reduction": drop(REDUCTIONS, is_bucket),
    "drop exchange": drop_exchange,
    "drop regrouping": drop_regrouping,
    "drop norm": drop_norm,
    "drop update": drop({K.UPDATE}),
    "drop gather": drop({K.ALL_GATHER}, is_gather_after_update),
    "double pass": double(PASSES),
    "double recompute": double({K.R}),
    "double transfer": double(SEND_KINDS | RECV_KINDS),
    "double reduction": double(REDUCTIONS, is_bucket),
    "double exchange": double_exchange,
    "double norm": double({K.NORM, K.ALL_REDUCE}, is_norm),
    "double update": double({K.UPDATE}),
    "lose microbatch": lose_microbatch,
    "lose layer": lose_layer,
    "repeat layer": repeat_layer,
    "wrong peer": wrong_peer,
    "wrong edge": wrong_edge,
    "wrong microbatch of transfers": wrong_transfer_microbatch,
    "wrong size at one end": wrong_size_at_one_end,
    "wrong size at both ends": wrong_size_at_both_ends,
    "wrong tensor": wrong_tensor,
    "free early": free_early,
    "never free": never_free,
    "never allocate": never_allocate,
    "free twice": free_twice,
    "shrink buffer": shrink_buffer,
    "wrong bucket": reduce_wrong_bucket,
    "parameter in no bucket": parameter_in_no_bucket,
    "parameter in two buckets": parameter_in_two_buckets,
    "replicas apart": replicas_apart,
    "experts apart": experts_apart,
    "ranks apart": ranks_apart,
    "wait in a circle": wait_in_a_circle,
    "wait for the answer": wait_for_the_answer,
}
