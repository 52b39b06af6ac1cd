"""Cut an exported graph into its segments: one function per run of nodes with one annotation stack.

[Note: cutting at annotations]
Export writes the open annotations into every node. A node that carries none (one that export itself
added) belongs to the run before it, and a `getitem` to the node it takes from. Parameters, buffers,
earlier segments' outputs and dropout keys become arguments, so a segment can run anywhere, any number of
times.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from piper.annotation import Stack, tags_of
from piper.errors import ModelError
from piper.runtime.dropout import keyed_dropout
from piper.runtime.dtypes import NAMES
from simulator.plan import TensorSpec

Value = tuple[int, int]
"""(segment, output); segment -1 is the model input of that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCode:
    """A segment as a function of (inputs, parameters, buffers, dropout keys), in that order.

    Args:
        run: returns a tuple, one tensor per output.
        tags: tags of its annotation stack.
        inputs: where its inputs come from, in argument order.
        parameters, buffers: names, in argument order.
        outputs: shapes and dtypes.
        keyed: whether the last argument is `DropoutKeys`.
    """

    run: Callable[..., tuple[torch.Tensor, ...]]
    tags: tuple[tuple[str, int], ...]
    inputs: tuple[Value, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    keyed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """What the placeholders of an exported graph stand for, by node name.

    Args:
        inputs: model inputs -> their number.
        parameters: -> canonical fully qualified name.
        buffers: -> name.
    """

    inputs: Mapping[str, int]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]


def cut_graph(graph: fx.Graph, placeholders: Placeholders, *, device: torch.device) -> list[SegmentCode]:
    """Return the segments of an exported forward in order, to run on `device`.

    Raises: ModelError when an operation is not annotated or cannot be run segment by segment.
    """
    runs = _runs([node for node in graph.nodes if node.op == "call_function"])
    segment_of = {node: number for number, (_, nodes) in enumerate(runs) for node in nodes}
    results = _results(graph)
    outputs = [
        [n for n in nodes if n in results or any(segment_of.get(u, number) != number for u in n.users)]
        for number, (_, nodes) in enumerate(runs)
    ]
    values = {node: (number, i) for number, listed in enumerate(outputs) for i, node in enumerate(listed)}
    values |= {n: (-1, placeholders.inputs[n.name]) for n in graph.nodes if n.name in placeholders.inputs}
    codes = []
    dropouts = 0
    for number, (stack, nodes) in enumerate(runs):
        builder = _Builder(placeholders=placeholders, values=values, device=device, dropouts=dropouts)
        codes.append(builder.build(nodes, outputs[number], tags=tags_of(stack)))
        dropouts = builder.dropouts
    return codes


def _runs(nodes: Sequence[fx.Node]) -> list[tuple[Stack, list[fx.Node]]]:
    runs: list[tuple[Stack, list[fx.Node]]] = []
    home: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node.target is operator.getitem:
            run = home[node.args[0]]  # type: ignore[index]
        else:
            stack = node.meta.get("custom", {}).get("piper", runs[-1][0] if runs else ())
            if not stack:
                raise ModelError(
                    where="capture",
                    field="operation",
                    value=str(node.target),
                    rule="is outside of every annotation",
                    fix='put all of forward inside `with piper.annotate("PP")` scopes',
                )
            if not runs or runs[-1][0] != stack:
                runs.append((stack, []))
            run = runs[-1][1]
        run.append(node)
        home[node] = run
    return runs


def _results(graph: fx.Graph) -> set[fx.Node]:
    output = next(node for node in graph.nodes if node.op == "output")
    found: set[fx.Node] = set()
    fx.map_arg(output.args, found.add)
    return found


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Copies the nodes of one segment into a graph of its own; arguments appear in order of first use."""

    placeholders: Placeholders
    values: Mapping[fx.Node, Value]
    device: torch.device
    dropouts: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: list[fx.Node] = field(default_factory=list)
    parameters: list[fx.Node] = field(default_factory=list)
    buffers: list[fx.Node] = field(default_factory=list)
    keys: fx.Node | None = None

    def build(
        self, nodes: list[fx.Node], outputs: list[fx.Node], *, tags: tuple[tuple[str, int], ...]
    ) -> SegmentCode:
        """Return the segment's code."""
        inside = set(nodes)
        self._open_arguments(nodes, inside)
        self._clone_overwritten(nodes, inside)
        for node in nodes:
            self._copy(node)
        self.graph.output(tuple(self.env[node] for node in outputs))
        self.graph.lint()
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        return SegmentCode(
            run=module.forward,
            tags=tags,
            inputs=tuple(self.values[node] for node in self.inputs),
            parameters=tuple(self.placeholders.parameters[node.name] for node in self.parameters),
            buffers=tuple(self.placeholders.buffers[node.name] for node in self.buffers),
            outputs=tuple(_spec(node) for node in outputs),
            keyed=self.keys is not None,
        )

    def _open_arguments(self, nodes: list[fx.Node], inside: set[fx.Node]) -> None:
        sources = dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in inside)
        self.inputs = [s for s in sources if s in self.values]
        self.parameters = self._first_by_name(sources, self.placeholders.parameters)
        self.buffers = self._first_by_name(sources, self.placeholders.buffers)
        for source in (*self.inputs, *self.parameters, *self.buffers):
            self.env[source] = self.graph.placeholder(source.name)
        for names in (self.placeholders.parameters, self.placeholders.buffers):
            homes = {names[s.name]: self.env[s] for s in sources if s.name in names and s in self.env}
            self.env |= {s: homes[names[s.name]] for s in sources if s.name in names}
        if any(_is_dropout(node) for node in nodes):
            self.keys = self.graph.placeholder("dropout_keys")

    def _first_by_name(self, sources: Mapping[fx.Node, None], names: Mapping[str, str]) -> list[fx.Node]:
        """Return one placeholder per name: aliases of a tied parameter are one argument."""
        found: dict[str, fx.Node] = {}
        for source in sources:
            if source.name in names:
                found.setdefault(names[source.name], source)
        return list(found.values())

    def _clone_overwritten(self, nodes: list[fx.Node], inside: set[fx.Node]) -> None:
        """Give in-place operations a copy of the segment's inputs: others may still read them."""
        for node in nodes:
            if not _is_in_place(node):
                continue
            base = _written_tensor(node, inside)
            if base in self.inputs and self.env[base].op == "placeholder":
                clone = torch.ops.aten.clone.default
                self.env[base] = self.graph.call_function(clone, (self.env[base],))
            elif base not in inside and base not in self.inputs:
                raise ModelError(
                    where="capture",
                    field="operation",
                    value=f"{node.target} on {base.name}",
                    rule="changes a parameter or buffer in the forward pass",
                    fix="compute a new tensor instead; take layers without running statistics (RMSNorm)",
                )

    def _copy(self, node: fx.Node) -> None:
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            return
        if _is_dropout(node):
            arguments = (self.env[node.args[0]], node.args[1])  # type: ignore[index]
            call: dict[str, Any] = {"keys": self.keys, "operation": self.dropouts}
            self.env[node] = self.graph.call_function(keyed_dropout, arguments, call)
            self.dropouts += 1
            return
        _refuse_higher_order(node)
        _refuse_random(node)
        copy = self.graph.node_copy(node, lambda source: self.env[source])
        copy.args = fx.node.map_aggregate(copy.args, self._on_device)
        copy.kwargs = fx.node.map_aggregate(copy.kwargs, self._on_device)
        self.env[node] = copy

    def _on_device(self, argument: Any) -> Any:
        return self.device if isinstance(argument, torch.device) else argument


def _is_dropout(node: fx.Node) -> bool:
    ops = torch.ops.aten
    known = node.target in {ops.dropout.default, ops.dropout_.default}
    return known and bool(node.args[2]) and bool(node.args[1])


def _refuse_higher_order(node: fx.Node) -> None:
    """Raise for operations that contain graphs of their own, such as what `torch.no_grad` becomes."""
    if any(source.op == "get_attr" for source in node.all_input_nodes):
        raise ModelError(
            where="runtime",
            field="operation",
            value=str(node.target),
            rule="contains a graph of its own, which cannot be cut",
            fix="inside forward use detach() instead of torch.no_grad(), and no control flow operators",
        )


def _refuse_random(node: fx.Node) -> None:
    """Raise for random operations that we cannot key by sample."""
    target = node.target
    ops = torch.ops.aten
    known = {ops.dropout.default, ops.dropout_.default, ops.scaled_dot_product_attention.default}
    tags = getattr(target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags and target not in known
    if target is ops.scaled_dot_product_attention.default:
        given = dict(enumerate(node.args))
        random = bool(given.get(4, node.kwargs.get("dropout_p", 0.0)))
    if random:
        raise ModelError(
            where="runtime",
            field="operation",
            value=str(target),
            rule="draws random numbers in a way that cannot be repeated per sample",
            fix="use torch.nn.Dropout (attention: dropout_p=0)",
        )


def _is_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _written_tensor(node: fx.Node, inside: set[fx.Node]) -> fx.Node:
    """Follow views back to the tensor whose memory an in-place operation changes."""
    base = cast("fx.Node", node.args[0])
    while base in inside and _returns_alias(base):
        base = cast("fx.Node", base.args[0])
    return base


def _returns_alias(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _spec(node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    return TensorSpec(shape=tuple(value.shape), dtype=NAMES[value.dtype], requires_grad=value.requires_grad)
