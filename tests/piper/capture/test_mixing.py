"""Windows, linear biases, capped scores and sinks are one kernel each way on CUDA, and steps elsewhere."""

from dataclasses import replace

import pytest
import torch

from cost_models.ops import OpKind
from piper.capture import KernelChoice, capture
from piper.models.decoder import CausalLM
from tests.piper.models.transformers_cases.case import GQA, decoder, llama_layer
from tests.piper.models.transformers_cases.table import CASES

SEQ, BATCH, HEADS, HEAD_DIM, LAYERS = 16, 2, 4, 8, 2


def captured(shape, **options):
    with torch.device("meta"):
        module = CausalLM(shape, seq_len=SEQ)
    return capture(module, micro_batch=BATCH, seq_len=SEQ, dtype="bf16", **options)


def attention(model, name):
    return [
        op
        for segment in model.segments
        for op in getattr(segment, name).operations
        if op.kind is OpKind.ATTENTION
    ]


@pytest.mark.parametrize("window", [1, 5, 16, 40])
def test_a_window_costs_the_scores_inside_it(window):
    model = captured(decoder(llama_layer(attention=replace(GQA, window=window))))
    inside = min(window, SEQ)
    twice_the_scores = 2 * SEQ * inside - inside**2
    for name, matmuls in (("forward", 2), ("backward", 5)):
        flops = sum(op.flops * op.count for op in attention(model, name))
        assert flops == LAYERS * BATCH * HEADS * HEAD_DIM * matmuls * twice_the_scores


@pytest.mark.parametrize("name", ["mistral_window", "gemma2", "gpt_oss", "mpt"])
def test_no_scores_are_kept(name):
    model = captured(CASES[name].shape)
    for segment in model.segments:
        if "CP" in dict(segment.tags):
            (op,) = segment.forward.operations
            assert (op.kind, op.causal, op.tensor_dim) == (OpKind.ATTENTION, True, 1)
            assert segment.saved_bytes < BATCH * HEADS * SEQ * SEQ * 2


def test_sinks_are_cut_with_the_heads():
    layouts = [dict(segment.tensor_layout) for segment in captured(CASES["gpt_oss"].shape).segments]
    cut = {name: dim for layout in layouts for name, dim in layout.items() if name.endswith("sinks")}
    assert cut == {f"model.layers.{layer}.self_attn.sinks": 0 for layer in range(LAYERS)}


def test_the_unfused_path_makes_the_scores_step_by_step():
    model = captured(CASES["gpt_oss"].shape, kernels=KernelChoice(attention="math"))
    assert not attention(model, "forward")
    kept = [segment.saved_bytes for segment in model.segments if "CP" in dict(segment.tags)]
    assert min(kept) > BATCH * HEADS * SEQ * SEQ * 2
