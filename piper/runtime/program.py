"""From an annotated `nn.Module` to executable segments that agree with the plan.

[Note: one program per microbatch size]
A trace fixes shapes, so each distinct microbatch size is traced once, on the meta device: no parameter is
ever materialised here. Ranks pick the segments of their own stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from piper.errors import ModelError
from piper.runtime.code import SegmentCode, segment_codes
from piper.runtime.local_trace import Cutting, trace_local
from piper.runtime.sources import Source, buffer_values, build
from piper.runtime.trace import trace_module
from simulator.plan import Plan, Segment, TensorSpec

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The model as functions.

    Args:
        segments: microbatch size -> the code of every segment, in plan order.
        buffers: values of the buffers and constants that the code takes, by name.
        local: of one rank of a plan with cut tensors.
    """

    segments: dict[int, tuple[SegmentCode, ...]]
    buffers: dict[str, Tensor]
    local: bool = False


def build_program(
    source: Source,
    *,
    seq_len: int,
    micro_batch_sizes: Iterable[int],
    dtype: str,
    place: torch.device = CPU,
) -> Program:
    """Trace and cut the model once per distinct microbatch size (0.3 s for 16 layers), to run at `place`.

    Raises: ModelError when the module cannot be traced or cut.
    """
    module = build(source, dtype=dtype, device="meta", seq_len=seq_len)
    segments = {
        size: segment_codes(trace_module(module, _meta_inputs(size, seq_len), where="runtime"), device=place)
        for size in sorted(set(micro_batch_sizes))
    }
    used = {name for codes in segments.values() for code in codes for name in code.buffers}
    buffers = buffer_values(source, dtype=dtype, seq_len=seq_len) if used else {}
    return Program(segments=segments, buffers={name: buffers[name].to(place) for name in sorted(used)})


def program_of_plan(source: Source, plan: Plan, *, place: torch.device = CPU) -> Program:
    """Build the program of a plan and check that both mean the same segments."""
    facts = plan.training
    sizes = facts.micro_batch_sizes
    program = build_program(
        source, seq_len=facts.seq_len, micro_batch_sizes=sizes, dtype=facts.dtype, place=place
    )
    check_program(program, plan)
    return local_program(program, source, plan, place=place)


def local_program(program: Program, source: Source, plan: Plan, *, place: torch.device = CPU) -> Program:
    """Return what one rank of a plan computes: where tensors are cut, another one [Note: local trace]."""
    if program.local or not plan.cuts.regions:
        return program
    facts, where = plan.training, "runtime"
    segments = {}
    for size in program.segments:
        module, piece = (
            build(source, dtype=facts.dtype, device="meta", seq_len=facts.seq_len) for _ in range(2)
        )
        inputs = _meta_inputs(size, facts.seq_len)
        whole = trace_module(module, inputs, where=where)
        cutting = Cutting(plan=plan, whole=whole, micro_batch=size)
        local = trace_local(piece, inputs, cutting=cutting, where=where)
        segments[size] = segment_codes(local, device=place)
    return Program(segments=segments, buffers=program.buffers, local=True)


def check_program(program: Program, plan: Plan) -> None:
    """Raise ModelError unless every microbatch size has the plan's segments, tensors and parameters."""
    first = plan.training.micro_batch_sizes[0]
    for size in sorted(set(plan.training.micro_batch_sizes)):
        codes = program.segments.get(size, ())
        if len(codes) != len(plan.segments):
            raise _disagreement("segments", len(codes), f"must be {len(plan.segments)}, as in the plan")
        for number, (code, segment) in enumerate(zip(codes, plan.segments, strict=True)):
            _check_segment(
                code,
                segment,
                f"segment {number} ({segment.name})",
                same_size=size == first and not program.local,
            )


def _check_segment(code: SegmentCode, segment: Segment, what: str, *, same_size: bool) -> None:
    if set(code.parameters) != set(segment.parameters):
        raise _disagreement(
            f"parameters of {what}", ", ".join(code.parameters), f"must be {', '.join(segment.parameters)}"
        )
    if set(code.inputs) != set(segment.inputs):
        raise _disagreement(f"inputs of {what}", code.inputs, f"must be {segment.inputs}")
    found, planned = _shapes(code.outputs, same_size), _shapes(segment.outputs, same_size)
    if found != planned:
        raise _disagreement(f"outputs of {what}", found, f"must be {planned}")


def _shapes(specs: tuple[TensorSpec, ...], same_size: bool) -> list[object]:
    return [(spec.shape if same_size else len(spec.shape), spec.dtype) for spec in specs]


def _disagreement(field: str, value: object, rule: str) -> ModelError:
    return ModelError(
        where="runtime",
        field=field,
        value=value,
        rule=f"{rule}: the module is not the one that was planned",
        fix="compile the plan from the same module and versions as the run",
    )


def _meta_inputs(size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    tokens, labels = (torch.zeros(size, seq_len, dtype=torch.int64, device="meta") for _ in range(2))
    return tokens, labels
