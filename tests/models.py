"""Small captured models made by hand, so that compiler tests need no torch."""

from __future__ import annotations

from dataclasses import replace

from cost_models.ops import Operation, OpKind
from piper.graph import CapturedModel, CapturedSegment, PassCost
from simulator.plan import ModelFacts, Parameter, TensorSpec

SEQ, HIDDEN, VOCABULARY = 4, 8, 32


def matmul(name: str, rows: int, *, direction: str = "fwd") -> Operation:
    return Operation(
        kind=OpKind.MATMUL,
        name=name,
        shape=(1, rows, HIDDEN, HIDDEN),
        dtype="bf16",
        flops=2 * rows * HIDDEN * HIDDEN,
        bytes=2 * (2 * rows * HIDDEN + HIDDEN * HIDDEN),
        direction=direction,
    )


def captured(
    *, layers: int = 4, micro_batch: int = 1, tied: bool = False, dtype: str = "bf16"
) -> CapturedModel:
    """An embedding, equal layers of one [HIDDEN, HIDDEN] weight and bias, and a head with the loss."""
    rows = micro_batch * SEQ
    hidden = TensorSpec(shape=(micro_batch, SEQ, HIDDEN), dtype=dtype)
    forward = PassCost(operations=(matmul("f", rows),), workspace_bytes=100)
    backward = PassCost(
        operations=(matmul("dx", rows, direction="dgrad"), matmul("dw", rows, direction="wgrad")),
        workspace_bytes=300,
    )
    inputs = PassCost(operations=backward.operations[:1], workspace_bytes=200)
    weights = PassCost(operations=backward.operations[1:], workspace_bytes=150)
    head_weight = "embed.weight" if tied else "head.weight"

    def segment(name: str, unit: int, **changes: object) -> CapturedSegment:
        base = CapturedSegment(
            name=name,
            tags=(("PP", unit),),
            parameters=(),
            inputs=((unit - 1, 0),),
            outputs=(hidden,),
            forward=forward,
            forward_no_grad=replace(forward, workspace_bytes=50),
            backward=backward,
            saved_bytes=1000 * micro_batch,
            inputs_saved=(True,),
            outputs_saved=(False,),
            backward_inputs=inputs,
            backward_weights=weights,
            saved_for_weights_bytes=400 * micro_batch,
            gradients_for_weights_bytes=300 * micro_batch,
            inputs_saved_for_weights=(True,),
            outputs_saved_for_weights=(False,),
            output_gradients_for_weights=(False,),
        )
        return replace(base, **changes)

    embed = segment(
        "embed",
        0,
        parameters=("embed.weight",),
        inputs=((-1, 0),),
        saved_bytes=0,
        inputs_saved=(True,),
        saved_for_weights_bytes=0,
    )
    middle = [
        segment(
            f"layers.{i}",
            i + 1,
            tags=(("LAYER", i), ("PP", i + 1)),
            parameters=(f"layers.{i}.weight", f"layers.{i}.bias"),
        )
        for i in range(layers)
    ]
    head = segment(
        "head",
        layers + 1,
        parameters=(head_weight,),
        inputs=((layers, 0), (-1, 1)),
        outputs=(TensorSpec(shape=(), dtype="fp32", batch_dim=None),),
        inputs_saved=(True, True),
        inputs_saved_for_weights=(True, False),
        saved_bytes=5000 * micro_batch,
    )
    parameters = [Parameter(name="embed.weight", shape=(VOCABULARY, HIDDEN))]
    for i in range(layers):
        parameters.append(Parameter(name=f"layers.{i}.weight", shape=(HIDDEN, HIDDEN)))
        parameters.append(Parameter(name=f"layers.{i}.bias", shape=(HIDDEN,)))
    if not tied:
        parameters.append(Parameter(name="head.weight", shape=(VOCABULARY, HIDDEN)))
    count = sum(p.numel for p in parameters)
    return CapturedModel(
        facts=ModelFacts(
            name="toy", n_parameters=count, n_active_parameters=count, layers=layers, hidden=HIDDEN, heads=2,
            head_dim=4, vocabulary=VOCABULARY,
        ),
        parameters=tuple(parameters),
        segments=(embed, *middle, head),
        buffer_bytes=0,
        micro_batch=micro_batch,
        seq_len=SEQ,
        dtype=dtype,
    )  # fmt: skip
