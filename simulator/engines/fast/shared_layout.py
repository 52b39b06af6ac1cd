"""Records of the shared kernel; numpy alone, so that they can be laid out without compiling anything."""

from __future__ import annotations

import numpy as np

PENDING = -1
IDLE, STARTING, JOINING, LATENCY, MOVING, COMPUTING, LAUNCHING = range(7)
"""What a slot waits for: nothing that is timed; its start; joining; the end of the latency, of the flow, of
the launches of a task that is done."""

HOLDS = np.dtype([("row", np.int32), ("processors", np.int32)])
"""Of a task: its kind of flow, and the processors that it holds as a communication."""

SLOT = np.dtype(
    [
        ("due", np.int64),  # when something happens to it next
        ("since", np.int64),  # when `left` was right
        ("left", np.float64),  # ns at full speed
        ("speed", np.float64),  # 0: just begun
        ("task", np.int64),  # the task of its flow, whose
        ("kind", np.int64),  # demands are those of this kind
        ("place", np.int32),  # in the heap, or PENDING
        ("number", np.int32),  # among the flows that settle, or PENDING
        ("state", np.int8),
    ],
    align=True,
)
DEVICE = np.dtype(
    [
        ("held", np.int64),  # processors that communication holds
        ("computing", np.int64),  # streams that compute
        ("first_slot", np.int64),  # its entries in `device_slots`: slots whose flows may have a member on it
        ("last_slot", np.int64),
        ("first_stream", np.int64),
        ("last_stream", np.int64),
        ("unsettled", np.int64),
    ]
)
LINK = np.dtype(
    [
        ("first_slot", np.int64),  # its entries in `link_slots`: slots whose flows may load it
        ("last_slot", np.int64),
        ("unsettled", np.int64),
        ("number", np.int64),  # among the links that are looked at, or PENDING
        ("tight", np.int64),  # wanted by more than it has
        ("was_tight", np.int64),  # when it was looked at last
    ]
)
DEMAND = np.dtype(
    [
        ("latency", np.int64),
        ("first", np.int64),  # its entries in `link_numbers`, `uses` and `link_places`
        ("last", np.int64),
        ("first_device", np.int64),  # its entries in `device_numbers` and `device_places`
        ("last_device", np.int64),
        ("growth", np.float64),
        ("memory", np.float64),
        ("processor_part", np.float64),
        ("memory_part", np.float64),
    ]
)
"""A kind of flow: a row of `Sharing`, and the slot that drives it."""
