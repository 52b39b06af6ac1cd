"""The largest tensors that forward keeps for backward, with the operators that made and saved them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cost_models.units import format_bytes
from piper.report.summary import aligned

if TYPE_CHECKING:
    from piper.graph import CapturedModel

SHOWN_TENSORS = 10
_LEFT_COLUMNS = 6


def largest_saved(model: CapturedModel, *, limit: int = SHOWN_TENSORS) -> dict[str, Any]:
    """Return what one microbatch keeps: equal tensors of like segments joined, the largest sums first.

    Bytes are those before anything is cut (by tensor, sequence, expert parallelism) or recomputed. A tensor
    that leaves one segment and enters another stands under each that keeps it (`border`).
    """
    counts = Counter(
        (_without_numbers(segment.name), tuple(tag for tag, _ in segment.tags), tensor)
        for segment in model.segments
        for tensor in segment.saved_tensors
    )
    # Equal sums stay in the order of the forward: sorting is stable, and a Counter keeps it.
    ordered = sorted(counts.items(), key=lambda entry: -entry[1] * entry[0][2].bytes)
    return {
        "micro_batch": model.micro_batch,
        "seq_len": model.seq_len,
        "dtype": model.dtype,
        "n_tensors": counts.total(),
        "largest": [
            {
                "segment": segment,
                "tags": list(tags),
                "count": count,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "bytes": tensor.bytes,
                "total_bytes": count * tensor.bytes,
                "saved_by": tensor.saved_by,
                "made_by": tensor.made_by or None,
                "border": tensor.border or None,
            }
            for (segment, tags, tensor), count in ordered[:limit]
        ],
    }


def saved_lines(saved: Mapping[str, Any]) -> list[str]:
    """Write them as a table."""
    rows = [["  segment", "tags", "tensor", "saved by", "made by", "border", "count", "each", "all"]]
    rows += [
        [
            f"  {tensor['segment']}",
            " ".join(tensor["tags"]),
            f"{tensor['dtype']} {tensor['shape']}",
            tensor["saved_by"],
            tensor["made_by"] or "-",
            tensor["border"] or "-",
            str(tensor["count"]),
            format_bytes(tensor["bytes"]),
            format_bytes(tensor["total_bytes"]),
        ]
        for tensor in saved["largest"]
    ]
    return aligned(rows, left_columns=_LEFT_COLUMNS)


def saved_heading(saved: Mapping[str, Any]) -> str:
    """Say of what the tensors are."""
    return (
        f"what forward keeps for backward: the largest of {saved['n_tensors']} tensors, microbatch "
        f"[{saved['micro_batch']}, {saved['seq_len']}], nothing cut or recomputed"
    )


def _without_numbers(name: str) -> str:
    """Write layers.3.mlp as layers.{i}.mlp, so that the same part of all layers has one name."""
    return re.sub(r"\d+", "{i}", name)
