"""How a config states its routed experts; shared by all families that have them."""

from __future__ import annotations

from dataclasses import replace

from piper.models.fields import Fields
from piper.models.reading.trunk import MOST_EXPERTS
from piper.models.shape import Router


def read_router(
    read: Fields, router: Router, *, experts: str = "num_experts", normalised: str | None = None
) -> Router:
    """Return `router` with what the config says; raises ModelError where counts contradict each other.

    Args:
        read: the config.
        router: the family's defaults, and what its configs do not state.
        experts: key of the number of experts; files that transformers 5 saved may say `num_local_experts`
            where older ones say `num_experts`.
        normalised: key of the flag whether weights of chosen experts sum to 1, if the family has one.
    """
    if experts == "num_experts" and not read.has(experts) and read.has("num_local_experts"):
        experts = "num_local_experts"
    count = read.count(experts, default=router.experts)
    read.require(count <= MOST_EXPERTS, experts, value=count, rule=f"must be at most {MOST_EXPERTS}")
    top_k = read.count("num_experts_per_tok", default=router.top_k)
    read.require(
        top_k <= count, "num_experts_per_tok", value=top_k, rule=f"is more than {count} experts ({experts})"
    )
    for noise in ("router_jitter_noise", "input_jitter_noise"):
        read.refuse(noise, unless=0.0)
    read.raw("router_aux_loss_coef")
    if read.flag("output_router_logits", default=False):
        read.notices.append("the auxiliary loss over experts (output_router_logits) is not planned")
    if normalised is not None:
        router = replace(router, normalised=read.flag(normalised, default=router.normalised))
    return replace(router, experts=count, top_k=top_k)
