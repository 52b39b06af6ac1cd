"""The track that a rank of the job is shown by: replicas share one."""

from __future__ import annotations

from piper.errors import JobError
from simulator.plan import Plan
from simulator.timeline.timeline import RankTrack, Timeline


def track_of(timeline: Timeline, plan: Plan | None, *, rank: int) -> RankTrack:
    """Return the track of a rank of the whole job; raises JobError for a rank that the job lacks."""
    own = [track for track in timeline.tracks if track.rank == rank]
    if own:
        return own[0]
    if plan is None:
        known = ", ".join(str(track.rank) for track in timeline.tracks)
        raise _no_rank(rank, rule="has no track of its own", fix=f"give one of {known}")
    if rank >= plan.num_ranks:
        fix = f"give 0 to {plan.num_ranks - 1}, or leave it out for the fullest rank"
        raise _no_rank(rank, rule=f"is not one of the {plan.num_ranks} ranks of the job", fix=fix)
    home = plan.pipeline_rank_of(rank)
    return next(track for track in timeline.tracks if track.pipeline_rank == home)


def _no_rank(rank: int, *, rule: str, fix: str) -> JobError:
    return JobError(where="piper export", field="--rank", value=rank, rule=rule, fix=fix)
