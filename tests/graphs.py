"""A hand-made transformer with annotated regions, and graphs of it after chosen directives and passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_models.ops import Operation, OpKind
from piper.graph import CapturedModel, CapturedSegment, Graph, PassCost, build_graph, verify
from piper.passes import PASSES
from simulator.plan import Mesh, ModelFacts, Parameter, TaskKind, TaskName, TensorSpec

SEQ, HIDDEN, FFN, HEADS, HEAD_DIM, EXPERTS, VOCABULARY = 8, 16, 64, 4, 4, 4, 32
LAYER = ("norm", "q", "core", "out", "add", "mlp", "end")
"""Segments of a layer: norm, qkv projection, attention, output projection, residual + norm, MLP, residual."""


def transformer(*, layers: int = 2, micro_batch: int = 1, experts: bool = False) -> CapturedModel:
    """An embedding, layers of seven segments with TP, CP and EP regions, and a head with the loss."""
    rows = micro_batch * SEQ
    hidden = TensorSpec(shape=(micro_batch, SEQ, HIDDEN), dtype="bf16")
    loss = TensorSpec(shape=(), dtype="fp32", batch_dim=None)
    segments: list[CapturedSegment] = [
        _segment("embed", {"PP": 0}, inputs=((-1, 0),), outputs=(hidden,), parameters=("embed.weight",))
    ]
    for layer in range(layers):
        before = len(segments) - 1
        tags = {"LAYER": layer, "PP": layer + 1}
        at = {name: before + 1 + i for i, name in enumerate(LAYER)}
        mlp = {"EP": layer} if experts else {"TP": 2 * layer + 1}
        for name, inputs, more, ops in (
            ("norm", (before,), {}, (_norm(rows),)),
            ("q", (at["norm"],), {"TP": 2 * layer}, (_matmul(rows, HIDDEN, HIDDEN, tensor_dim=2),)),
            ("core", (at["q"],), {"TP": 2 * layer, "CP": layer}, (_attention(micro_batch),)),
            ("out", (at["core"],), {"TP": 2 * layer}, (_matmul(rows, HIDDEN, HIDDEN, tensor_dim=3),)),
            ("add", (before, at["out"]), {}, (_norm(rows),)),
            ("mlp", (at["add"],), mlp, _experts(rows) if experts else _mlp(rows)),
            ("end", (at["add"], at["mlp"]), {}, (_norm(rows),)),
        ):
            owned = f"layers.{layer}.{name}.weight"
            segments.append(
                _segment(
                    f"layers.{layer}.{name}",
                    tags | more,
                    inputs=tuple((i, 0) for i in inputs),
                    outputs=(hidden,),
                    parameters=() if name in {"core", "end"} else (owned,),
                    operations=ops,
                    layout=() if not {"TP", "EP"} & more.keys() else ((owned, 1 if name == "out" else 0),),
                )
            )
    segments.append(
        _segment(
            "head",
            {"PP": layers + 1},
            inputs=((len(segments) - 1, 0), (-1, 1)),
            outputs=(loss,),
            parameters=("head.weight",),
            operations=(_matmul(rows, HIDDEN, VOCABULARY),),
        )
    )
    sizes = {"norm": HIDDEN, "add": HIDDEN, "q": HIDDEN**2, "out": HIDDEN**2, "mlp": HIDDEN * FFN}
    parameters = [Parameter(name="embed.weight", shape=(VOCABULARY, HIDDEN))]
    for segment in segments[1:-1]:
        for name in segment.parameters:
            kind = name.split(".")[2]
            count = sizes[kind] * (EXPERTS if experts and kind == "mlp" else 1)
            parameters.append(Parameter(name=name, shape=(count,)))
    parameters.append(Parameter(name="head.weight", shape=(VOCABULARY, HIDDEN)))
    count = sum(p.numel for p in parameters)
    return CapturedModel(
        facts=ModelFacts(
            name="small", n_parameters=count, n_active_parameters=count, layers=layers, hidden=HIDDEN,
            heads=HEADS, head_dim=HEAD_DIM, vocabulary=VOCABULARY,
        ),
        parameters=tuple(parameters), segments=tuple(segments), buffer_bytes=0, micro_batch=micro_batch,
        seq_len=SEQ, dtype="bf16",
    )  # fmt: skip


def placed(
    model: CapturedModel,
    *,
    stages: Sequence[int],
    axes: dict[str, int],
    microbatches: int = 2,
    **facts: object,
) -> Graph:
    """Return the graph of a model whose segments have the given stages, one stage per pipeline rank.

    `facts`: fields of the graph, as directives would state them.
    """
    graph = build_graph(
        [model], stages, replica_batch=microbatches * model.micro_batch, dtype="bf16", optimizer="adamw",
        clip_grad_norm=None,
    )  # fmt: skip
    sizes = {name: axes.get(name, 1) for name in ("tp", "cp", "dp", "pp")}
    graph = replace(
        graph,
        mesh=Mesh(axes=tuple(sizes.items())),
        micro_batch_sizes=(model.micro_batch,) * microbatches,
        nodes=tuple(replace(node, pipeline_rank=node.stage) for node in graph.nodes),
    )
    full = [f for f in facts.get("recomputations", ()) if f.mode == "full"]  # type: ignore[attr-defined]
    claimed = {i for fact in full for i in fact.segments}
    nodes = tuple(replace(n, recomputed=n.first_segment in claimed) for n in graph.nodes)
    return replace(graph, nodes=nodes, **facts)  # type: ignore[arg-type]


def after(graph: Graph, last: str) -> Graph:
    """Return the graph after the passes up to `last`, verified after each."""
    for name, rewrite in PASSES.items():
        graph = rewrite().apply(graph)
        verify(graph, after=name)
        if name == last:
            return graph
    raise KeyError(last)


def fused(stages: int, microbatches: int) -> tuple[tuple[tuple[TaskName, ...], ...], ...]:
    """Return rows with all F, then all B, one stage per rank."""
    return tuple(
        tuple(
            (TaskName(kind=kind, stage=stage, microbatch=m),)
            for kind in (TaskKind.F, TaskKind.B)
            for m in range(microbatches)
        )
        for stage in range(stages)
    )


def lines_of(graph: Graph, text: str) -> str:
    """Return the edges that touch nodes whose uid contains a text, one per line."""
    chosen = [e for e in graph.edges if text in e.source or text in e.target]
    return "\n".join(f"{e.source} -> {e.target}" for e in chosen)


def _segment(
    name: str,
    tags: dict[str, int],
    *,
    inputs: tuple[tuple[int, int], ...],
    outputs: tuple[TensorSpec, ...],
    parameters: tuple[str, ...] = (),
    operations: tuple[Operation, ...] = (),
    layout: tuple[tuple[str, int], ...] = (),
) -> CapturedSegment:
    cost = PassCost(operations=operations, workspace_bytes=96)
    return CapturedSegment(
        name=name, tags=tuple(sorted(tags.items())), parameters=parameters, inputs=inputs, outputs=outputs,
        forward=cost, forward_no_grad=cost, backward=cost, backward_inputs=cost, backward_weights=cost,
        saved_bytes=960, saved_for_weights_bytes=480, gradients_for_weights_bytes=240,
        inputs_saved=(True,) * len(inputs), outputs_saved=(False,) * len(outputs),
        inputs_saved_for_weights=(True,) * len(inputs), outputs_saved_for_weights=(False,) * len(outputs),
        output_gradients_for_weights=(False,) * len(outputs), tensor_layout=layout,
    )  # fmt: skip


def _norm(rows: int) -> Operation:
    return Operation(
        kind=OpKind.NORM, name="norm", shape=(rows, HIDDEN), dtype="bf16", flops=5 * rows * HIDDEN,
        bytes=4 * rows * HIDDEN, token_dim=0,
    )  # fmt: skip


def _matmul(rows: int, k: int, n: int, *, tensor_dim: int = -1) -> Operation:
    return Operation(
        kind=OpKind.MATMUL, name="mm", shape=(1, rows, n, k), dtype="bf16", flops=2 * rows * n * k,
        bytes=2 * (rows * k + k * n + rows * n), tensor_dim=tensor_dim, token_dim=1,
    )  # fmt: skip


def _mlp(rows: int) -> tuple[Operation, ...]:
    return _matmul(rows, HIDDEN, FFN, tensor_dim=2), _matmul(rows, FFN, HIDDEN, tensor_dim=3)


def _experts(rows: int) -> tuple[Operation, ...]:
    return (
        Operation(
            kind=OpKind.GROUPED_MATMUL, name="grouped", shape=(EXPERTS, rows, FFN, HIDDEN), dtype="bf16",
            flops=2 * rows * FFN * HIDDEN, bytes=2 * (rows * HIDDEN + EXPERTS * HIDDEN * FFN + rows * FFN),
            tensor_dim=2, token_dim=1,
        ),
    )  # fmt: skip


def _attention(batch: int) -> Operation:
    return Operation(
        kind=OpKind.ATTENTION, name="sdpa", shape=(batch, HEADS, HEADS, SEQ, SEQ, HEAD_DIM), dtype="bf16",
        flops=2 * batch * HEADS * SEQ * SEQ * HEAD_DIM,
        bytes=2 * 2 * HEAD_DIM * batch * HEADS * 2 * SEQ + 4 * batch * HEADS * SEQ, causal=True, tensor_dim=1,
        token_dim=3,
    )  # fmt: skip
