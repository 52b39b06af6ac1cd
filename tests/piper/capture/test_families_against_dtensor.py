"""One rank's products, attention, parameters and collectives under tensor parallelism, for every family.

The oracle really runs one rank on a process group without processes: weights are what DTensor gives it, and
DTensor redistributes what enters and leaves the parts that are cut.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.ops import OpKind
from piper.capture import KernelChoice, capture
from piper.compiler.local import LocalModel
from piper.errors import StrategyError
from piper.graph import TensorSharding
from piper.models import MODELS, build_module
from piper.models.find import from_config
from piper.models.layer import Layer
from simulator.plan import TaskKind
from tests.graphs import after, placed
from tests.tiny_configs import TINY

CPU = KernelChoice(device="cpu")
WORLD, BATCH, SEQ = 64, 2, 16
KINDS = {
    "mm": OpKind.MATMUL,
    "addmm": OpKind.MATMUL,
    "bmm": OpKind.MATMUL,
    "_grouped_mm": OpKind.GROUPED_MATMUL,
    "_scaled_dot_product_flash_attention_for_cpu": OpKind.ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu_backward": OpKind.ATTENTION,
}
COLLECTIVES = {
    "all_reduce": "ALL_REDUCE",
    "all_gather_into_tensor": "ALL_GATHER",
    "reduce_scatter_tensor": "REDUCE_SCATTER",
}
UNLIKE = ("llama", "llama4", "qwen2_moe", "gemma3", "deepseek_v3", "gpt_oss", "gpt2", "bloom", "falcon")
"""Families whose layers are cut in ways of their own; the others are among the slow tests."""
GRID = [(degree, sequence_parallel) for degree in (2, 4, 8) for sequence_parallel in (False, True)]


@pytest.fixture(autouse=True)
def process_group():
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


class OneRank(TorchDispatchMode):
    """Counts products, attention and collectives of one rank, on its own tensors."""

    def __init__(self, degree):
        super().__init__()
        self.degree = degree
        self.computed, self.exchanged = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, Tensor)]
        if tensors and tensors[0].device.type == "cpu":
            if func.namespace == "_c10d_functional" and func._opname in COLLECTIVES:
                whole = tensors[0].nbytes * (self.degree if "gather" in func._opname else 1)
                self.exchanged[COLLECTIVES[func._opname]] += whole
            elif func._opname in KINDS:
                kind = KINDS[func._opname]
                self.computed[kind.value, shape_of(kind, tensors, backward="backward" in func._opname)] += 1
        return result


def shape_of(kind, tensors, *, backward):
    """Shape as `Operation` has it, but of attention without the heads of keys."""
    if kind is OpKind.ATTENTION:
        query, key = tensors[1:3] if backward else tensors[:2]
        batch, heads, seq, head_dim = query.shape
        return batch, heads, seq, key.shape[2], head_dim
    if kind is OpKind.GROUPED_MATMUL:
        left, right, ends = tensors[:3]
        rows, k = left.shape if right.dim() == 3 else reversed(left.shape)
        return ends.numel(), rows, right.shape[-1], k
    left, right = tensors[-2:]
    return (left.shape[0] if left.dim() == 3 else 1), left.shape[-2], right.shape[-1], left.shape[-1]


class Cut:
    """Cuts a module in place: its weights as capture says, its borders by DTensor."""

    def __init__(self, module, layout, mesh, *, sequence_parallel):
        self.mesh, self.degree = mesh, mesh.size()
        self.outside = Shard(1) if sequence_parallel else Replicate()
        for name, dim in layout.items():
            if dim >= 0:
                self.cut(module, name, dim)
        for name in [name for name, _ in module.named_buffers() if "slopes" in name]:
            module.model.register_buffer(name.rpartition(".")[2], self.local(module.get_buffer(name), 0))
        if sequence_parallel and hasattr(module.model, "embed_positions"):
            rows = module.model.embed_positions.weight[: SEQ // self.degree]
            module.model.embed_positions.weight = nn.Parameter(rows.detach().clone())
        module.model.embed_tokens.register_forward_hook(lambda *args: self.leave(args[2]))
        module.lm_head.register_forward_pre_hook(lambda _, args: (self.enter(args[0], {}),))
        for part in module.modules():
            if isinstance(part, Layer):
                self.around(part)

    def local(self, whole, dim):
        return distribute_tensor(whole.detach(), self.mesh, [Shard(dim)]).to_local()

    def cut(self, module, name, dim):
        whole = module.get_parameter(name)
        held = nn.Parameter(self.local(whole, dim))
        for part in module.modules():
            for attribute, parameter in [*part.named_parameters(recurse=False)]:
                if parameter is whole:
                    setattr(part, attribute, held)

    def around(self, layer):
        """Redistribute what enters and leaves the scopes of a layer; a parallel one has a single scope."""
        parallel = layer.shape.placement in {"parallel", "parallel_shared"}
        parts = [layer.self_attn, getattr(layer, "mlp", None)]
        parts.append(getattr(getattr(layer, "block_sparse_moe", None), "shared_expert", None))
        known = {}
        for number, part in enumerate(part for part in parts if part is not None):
            seen = known if parallel else {}
            part.register_forward_pre_hook(
                lambda _, args, seen=seen: (tuple(self.enter(x, seen) for x in args[0]), *args[1:])
            )
            if not (parallel and number):
                part.finish = self.leaving(part.finish)

    def leaving(self, finish):
        return lambda made: finish(tuple(self.leave(tensor) for tensor in made))

    def enter(self, x, seen):
        if id(x) not in seen:
            outside = DTensor.from_local(x, self.mesh, [self.outside], run_check=False)
            inside = outside.redistribute(placements=[Replicate()])
            seen[id(x)] = x, inside.to_local(grad_placements=[Partial()])
        return seen[id(x)][1]

    def leave(self, x):
        inside = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
        return inside.redistribute(placements=[self.outside]).to_local()


def planned(model, *, degree, sequence_parallel):
    """The captured model on one rank of tp, and the graph with its exchanges."""
    cut = tuple(i for i, segment in enumerate(model.segments) if "TP" in dict(segment.tags))
    fact = TensorSharding(segments=cut, sequence_parallel=sequence_parallel)
    axes = {"tp": degree, "dp": WORLD // degree}
    graph = placed(model, stages=[0] * len(model.segments), axes=axes, tensor_shardings=(fact,))
    graph = after(graph, "insert_exchanges")
    return LocalModel(graph=graph, model=model), graph


def expected_operations(local, kind):
    found = Counter()
    for number in range(len(local.model.segments)):
        for op in local.operations(number, kind):
            if op.kind in KINDS.values():
                attention = op.kind is OpKind.ATTENTION
                shape = (*op.shape[:2], *op.shape[3:]) if attention else op.shape
                found[op.kind.value, shape] += op.count
    return found


def expected_bytes(local, graph, phase):
    """Bytes by kind, without what is gathered once more for weight gradients or agreed on by the loss."""
    found = Counter()
    for node in graph.nodes:
        if node.is_exchange and node.phase is phase and (".in." in node.uid or ".out." in node.uid):
            found[node.kind.name] += local.exchanged_bytes(node)
    return found


def check(name, *, degree, sequence_parallel, tmp_path):
    config = TINY[name]
    if "v_head_dim" in config:  # as wide as keys, so that the CPU has a kernel too
        config = config | {"v_head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]}
    source = from_config(config, name=name, kind="config", where=name)
    sizes = {"micro_batch": BATCH, "seq_len": SEQ, "dtype": "fp32", "cache_dir": tmp_path}
    fused = capture(source, **sizes)
    if any(segment.tensor_refused for segment in fused.segments):
        with pytest.raises(StrategyError, match="normalises over features that are cut"):
            planned(fused, degree=degree, sequence_parallel=sequence_parallel)
        return
    model = capture(source, kernels=CPU, **sizes)
    local, graph = planned(model, degree=degree, sequence_parallel=sequence_parallel)
    layout = {n: dim for s in model.segments if "TP" in dict(s.tags) for n, dim in s.tensor_layout}
    mesh = init_device_mesh("cpu", (WORLD // degree, degree), mesh_dim_names=("dp", "tp"))["tp"]
    module = build_module(source, dtype="fp32", seq_len=SEQ)
    Cut(module, layout, mesh, sequence_parallel=sequence_parallel)
    for parameter in model.parameters:
        held = module.get_parameter(parameter.name).numel()
        if "embed_positions" not in parameter.name:
            assert held == local.parameter_numel(parameter.name), parameter.name
    tokens = torch.zeros((BATCH, SEQ), dtype=torch.int64)
    with OneRank(degree) as forward:
        loss = module(tokens, tokens)
    assert forward.computed == expected_operations(local, TaskKind.F)
    assert forward.exchanged == expected_bytes(local, graph, TaskKind.F)
    with OneRank(degree) as backward:
        loss.backward()
    assert backward.computed == expected_operations(local, TaskKind.B)
    assert backward.exchanged == expected_bytes(local, graph, TaskKind.B)


@pytest.mark.parametrize("name", UNLIKE)
def test_one_rank_of_a_family_does_and_exchanges_what_dtensor_says(name, tmp_path):
    check(name, degree=4, sequence_parallel=True, tmp_path=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("degree", "sequence_parallel"), GRID)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_holds_for_all_degrees_with_and_without_sequence_parallel(
    name, degree, sequence_parallel, tmp_path
):
    check(name, degree=degree, sequence_parallel=sequence_parallel, tmp_path=tmp_path)
