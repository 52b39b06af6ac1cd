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
START, EXTENT, BEFORE, BEHIND, POOL, FREE = range(6)
"""What is kept of a block: address, bytes, neighbours in its segment, its pool, 1 if free."""
ROW = 6
"""Numbers per block; a block is known by where its first one is."""
NUM_FREE, SPARE, USED = range(3)
"""Counts: free blocks, the first block that is not in use (BEHIND it: the next), numbers used for blocks."""
BEYOND = 1 << 62
"""Larger than every block: what the end of an expandable segment counts as."""


def pool_of(size_bytes: int, stream: int) -> int:
    """Return the pool that serves a rounded request: two per stream, the small one first."""
    return 2 * stream + (1 if size_bytes > SMALL_BYTES else 0)


def first_address_of_pool(pool: int) -> int:
    """Return where the expandable segment of a pool begins."""
    return FIRST_ADDRESS + (pool + 1) * POOL_SPAN_BYTES


def place(
    events: Any, size: Any, stream: Any, expandable: bool, capacity_bytes: int, address: Any, reserved: Any,
    held: Any, block: Any, free: Any, count: Any, tails: Any,
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
        block: int64 [`ROW` x (2 x instances + 1)]: see `START` and the lines below it; working space.
        free: int64 [2 x instances + 1], the free blocks of all pools by (pool, bytes, address), the tail of
            a pool behind all others of it; working space.
        count: int64 [3]: see `NUM_FREE` and below, with no spare block.
        tails: int64 [pools], all NOTHING; two pools per stream, the small one first.
    """
    total, retries, fresh = 0, 0, FIRST_ADDRESS
    lists = (free, count, tails)
    for event in range(len(events)):
        instance = events[event]
        freed = instance < 0
        if freed:
            instance = -1 - instance
        request = size[instance]
        pool = pool_of(request, stream[instance])
        if request > 0 and freed:
            _free(block, lists, pool, held[instance])
        elif request > 0:
            best = _best(block, lists, pool, request)
            if best < 0:
                grown = _growth(block, tails[pool], request, expandable)
                if total + grown > capacity_bytes:
                    retries += 1
                    total -= _give_back(block, lists, expandable)
                    grown = _growth(block, tails[pool], request, expandable)
                best = _grow(block, lists, pool, grown, expandable, fresh)
                total += grown
                fresh += grown
            _unlink(block, lists, best)
            _split(block, lists, pool, best, request, expandable)
            held[instance], address[instance] = best, block[best + START]
        reserved[event] = total
    return retries


def _position(block: Any, lists: Any, pool: int, extent: int, start: int) -> int:
    """Return how many free blocks come before (pool, extent, start) in their order."""
    free, count, tails = lists
    low, high = 0, count[NUM_FREE]
    while low < high:
        middle = (low + high) // 2
        at = free[middle]
        its_pool, its_extent = block[at + POOL], block[at + EXTENT]
        if its_pool == pool:
            if at == tails[pool]:
                its_extent = BEYOND
            is_before = its_extent < extent or (its_extent == extent and block[at + START] < start)
        else:
            is_before = its_pool < pool
        if is_before:
            low = middle + 1
        else:
            high = middle
    return int(low)


def _best(block: Any, lists: Any, pool: int, request: int) -> int:
    """Return the smallest free block that holds `request`, the lowest of equal ones, the tail last."""
    free, count, _ = lists
    place = _position(block, lists, pool, request, 0)
    if place == count[NUM_FREE]:
        return NOTHING
    at = free[place]
    if block[at + POOL] != pool or block[at + EXTENT] < request:
        return NOTHING
    return int(at)


def _growth(block: Any, tail: int, request: int, expandable: bool) -> int:
    """Return the bytes of the segment, or by which it grows, that are made for `request`."""
    large = request > SMALL_BYTES
    if expandable:
        step = LARGE_SEGMENT_BYTES if large else SMALL_SEGMENT_BYTES
        lacking = request
        if tail >= 0 and block[tail + FREE] == 1:
            lacking = request - block[tail + EXTENT]
        return (lacking + step - 1) // step * step
    if not large:
        return SMALL_SEGMENT_BYTES
    if request < LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return (request + ROUND_LARGE_BYTES - 1) // ROUND_LARGE_BYTES * ROUND_LARGE_BYTES


def _grow(block: Any, lists: Any, pool: int, grown: int, expandable: bool, fresh: int) -> int:
    """Make a free block of `grown` bytes, or make the free tail longer; return it."""
    tails = lists[2]
    tail = tails[pool]
    if tail >= 0 and block[tail + FREE] == 1:
        block[tail + EXTENT] += grown
        return int(tail)
    new = _new(block, lists[1])
    block[new + START], block[new + EXTENT], block[new + POOL] = fresh, grown, pool
    block[new + BEFORE], block[new + BEHIND] = NOTHING, NOTHING
    if expandable:
        block[new + START] = first_address_of_pool(pool)
        if tail >= 0:
            block[new + START] = block[tail + START] + block[tail + EXTENT]
            block[new + BEFORE] = tail
            block[tail + BEHIND] = new
        tails[pool] = new
    _link(block, lists, new)
    return int(new)


def _new(block: Any, count: Any) -> int:
    """Return a block that is not in use: one that was joined to another, or a fresh one."""
    spare = count[SPARE]
    if spare >= 0:
        count[SPARE] = block[spare + BEHIND]
        return int(spare)
    count[USED] += ROW
    return int(count[USED] - ROW)


def _link(block: Any, lists: Any, at: int) -> None:
    free, count, _ = lists
    place = _place_of(block, lists, at)
    for later in range(count[NUM_FREE], place, -1):
        free[later] = free[later - 1]
    free[place] = at
    count[NUM_FREE] += 1
    block[at + FREE] = 1


def _unlink(block: Any, lists: Any, gone: int) -> None:
    free, count, _ = lists
    count[NUM_FREE] -= 1
    for later in range(_place_of(block, lists, gone), count[NUM_FREE]):
        free[later] = free[later + 1]
    block[gone + FREE] = 0


def _place_of(block: Any, lists: Any, at: int) -> int:
    """Return where a block is, or belongs, among the free ones."""
    pool, extent = block[at + POOL], block[at + EXTENT]
    if at == lists[2][pool]:
        extent = BEYOND
    return _position(block, lists, pool, extent, block[at + START])


def _split(block: Any, lists: Any, pool: int, at: int, request: int, expandable: bool) -> None:
    """Cut what `request` leaves of block `at` off as a free block, if that is large enough."""
    left = block[at + EXTENT] - request
    if left < MIN_BLOCK_BYTES or (request > SMALL_BYTES and not expandable and left <= SMALL_BYTES):
        return
    new, tails, following = _new(block, lists[1]), lists[2], block[at + BEHIND]
    block[new + START], block[new + EXTENT], block[new + POOL] = block[at + START] + request, left, pool
    block[new + BEFORE], block[new + BEHIND] = at, following
    if following >= 0:
        block[following + BEFORE] = new
    block[at + BEHIND], block[at + EXTENT] = new, request
    if tails[pool] == at:
        tails[pool] = new
    _link(block, lists, new)


def _free(block: Any, lists: Any, pool: int, at: int) -> None:
    """Make block `at` free, joined with its free neighbours."""
    _, count, tails = lists
    for side in (BEFORE, BEHIND):
        near = block[at + side]
        if near < 0 or block[near + FREE] == 0:
            continue
        _unlink(block, lists, near)
        other = BEFORE + BEHIND - side
        block[at + EXTENT] += block[near + EXTENT]
        block[at + START] = min(block[at + START], block[near + START])
        block[at + side] = block[near + side]
        if block[near + side] >= 0:
            block[block[near + side] + other] = at
        if tails[pool] == near:
            tails[pool] = at
        block[near + BEHIND], count[SPARE] = count[SPARE], near
    _link(block, lists, at)


def _give_back(block: Any, lists: Any, expandable: bool) -> int:
    """Give back every segment without a block in use, or the free ends of expandable ones; return bytes."""
    free, count, tails = lists
    given = 0
    for place in range(count[NUM_FREE] - 1, -1, -1):
        at, part = free[place], 0
        if not expandable:
            if block[at + BEFORE] < 0 and block[at + BEHIND] < 0:
                part = block[at + EXTENT]
        elif at == tails[block[at + POOL]]:
            step = LARGE_SEGMENT_BYTES if block[at + POOL] % 2 else SMALL_SEGMENT_BYTES
            part = block[at + EXTENT] // step * step
        given += part
        if part > 0 and part == block[at + EXTENT]:
            _drop(block, lists, at)
        else:
            block[at + EXTENT] -= part
    return given


def _drop(block: Any, lists: Any, at: int) -> None:
    """Take block `at` out of its pool and its segment."""
    tails, pool, ahead = lists[2], block[at + POOL], block[at + BEFORE]
    _unlink(block, lists, at)
    if ahead >= 0:
        block[ahead + BEHIND] = NOTHING
    if tails[pool] == at:
        tails[pool] = ahead


PARTS = (
    pool_of, first_address_of_pool, _position, _place_of, _best, _new, _growth, _link, _grow, _unlink,
    _split, _free, _drop, _give_back, place,
)  # fmt: skip
"""In the order in which they need each other."""


@cache
def compiled() -> Any:
    """Return `place` as machine code, kept on this machine where numba finds a folder for it."""
    from numba import njit

    names = dict(globals())
    for part in PARTS:
        function = FunctionType(part.__code__, names, part.__name__)
        names[part.__name__] = njit(function, forceinline=True)
    with suppress(RuntimeError):  # no folder can be written: compiled anew by every process
        names["place"].enable_caching()
    return names["place"]
