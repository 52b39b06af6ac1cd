"""How kernels are compiled, and the rules of the simulator compiled for all of them.

[Note: compiled once per machine]  What is compiled is kept beside the file of the function, or in the user's
    cache folder where that one cannot be written, or in NUMBA_CACHE_DIR. Numba sees changes of that file
    only; the text of the other files that it is made of is a closure variable, so that a change of them
    compiles anew, too.
[Note: no counting of references]  Numba counts references to the arrays of every call, which takes several
    times as long as the calls. Functions that make no array are compiled without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from numba import njit

from simulator import rules

bare = njit(_nrt=False)
"""Compile a function that makes no array; see [Note: no counting of references]."""

first_launch_ns = bare(rules.first_launch_ns)
dispatch_ns = bare(rules.dispatch_ns)
ready_ns = bare(rules.ready_ns)
host_goes_on_ns = bare(rules.host_goes_on_ns)
compute_start_ns = bare(rules.compute_start_ns)
compute_end_ns = bare(rules.compute_end_ns)
joined_ns = bare(rules.joined_ns)
host_copy_start_ns = bare(rules.host_copy_start_ns)
rendezvous_start_ns = bare(rules.rendezvous_start_ns)
eager_recv_start_ns = bare(rules.eager_recv_start_ns)
eager_recv_end_ns = bare(rules.eager_recv_end_ns)
collective_start_ns = bare(rules.collective_start_ns)
wire_end_ns = bare(rules.wire_end_ns)
flow_left = bare(rules.flow_left)
flow_ns = bare(rules.flow_ns)
latency_ns = bare(rules.latency_ns)
processor_share = bare(rules.processor_share)
memory_share = bare(rules.memory_share)
compute_speed = bare(rules.compute_speed)


def text_of(*modules: ModuleType) -> str:
    """Return the source of modules; see [Note: compiled once per machine]."""
    return "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)


def kept(function: Callable[..., object]) -> Any:
    """Compile a function, and keep what is compiled; see [Note: compiled once per machine]."""
    kernel: Any = njit(function)
    with suppress(RuntimeError):  # no folder can be written: compiled for this process alone
        kernel.enable_caching()
    return kernel
