"""A capture without the cache: build on meta, record three times, assemble."""

from __future__ import annotations

from typing import Any

from torch import nn

from piper.capture.assemble import assemble
from piper.capture.dtypes import compute_dtype
from piper.capture.repeats import repeated_blocks
from piper.capture.replay import ReplayMismatchError
from piper.capture.run import record, to_meta
from piper.graph.captured import CapturedModel


def capture_fresh(source: Any, *, name: str, sizes: dict[str, Any], dedupe: bool) -> CapturedModel:
    """Return the captured model; see `piper.capture.capture`."""
    dtype, micro_batch, seq_len = sizes["dtype"], sizes["micro_batch"], sizes["seq_len"]
    torch_dtype = compute_dtype(dtype, where=name)
    if isinstance(source, nn.Module):
        module, facts = to_meta(source, dtype=torch_dtype), None
    else:
        module, facts = source.build(dtype=dtype, device="meta", seq_len=seq_len), source.facts
        if not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            module = to_meta(module, dtype=torch_dtype)
    try:
        return _captured(module, name=name, sizes=(micro_batch, seq_len, dtype), facts=facts, dedupe=dedupe)
    except ReplayMismatchError:
        return _captured(module, name=name, sizes=(micro_batch, seq_len, dtype), facts=facts, dedupe=False)


def _captured(
    module: nn.Module, *, name: str, sizes: tuple[int, int, str], facts: Any, dedupe: bool
) -> CapturedModel:
    micro_batch, seq_len, _ = sizes
    common: dict[str, Any] = {"where": name, "seq_len": seq_len}
    common["blocks"] = repeated_blocks(module) if dedupe else ()
    runs = (
        record(module, micro_batch=micro_batch, grad=True, **common),
        record(module, micro_batch=micro_batch, grad=False, **common),
        record(module, micro_batch=micro_batch + 1, grad=True, **common),
    )
    return assemble(module, runs=runs, facts=facts, sizes=sizes)
