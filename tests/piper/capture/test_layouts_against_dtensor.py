"""What capture says tensor parallelism cuts, against DTensor on a process group without processes."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cost_models.ops import OpKind, cut
from piper.capture import capture
from piper.models import build_module
from piper.models.find import from_config

TENSOR_DEGREE = 4
BATCH, SEQ, HIDDEN, LAYERS = 2, 8, 32, 2
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
LLAMA = SHAPE | {"architectures": ["LlamaForCausalLM"]}
MIXTRAL = SHAPE | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
}
CONFIGS = {
    "llama": LLAMA,
    "biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "mixtral": MIXTRAL,
}
STYLES = {0: ColwiseParallel, 1: RowwiseParallel}
"""How DTensor calls the cut of a linear layer's weight, by dimension."""

KINDS = {
    "mm": OpKind.MATMUL,
    "addmm": OpKind.MATMUL,
    "_grouped_mm": OpKind.GROUPED_MATMUL,
    "_scaled_dot_product_flash_attention_for_cpu": OpKind.ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu_backward": OpKind.ATTENTION,
}


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=TENSOR_DEGREE, store=FakeStore())
    yield init_device_mesh("cpu", (TENSOR_DEGREE,))
    dist.destroy_process_group()


class LocalKernels(TorchDispatchMode):
    """Counts products and attention on one rank's own tensors, as shapes of `Operation`."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in args if isinstance(value, Tensor)]
        kind = KINDS.get(func._opname)
        # DTensor also asks fake tensors of the whole shape what a result looks like.
        if kind is not None and not any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):
            self.seen[kind.value, shape_of(kind, tensors, backward="backward" in func._opname)] += 1
        return result


def shape_of(kind, tensors, *, backward):
    if kind is OpKind.ATTENTION:
        query, key = tensors[1:3] if backward else tensors[:2]
        batch, heads, seq, head_dim = query.shape
        return batch, heads, key.shape[1], seq, key.shape[2], head_dim
    if kind is OpKind.GROUPED_MATMUL:
        left, right, ends = tensors[:3]
        rows, k = left.shape if right.dim() == 3 else reversed(left.shape)
        return ends.numel(), rows, right.shape[-1], k
    left, right = tensors[-2:]
    return 1, left.shape[0], right.shape[1], left.shape[1]


def layouts(model):
    return {name: dim for segment in model.segments for name, dim in segment.tensor_layout}


def cut_by_dtensor(module, layout, mesh):
    """Cut every layer as its layout says: linear layers and the table by DTensor's own styles."""
    plan = {}
    for name, dim in layout.items():
        owner = name.rpartition(".")[0]
        child = module.get_submodule(owner)
        if isinstance(child, nn.Embedding):
            assert dim == 0
            plan[owner] = RowwiseParallel(input_layouts=Replicate())
        elif isinstance(child, nn.Linear) and name.endswith("weight"):
            plan[owner] = STYLES[dim]()
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(module, mesh, plan)
    for name, dim in layout.items():
        if "experts" in name:
            owner, _, attribute = name.rpartition(".")
            whole = module.get_parameter(name).detach()
            local = distribute_tensor(whole, mesh, [Shard(dim)]).to_local()
            setattr(module.get_submodule(owner), attribute, nn.Parameter(local))


def local_operations(model, *passes):
    """Products and attention of one rank, from what capture says is cut."""
    found = Counter()
    for segment in model.segments:
        for name in passes:
            for op in getattr(segment, name).operations:
                if op.kind in KINDS.values():
                    found[op.kind.value, cut(op, op.tensor_dim, TENSOR_DEGREE).shape] += op.count
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_one_rank_computes_what_dtensor_computes_on_it(name, mesh, tmp_path):
    source = from_config(CONFIGS[name], name="t", kind="config", where="t")
    model = capture(source, micro_batch=BATCH, seq_len=SEQ, dtype="fp32", cache_dir=tmp_path)
    module = build_module(source, dtype="fp32")
    cut_by_dtensor(module, layouts(model), mesh)
    data = torch.zeros((BATCH, SEQ), dtype=torch.int64)
    with LocalKernels() as forward, loss_parallel():
        loss = module(data, data)
    assert forward.seen == local_operations(model, "forward")
    with LocalKernels() as backward, loss_parallel():
        loss.backward()
    assert backward.seen == local_operations(model, "backward")


@pytest.mark.parametrize("name", CONFIGS)
def test_one_rank_holds_what_dtensor_gives_it(name, mesh, tmp_path):
    source = from_config(CONFIGS[name], name="t", kind="config", where="t")
    model = capture(source, micro_batch=BATCH, seq_len=SEQ, dtype="fp32", cache_dir=tmp_path)
    module, layout = build_module(source, dtype="fp32"), layouts(model)
    cut_by_dtensor(module, layout, mesh)
    assert {name for name, dim in layout.items() if dim == -1} <= {
        f"model.layers.{i}.{part}.bias"
        for i in range(LAYERS)
        for part in ("self_attn.o_proj", "mlp.down_proj")
    }
    for parameter in model.parameters:
        held = module.get_parameter(parameter.name)
        local = held.to_local() if isinstance(held, DTensor) else held
        expected = list(parameter.shape)
        dim = layout.get(parameter.name, -1)
        if dim >= 0:
            expected[dim] //= TENSOR_DEGREE
        assert list(local.shape) == expected, parameter.name
