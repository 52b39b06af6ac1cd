"""Blocks and segments of a caching allocator: requests and frees in order -> an address for each.

[Note: caching allocator]  The rules of PyTorch's CUDA allocator (`c10/cuda/CUDACachingAllocator.cpp`, v2.x;
    figures in `AllocatorConfig`: kMinBlockSize 512 B, kSmallSize 1 MiB, kSmallBuffer 2 MiB,
    kMinLargeAlloc 10 MiB, kLargeBuffer 20 MiB, kRoundLarge 2 MiB):
    a request is rounded up to 512 B; up to 1 MiB it is served by the small pool, else by the large pool, of
    its stream; the smallest free block that holds it is taken, the lowest address first; what is left over
    becomes a free block (small pool: from 512 B on; large pool: above 1 MiB). Without such a block a segment
    is made: 2 MiB in the small pool, 20 MiB for requests below 10 MiB, else the request in whole 2 MiB. A
    freed block is joined with free neighbours in its segment. If a new segment would exceed the capacity,
    all segments without a block in use are given back first.
[Note: expandable segments]  One segment per pool and stream that grows at its end, in steps of 2 MiB (small
    pool) or 20 MiB (large pool); its free end counts as larger than every block. Leftovers from 512 B on are
    split off in both pools. Before the capacity is exceeded, whole steps of free ends are given back (the
    original also gives back free pages in the middle).

The functions are written in what both Python and numba run: of sequences they only take and set entries.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from types import FunctionType
from typing import Any

MIN_BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_SEGMENT_BYTES = 20 << 20
LARGE_REQUEST_BYTES = 10 << 20
ROUND_LARGE_BYTES = 2 << 20
POOL_SPAN_BYTES = 1 << 44
"""Between the first addresses of two expandable segments."""
FIRST_ADDRESS = 1 << 40
NOTHING = -1
START, EXTENT, BEFORE, BEHIND, CHAIN, FREE = range(6)
"""Columns of blocks: address, bytes, neighbours in its segment, next free one of its pool, 1 if free."""


def place(
    events: Any, size: Any, stream: Any, expandable: bool, capacity_bytes: int, address: Any, reserved: Any,
    held: Any, block: Any, pool_head: Any, pool_tail: Any,
) -> int:  # fmt: skip
    """Serve the events in order and return how often cached segments were given back.

    Args:
        events: int64 [events]: i asks for instance i, -1 - i frees it.
        size, stream: int64 [instances]: rounded bytes (0: nothing is done), and whose pool serves it.
        expandable: see [Note: expandable segments].
        capacity_bytes: what may be reserved; where giving back is not enough, the run goes on beyond it.
        address: int64 [instances], written.
        reserved: int64 [events], bytes of all segments after each event, written.
        held: int64 [instances], the block of each: working space.
        block: six columns, int64 [2 x instances + 1]: see `START` and the lines below it; working space.
        pool_head, pool_tail: int64 [pools], all NOTHING; two pools per stream, the small one first.
    """
    blocks, total, retries, fresh = 0, 0, 0, FIRST_ADDRESS
    for event in range(len(events)):
        instance = events[event]
        freed = instance < 0
        if freed:
            instance = -1 - instance
        request = size[instance]
        pool = 2 * stream[instance] + (1 if request > SMALL_BYTES else 0)
        if request > 0 and freed:
            _free(block, pool_head, pool_tail, pool, held[instance])
        elif request > 0:
            best = _best(block, pool_head[pool], pool_tail[pool], request)
            if best < 0:
                grown = _growth(block, pool_tail[pool], request, expandable)
                if total + grown > capacity_bytes:
                    retries += 1
                    total -= _give_back(block, pool_head, pool_tail, expandable)
                    grown = _growth(block, pool_tail[pool], request, expandable)
                best = _grow(block, pool_head, pool_tail, pool, grown, blocks, expandable, fresh)
                total += grown
                if best == blocks:
                    blocks += 1
                    fresh += grown
            _unlink(block, pool_head, pool, best)
            if _split(block, pool_head, pool_tail, pool, best, request, blocks, expandable):
                blocks += 1
            held[instance], address[instance] = best, block[START][best]
        reserved[event] = total
    return retries


def _best(block: Any, head: int, tail: int, request: int) -> int:
    """Return the smallest free block that holds `request`, the lowest of equal ones, the tail last."""
    start, extent, chain = block[START], block[EXTENT], block[CHAIN]
    best, at = NOTHING, head
    while at >= 0:
        if extent[at] >= request:
            if best < 0 or best == tail:
                best = at
            same = extent[at] == extent[best] and start[at] < start[best]
            if at != tail and (extent[at] < extent[best] or same):
                best = at
        at = chain[at]
    return best


def _growth(block: Any, tail: int, request: int, expandable: bool) -> int:
    """Return the bytes of the segment, or by which it grows, that are made for `request`."""
    large = request > SMALL_BYTES
    if expandable:
        step = LARGE_SEGMENT_BYTES if large else SMALL_SEGMENT_BYTES
        lacking = request
        if tail >= 0 and block[FREE][tail] == 1:
            lacking = request - block[EXTENT][tail]
        return (lacking + step - 1) // step * step
    if not large:
        return SMALL_SEGMENT_BYTES
    if request < LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return (request + ROUND_LARGE_BYTES - 1) // ROUND_LARGE_BYTES * ROUND_LARGE_BYTES


def _grow(
    block: Any, pool_head: Any, pool_tail: Any, pool: int, grown: int, new: int, expandable: bool, fresh: int
) -> int:
    """Make a free block of `grown` bytes, or make the free tail longer; return it."""
    tail = pool_tail[pool]
    if tail >= 0 and block[FREE][tail] == 1:
        block[EXTENT][tail] += grown
        return int(tail)
    block[START][new], block[EXTENT][new] = fresh, grown
    block[BEFORE][new], block[BEHIND][new] = NOTHING, NOTHING
    if expandable:
        block[START][new] = FIRST_ADDRESS + (pool + 1) * POOL_SPAN_BYTES
        if tail >= 0:
            block[START][new] = block[START][tail] + block[EXTENT][tail]
            block[BEFORE][new] = tail
            block[BEHIND][tail] = new
        pool_tail[pool] = new
    _link(block, pool_head, pool, new)
    return new


def _link(block: Any, pool_head: Any, pool: int, at: int) -> None:
    block[FREE][at] = 1
    block[CHAIN][at] = pool_head[pool]
    pool_head[pool] = at


def _unlink(block: Any, pool_head: Any, pool: int, gone: int) -> None:
    chain = block[CHAIN]
    block[FREE][gone] = 0
    if pool_head[pool] == gone:
        pool_head[pool] = chain[gone]
        return
    at = pool_head[pool]
    while chain[at] != gone:
        at = chain[at]
    chain[at] = chain[gone]


def _split(
    block: Any, pool_head: Any, pool_tail: Any, pool: int, at: int, request: int, new: int, expandable: bool
) -> bool:
    """Cut what `request` leaves of block `at` off as a free block `new`; return whether that was done."""
    left = block[EXTENT][at] - request
    if left < MIN_BLOCK_BYTES or (request > SMALL_BYTES and not expandable and left <= SMALL_BYTES):
        return False
    following = block[BEHIND][at]
    block[START][new], block[EXTENT][new] = block[START][at] + request, left
    block[BEFORE][new], block[BEHIND][new] = at, following
    if following >= 0:
        block[BEFORE][following] = new
    block[BEHIND][at], block[EXTENT][at] = new, request
    if pool_tail[pool] == at:
        pool_tail[pool] = new
    _link(block, pool_head, pool, new)
    return True


def _free(block: Any, pool_head: Any, pool_tail: Any, pool: int, at: int) -> None:
    """Make block `at` free, joined with its free neighbours."""
    for side in (BEFORE, BEHIND):
        near = block[side][at]
        if near < 0 or block[FREE][near] == 0:
            continue
        _unlink(block, pool_head, pool, near)
        other = BEFORE + BEHIND - side
        block[EXTENT][at] += block[EXTENT][near]
        block[START][at] = min(block[START][at], block[START][near])
        block[side][at] = block[side][near]
        if block[side][near] >= 0:
            block[other][block[side][near]] = at
        if pool_tail[pool] == near:
            pool_tail[pool] = at
    _link(block, pool_head, pool, at)


def _give_back(block: Any, pool_head: Any, pool_tail: Any, expandable: bool) -> int:
    """Give back every segment without a block in use, or the free ends of expandable ones; return bytes."""
    given = 0
    for pool in range(len(pool_head)):
        at = pool_head[pool]
        while at >= 0:
            following, part = block[CHAIN][at], 0
            if not expandable:
                if block[BEFORE][at] < 0 and block[BEHIND][at] < 0:
                    part = block[EXTENT][at]
            elif at == pool_tail[pool]:
                step = LARGE_SEGMENT_BYTES if pool % 2 else SMALL_SEGMENT_BYTES
                part = block[EXTENT][at] // step * step
            given += part
            block[EXTENT][at] -= part
            if block[EXTENT][at] == 0:
                _drop(block, pool_head, pool_tail, pool, at)
            at = following
    return given


def _drop(block: Any, pool_head: Any, pool_tail: Any, pool: int, at: int) -> None:
    """Take the empty block `at` out of its pool and its segment."""
    _unlink(block, pool_head, pool, at)
    ahead = block[BEFORE][at]
    if ahead >= 0:
        block[BEHIND][ahead] = NOTHING
    if pool_tail[pool] == at:
        pool_tail[pool] = ahead


PARTS = (_best, _growth, _link, _grow, _unlink, _split, _free, _drop, _give_back, place)
"""In the order in which they need each other."""


@cache
def compiled() -> Any:
    """Return `place` as machine code, kept on this machine where numba finds a folder for it."""
    from numba import njit

    names = dict(globals())
    for part in PARTS:
        function = FunctionType(part.__code__, names, part.__name__)
        names[part.__name__] = njit(function)
    with suppress(RuntimeError):  # no folder can be written: compiled anew by every process
        names["place"].enable_caching()
    return names["place"]
