"""Models of the transformers library as they are: tagged from outside, captured, planned, run in segments."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import of_transformers
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cost_models.ops import OpKind
from piper.capture import CapturedModel, capture
from piper.capture.calling import loss_of
from piper.cli import main
from piper.models.find import from_config
from piper.predict import Job, predict
from piper.runtime.dropout import DropoutKeys, KeyedDropout
from piper.runtime.here import Here
from piper.runtime.program import build_program, check_program
from piper.runtime.sources import build
from piper.strategy import load_strategy
from simulator.plan.check import check_plan

BATCH, SEQ = 2, 16
DENSE, SPARSE = ["llama", "gpt2"], ["mixtral", "qwen3_moe"]


def captured(name: str, **changes: Any) -> CapturedModel:
    model = getattr(of_transformers, name)(**changes)
    return capture(model, micro_batch=BATCH, seq_len=SEQ, dtype="fp32")


def predicted(name: str, strategy: str, *, gpus: int) -> Any:
    """Simulate a model through its factory, as the command line does."""
    job = Job(
        model=f"of_transformers:{name}", strategy=load_strategy(strategy), gpus=gpus, seq_len=SEQ,
        global_batch=8, dtype="fp32",
    )  # fmt: skip
    return predict(job)


def batch() -> tuple[Tensor, Tensor]:
    rows = torch.randint(of_transformers.VOCABULARY, (BATCH, SEQ + 1), generator=torch.Generator())
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_embedding_layers_and_head_become_units_and_what_lies_between_joins_them(name: str) -> None:
    model = captured(name)
    tags = [dict(segment.tags) for segment in model.segments]
    assert [found["PP"] for found in tags] == sorted(found["PP"] for found in tags)
    assert {found["PP"] for found in tags} == set(range(of_transformers.LAYERS + 2))
    assert [found.get("LAYER") for found in tags if found["PP"] == 3] == [2] * 5
    final_norm = model.segments[-2]
    assert dict(final_norm.tags) == {"PP": of_transformers.LAYERS, "LAYER": of_transformers.LAYERS - 1}
    assert any("norm" in name or "ln_f" in name for name in final_norm.parameters)
    assert {"PP", "TP"} == set(dict(model.segments[-1].tags))
    assert OpKind.CROSS_ENTROPY in {op.kind for op in model.segments[-1].forward.operations}
    assert model.facts.layers == of_transformers.LAYERS


def test_rotary_tables_are_made_once_by_the_first_unit_and_are_an_input_of_every_layer() -> None:
    model = captured("llama")
    tables = model.segments[0].outputs[1:]
    assert [(spec.shape, spec.batch_dim, spec.requires_grad) for spec in tables] == [
        ((1, SEQ, 8), None, False)
    ] * 2
    attention = [s for s in model.segments if "self_attn" in s.name]
    assert all({(0, 1), (0, 2)} <= set(segment.inputs) for segment in attention)


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_piper_s_own_module_of_the_same_config_does_the_same_matmuls_and_attention(name: str) -> None:
    """Shapes, cut dimensions and token dimensions; weights may be stored transposed, experts' joined."""
    module = getattr(of_transformers, name)()
    config = module.config.to_dict() | {"architectures": [type(module).__name__]}
    source = from_config(config, name=name, kind="config", where=name)
    theirs = captured(name)
    ours = capture(source, micro_batch=BATCH, seq_len=SEQ, dtype="fp32")
    if name in DENSE:
        assert _kernels(theirs, "forward") == _kernels(ours, "forward")
    if name == "llama":
        assert _kernels(theirs, "backward") == _kernels(ours, "backward")
    assert _flops(theirs) == _flops(ours)
    for count in ("n_parameters", "n_active_parameters", "layers", "heads", "head_dim", "vocabulary"):
        assert getattr(theirs.facts, count) == getattr(ours.facts, count)


def _kernels(model: CapturedModel, name: str) -> Counter[tuple[object, ...]]:
    found: Counter[tuple[object, ...]] = Counter()
    for segment in model.segments:
        for op in getattr(segment, name).operations:
            if op.kind in {OpKind.MATMUL, OpKind.ATTENTION}:
                found[op.kind, op.shape, op.tensor_dim, op.token_dim, op.direction, op.causal] += op.count
    return found


@pytest.mark.parametrize("name", DENSE)
def test_captured_flops_are_those_of_torchs_counter_on_a_real_run(name: str) -> None:
    model, module = captured(name), getattr(of_transformers, name)()
    assert _flops(model) == _counted(module)  # the counter does not know the CPU's attention


@pytest.mark.parametrize("name", SPARSE)
def test_captured_flops_of_grouped_experts_are_those_of_a_real_loop_over_experts(name: str) -> None:
    """Whatever the routing: each token goes to as many experts."""
    loop = getattr(of_transformers, name)(experts_implementation="eager")
    assert _flops(captured(name, experts_implementation="grouped_mm")) == _counted(loop)


def _flops(model: CapturedModel) -> tuple[int, int]:
    def total(name: str) -> int:
        return sum(
            op.flops * op.count
            for segment in model.segments
            for op in getattr(segment, name).operations
            if op.kind in {OpKind.MATMUL, OpKind.GROUPED_MATMUL}
        )

    return total("forward"), total("backward")


def _counted(module: nn.Module) -> tuple[int, int]:
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(module, *batch())
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_tensor_parallelism_cuts_projections_by_columns_then_rows(name: str) -> None:
    """Attention gets fewer heads; the weights of GPT-2 are stored as [in, out], so its dimensions swap."""
    column, row = (1, 0) if name == "gpt2" else (0, 1)
    model = captured(name)
    layout = {
        parameter.partition("self_attn.")[2] or parameter.partition("attn.")[2]: dim
        for segment in model.segments
        for parameter, dim in segment.tensor_layout
        if "attn." in parameter and parameter.endswith("weight") and "norm" not in parameter
    }
    columns = ["c_attn"] if name == "gpt2" else ["q_proj", "k_proj", "v_proj"]
    rows = ["c_proj"] if name == "gpt2" else ["o_proj"]
    assert layout == {f"{n}.weight": column for n in columns} | {f"{n}.weight": row for n in rows}
    assert not any(segment.tensor_refused for segment in model.segments)
    attention = [op for s in model.segments for op in s.forward.operations if op.kind is OpKind.ATTENTION]
    assert {op.tensor_dim for op in attention} == {1}


@pytest.mark.parametrize("name", SPARSE)
def test_experts_are_cut_over_their_hidden_features(name: str) -> None:
    layout = {
        parameter.rpartition(".")[2]: dim
        for segment in captured(name).segments
        for parameter, dim in segment.tensor_layout
        if "experts" in parameter
    }
    assert layout == {"gate_up_proj": 1, "down_proj": 2}


@pytest.mark.parametrize("name", SPARSE)
def test_a_loop_over_experts_gets_the_shapes_of_balanced_routing(name: str) -> None:
    grouped, loop = captured(name), captured(name, experts_implementation="eager")
    assert _flops(loop) == _flops(grouped)
    assert any("every expert chosen alike" in notice for notice in loop.notices)
    assert not grouped.notices
    experts = next(segment for segment in loop.segments if "experts" in segment.name)
    rows = {op.shape[1] for op in experts.forward.operations if op.kind is OpKind.MATMUL}
    assert rows == {BATCH * SEQ * 2 // of_transformers.EXPERTS}
    assert {dim for _, dim in experts.tensor_layout} == {1, 2}


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
@pytest.mark.parametrize(
    ("strategy", "gpus"),
    [
        ("pp=2,dp=2", 4),
        ("pp=2,dp=2,tp=2", 8),
        ("pp=2,dp=2,vp=2,zero=1,recompute=full,schedule=interleaved_1f1b", 4),
    ],
)
def test_they_are_planned_checked_and_simulated(name: str, strategy: str, gpus: int) -> None:
    found = predicted(name, strategy, gpus=gpus)
    assert not check_plan(found.compiled.plan)
    assert found.result["n_gpus"] == gpus
    assert found.result["n_parameters"] == sum(
        p.numel() for p in getattr(of_transformers, name)().parameters()
    )
    assert sum(found.result["breakdown_s"].values()) == pytest.approx(found.result["step_time_s"])


@pytest.mark.parametrize("name", SPARSE)
def test_expert_parallelism_exchanges_tokens_around_the_experts(name: str) -> None:
    found = predicted(name, "pp=2,dp=2,ep=2", gpus=4)
    assert not check_plan(found.compiled.plan)
    assert found.result["breakdown_s"]["exposed_ep"] > 0


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_segments_give_the_modules_loss_and_gradients_bit_by_bit(name: str) -> None:
    factory = getattr(of_transformers, name)
    program = build_program(factory, seq_len=SEQ, micro_batch_sizes=(BATCH,), dtype="fp32")
    module = build(factory, dtype="fp32", device="cpu", seq_len=SEQ)
    inputs, keys = batch(), DropoutKeys(seed=0, step=0, samples=range(BATCH))
    with KeyedDropout(keys):
        expected = loss_of(module, *inputs)
    own = dict(module.named_parameters())
    tensors = {(-1, i): tensor for i, tensor in enumerate(inputs)}
    last = len(program.segments[BATCH]) - 1
    for number, code in enumerate(program.segments[BATCH]):
        arguments: list[Any] = [tensors[value] for value in code.inputs]
        arguments += [own[name] for name in code.parameters]
        arguments += [program.buffers[name] for name in code.buffers]
        arguments += [Here(keys=keys)] if code.keyed else []
        tensors |= {(number, i): made for i, made in enumerate(code.run(*arguments))}
    assert torch.equal(tensors[last, 0], expected)
    ours = torch.autograd.grad(tensors[last, 0], [*own.values()])
    theirs = torch.autograd.grad(expected, [*own.values()])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    check_program(program, predicted(name, "pp=2,dp=2,micro_batch=2", gpus=4).compiled.plan)


def test_the_loss_is_the_sum_over_tokens_of_what_the_model_reports_as_mean() -> None:
    module, (tokens, labels) = of_transformers.llama(), batch()
    mean = module(input_ids=tokens, labels=tokens, shift_labels=labels).loss
    torch.testing.assert_close(loss_of(module, tokens, labels), mean * labels.numel())


def test_the_command_line_takes_such_a_module_from_its_factory(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--gpus", "4", "--seq-len", str(SEQ), "--global-batch", "8", "--strategy", "pp=2,dp=2,zero=1"]
    assert main(["simulate", "of_transformers:gpt2", *sizes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "of_transformers:gpt2"
    assert found["n_gpus"] == 4
