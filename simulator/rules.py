"""Rules of the simulator: what a host, a stream, a transfer and a collective may do, as scalar functions.

Both engines call these, so that they agree to the nanosecond. Every function uses + - * / min max and
comparisons on int64 and float64 only, so that numba compiles it unchanged.

[Note: completion rounding]  Priced seconds become whole ns, rounded up: nothing ends early. An excess
    below one part in 10^14 is float noise (1.1e-6 s is 1100 ns, not 1101).
[Note: time range]  Times are refused beyond 2^62 ns (146 years), so that sums never overflow int64.
[Note: host dispatch]  One host thread per device launches kernels one after another, in dispatch order,
    and may run ahead of the device. A task may start once its first kernel is launched.
[Note: run-ahead limit]  A stream takes so many launched kernels that have not ended, and no more: the host
    waits until an earlier task of the stream has ended before it launches the next (cost model: run_ahead).
[Note: blocking calls]  After a task that the host has to see the end of (cost model: blocking), it launches
    nothing until the task has ended.
[Note: awaited tasks]  Before a task that waits for one whose end the host has to see (cost model: awaited),
    it launches nothing until that has ended: a framework that synchronises where it receives.
[Note: host-bound tasks]  A task whose k kernels are launched during [h, h + k * launch] cannot end before
    the last of them is launched, however fast the device is.
[Note: stream start]  A stream runs its tasks in dispatch order, one at a time; a task is ready when the
    previous one is done and all its waits are complete.
[Note: eager send]  A message up to the eager limit leaves when its send is joined and does not wait for
    the receive, which is complete once it is posted and the bytes are there.
[Note: rendezvous send]  A larger message moves once both ends are joined; both end together.
[Note: additive skew]  A collective is on the wire from its last arrival on, and all members end together:
    a waiting rank pays the difference of arrivals *plus* the transport, not the larger of the two. A ring
    shift is a collective: every member waits for all, not only for its neighbours.
[Note: host copy]  A copy between device and host needs no peer: it takes its stream for the priced time from
    when it is ready and launched. Copies of one device on several streams do not slow each other down, unless
    links are shared.
[Note: flows]  Where links, processors and memory bandwidth are shared, a computation, a message, a collective
    and a host copy runs at a speed in (0, 1] of what it does alone, and the speed changes while it runs. What
    is left of it is float64, in ns at full speed. Everything that happens in one ns happens before speeds are
    worked out anew, once; only flows whose speed has changed are timed anew. Ends are rounded up to ns.
[Note: latency, then wire]  A message or collective first takes its latency, which nothing slows; then bytes
    flow, and load the links on their way and the memory of its members.
[Note: link sharing]  Links are shared max-min fair: see `simulator.sharing.fair`.
[Note: spinning kernels]  Communication on processors (all but host copies) holds them on a device from when
    that device joins until it ends there: a kernel that waits for its peers spins. Computation gets the
    others, at least one. Communication is not slowed by computation.
[Note: computation under sharing]  A part of a computation is bound by processors, a part by memory bandwidth,
    the rest (latency) by nothing. Streams that compute on one device share what is left equally; streams of
    lower priority get one processor while one of higher priority computes. Of the memory bandwidth,
    communication takes what it moves, but leaves computation at least half.
"""

from __future__ import annotations

MAX_TIME_NS = 2**62
NS_PER_S = 1_000_000_000
_FLOAT_NOISE = 1e-14
_FAIR_MEMORY = 0.5
"""Fraction of the memory bandwidth that computation keeps at least: that of one of two fair flows."""


def within_range(time_ns: float) -> bool:
    """Tell whether a time or a sum of times is representable; see [Note: time range]."""
    return 0 <= time_ns <= MAX_TIME_NS


def duration_ns(seconds: float) -> int:
    """Return priced seconds as whole ns; see [Note: completion rounding]."""
    exact = seconds * NS_PER_S
    whole = int(exact)
    return whole + 1 if exact - whole > exact * _FLOAT_NOISE else whole


def first_launch_ns(host_free_ns: int, launch_ns: int) -> int:
    """Return when the first kernel of a task is launched; see [Note: host dispatch]."""
    return host_free_ns + launch_ns


def dispatch_ns(host_free_ns: int, host_ns: int) -> int:
    """Return when the last kernel of a task is launched and the host is free again."""
    return host_free_ns + host_ns


def ready_ns(stream_free_ns: int, waits_done_ns: int) -> int:
    """Return when a task is the head of its stream with all waits done; see [Note: stream start]."""
    return max(stream_free_ns, waits_done_ns)


def host_goes_on_ns(host_free_ns: int, waited_for_end: int) -> int:
    """Return when the host may launch the next task; see [Note: run-ahead limit], [Note: blocking calls]."""
    return max(host_free_ns, waited_for_end)


def compute_start_ns(ready: int, first_launch: int) -> int:
    """Return when a compute task starts; see [Note: host dispatch]."""
    return max(ready, first_launch)


def compute_end_ns(start: int, duration: int, dispatch: int) -> int:
    """Return when a compute task ends; see [Note: host-bound tasks]."""
    return max(start + duration, dispatch)


def joined_ns(ready: int, dispatch: int) -> int:
    """Return when a device takes part in a transfer or collective: ready, and its kernel launched."""
    return max(ready, dispatch)


def host_copy_start_ns(ready: int, dispatch: int) -> int:
    """Return when a copy between device and host starts; see [Note: host copy]."""
    return max(ready, dispatch)


def is_eager(size_bytes: int, eager_limit_bytes: int) -> bool:
    """Tell whether a send returns before its peer; see [Note: eager send]."""
    return size_bytes <= eager_limit_bytes


def rendezvous_start_ns(send_joined: int, recv_joined: int) -> int:
    """Return when a large message is on the wire; see [Note: rendezvous send]."""
    return max(send_joined, recv_joined)


def eager_recv_start_ns(send_joined: int, recv_joined: int) -> int:
    """Return when a receive sees bytes of an eager message on the wire; see [Note: eager send]."""
    return max(send_joined, recv_joined)


def eager_recv_end_ns(send_joined: int, recv_joined: int, duration: int) -> int:
    """Return when an eager message is received: posted, and the last byte there."""
    return max(recv_joined, send_joined + duration)


def collective_start_ns(latest_so_far: int, arrival: int) -> int:
    """Return when a collective may start after one more arrival; see [Note: additive skew]."""
    return max(latest_so_far, arrival)


def wire_end_ns(start: int, duration: int) -> int:
    """Return when a rendezvous message, a collective or a host copy has moved its last byte."""
    return start + duration


def flow_left(left: float, elapsed_ns: int, speed: float) -> float:
    """Return what is left of a flow after some time at a speed, in ns at full speed; see [Note: flows]."""
    return max(left - elapsed_ns * speed, 0.0)


def flow_ns(left: float, speed: float) -> int:
    """Return how long a flow still takes at a speed; see [Note: flows] and [Note: completion rounding]."""
    exact = left / speed
    whole = int(exact)
    return whole + 1 if exact - whole > exact * _FLOAT_NOISE else whole


def latency_ns(latency: int, duration: int) -> int:
    """Return how long no bytes flow, of a communication of that duration; see [Note: latency, then wire]."""
    return min(latency, duration)


def processor_share(held: int, processors: int, computing: int) -> float:
    """Return the share of the processors that one of `computing` streams gets."""
    return max(processors - held, 1) / (processors * computing)


def memory_share(taken: float, need: float, computing: int) -> float:
    """Return the share that a stream gets of the memory bandwidth that it needs, at most 1.

    Args:
        taken: fraction of the bandwidth that communication takes.
        need: fraction that the stream takes alone while memory-bound.
        computing: streams that compute.
    """
    if need <= 0.0:
        return 1.0
    return min(1.0, max(1.0 - taken, _FAIR_MEMORY) / (need * computing))


def compute_speed(  # noqa: PLR0917 (compiled functions take scalars one by one)
    processor_part: float, memory_part: float, processors: float, memory: float
) -> float:
    """Return the speed of a computation; see [Note: computation under sharing].

    Args:
        processor_part, memory_part: how much of its time alone each bounds; together at most 1.
        processors, memory: shares that it gets of what it has alone.
    """
    if processors >= 1.0 and memory >= 1.0:
        return 1.0
    rest = 1.0 - processor_part - memory_part
    return 1.0 / (rest + processor_part / processors + memory_part / memory)
