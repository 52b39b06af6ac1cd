"""FLOPs, bytes, saved tensors and workspace, against torch's own counter, formulas and real runs."""

import modules
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cost_models.ops import DTYPE_BYTES, OpKind
from piper import annotate
from piper.capture import capture
from piper.errors import ModelError
from piper.models import build_module, find_model
from piper.models.find import from_config

TINY = find_model("tiny-llama")


def flops(model, name, *kinds, whole_scores=False):
    return sum(
        op.flops * op.count * (2 if op.causal and whole_scores else 1)
        for segment in model.segments
        for op in getattr(segment, name).operations
        if op.kind in kinds
    )


def in_layer(model, layer):
    return [i for i, segment in enumerate(model.segments) if dict(segment.tags).get("LAYER") == layer]


def captured(source, tmp_path, **changes):
    sizes = {"micro_batch": 2, "seq_len": 32, "dtype": "fp32"} | changes
    return capture(source, cache_dir=tmp_path, **sizes)


def test_matmul_flops_are_those_of_torchs_counter(tmp_path):
    model = captured(TINY, tmp_path)
    module = build_module(TINY, dtype="fp32")
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:  # does not know the CPU's attention kernel
        loss = module(tokens, tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert flops(model, "forward", OpKind.MATMUL) == forward.get_total_flops()
    assert flops(model, "backward", OpKind.MATMUL) == backward.get_total_flops()


def test_flops_follow_the_closed_formulas(tmp_path):
    model = captured(TINY, tmp_path)
    norms = sum(p.numel for p in model.parameters if len(p.shape) == 1)
    embedding = model.parameters[0].numel
    tokens = 2 * 32
    matmuls = 2 * (model.facts.n_parameters - norms - embedding) * tokens
    assert flops(model, "forward", OpKind.MATMUL) == matmuls
    assert flops(model, "backward", OpKind.MATMUL) == 2 * matmuls
    scores = 16 * 2 * 8 * 32 * 32 * 8  # layers, samples, heads, queries, keys, head_dim
    assert flops(model, "forward", OpKind.ATTENTION) == 2 * 2 * scores // 2
    assert flops(model, "backward", OpKind.ATTENTION) == 5 * 2 * scores // 2
    assert flops(model, "forward_no_grad", OpKind.MATMUL) == matmuls


def test_llama3_8b_has_the_flops_measured_by_dispatch_on_meta(tmp_path):
    """70.27 and 144.95 TFLOP at 4096 tokens, whole score matrices, flash backward with its recompute."""
    model = captured(find_model("llama3-8b"), tmp_path, micro_batch=1, seq_len=4096, dtype="bf16")
    heavy = OpKind.MATMUL, OpKind.ATTENTION
    assert flops(model, "forward", *heavy, whole_scores=True) / 1e12 == pytest.approx(70.27, abs=0.005)
    assert flops(model, "backward", *heavy, whole_scores=True) / 1e12 == pytest.approx(144.95, abs=0.005)


def test_a_llama_layer_keeps_the_tensors_one_can_list(tmp_path):
    """Per token: two norms' outputs, query, key, value, mixed heads, the middle, and four of the MLP."""
    model = captured(find_model("llama3-8b"), tmp_path, micro_batch=1, seq_len=4096, dtype="bf16")
    layer = in_layer(model, 4)
    per_token = 2 * (4096 + 4096 + 1024 + 1024 + 4096 + 4096 + 4096 + 4 * 14336)
    fp32_rows = 4 * (32 + 1 + 1)  # log-sum-exp per head, and 1/rms of each norm
    random_state = 2 * 8 + 8
    inside = sum(model.segments[number].saved_bytes for number in layer)
    between = {
        value
        for number in layer
        for value, saved in zip(
            model.segments[number].inputs, model.segments[number].inputs_saved, strict=True
        )
        if saved and value[0] in layer
    }
    between |= {(n, k) for n in layer for k, saved in enumerate(model.segments[n].outputs_saved) if saved}
    kept = inside + sum(nbytes_of(model, value) for value in between)
    assert kept == 4096 * (per_token + fp32_rows) + random_state
    first, *_, last = (model.segments[number] for number in layer)
    assert (first.inputs_saved, last.inputs_saved, last.outputs_saved) == ((True,), (False, False), (False,))


class RealRMSNorm(torch.autograd.Function):
    """RMS norm that keeps what the fused kernel keeps, with real numbers."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, rstd, weight)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, grad):
        x, rstd, weight = ctx.saved_tensors
        normed = x * rstd
        grad_normed = grad * weight
        mean = (grad_normed * normed).mean(-1, keepdim=True)
        return (grad_normed - normed * mean) * rstd, (grad * normed).sum((0, 1)), None


def really_saved(module, tokens, labels):
    """Bytes of distinct storages that autograd keeps in a real run, parameters and buffers apart."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(tokens, labels)
    return sum(storage.nbytes() for storage in kept.values())


def saved_in_all(model):
    """Bytes kept over the whole model: inside segments, and boundary tensors that someone saved, once."""
    inside = sum(segment.saved_bytes for segment in model.segments)
    boundary = {}
    for number, segment in enumerate(model.segments):
        for value, saved in zip(segment.inputs, segment.inputs_saved, strict=True):
            boundary[value] = boundary.get(value, False) or saved
        for output, saved in enumerate(segment.outputs_saved):
            boundary[number, output] = boundary.get((number, output), False) or saved
    return inside + sum(nbytes_of(model, value) for value, saved in boundary.items() if saved)


def nbytes_of(model, value):
    segment, output = value
    if segment < 0:
        return model.micro_batch * model.seq_len * 8
    spec = model.segments[segment].outputs[output]
    return torch.Size(spec.shape).numel() * DTYPE_BYTES[spec.dtype]


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_saved_bytes_are_those_of_a_real_run(monkeypatch, tmp_path, changes):
    source = from_config({**TINY.config, **changes}, name="t", kind="config", where="t")
    model = captured(source, tmp_path)
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: RealRMSNorm.apply(x, weight, eps))
    data = torch.randint(0, 256, (2, 33))
    tokens, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    random_state = 16 * (2 * 8 + 8)  # the GPU's flash kernel keeps its seed and offset, the CPU's does not
    real = really_saved(build_module(source, dtype="fp32"), tokens, labels)
    assert saved_in_all(model) - random_state == real


@pytest.mark.parametrize(
    "module",
    [
        modules.Chain(blocks=3),
        modules.Skip(blocks=3),
        modules.Pairs(blocks=3),
        modules.Chain(modules.NestedBlock),
    ],
    ids=lambda module: type(module).__name__,
)
def test_saved_bytes_of_a_plain_module_are_those_of_a_real_run(module):
    model = capture(module, micro_batch=2, seq_len=8, dtype="fp32")
    data = torch.randint(0, modules.VOCABULARY, (2, 9))
    assert saved_in_all(model) == really_saved(module, data[:, :-1].contiguous(), data[:, 1:].contiguous())


def test_each_backward_has_one_matmul_for_inputs_and_one_for_weights(tmp_path):
    model = captured(TINY, tmp_path)
    layer = [op for number in in_layer(model, 2) for op in model.segments[number].backward.operations]
    matmuls = [op for op in layer if op.kind is OpKind.MATMUL]
    by_direction = {
        direction: sum(op.flops * op.count for op in matmuls if op.direction == direction)
        for direction in ("dgrad", "wgrad")
    }
    assert by_direction["dgrad"] == by_direction["wgrad"] > 0
    assert {op.direction for op in matmuls} == {"dgrad", "wgrad"}
    assert {op.direction for op in layer if op.kind is not OpKind.MATMUL} == {"bwd"}


def test_a_product_of_activations_has_no_weight_gradient():
    class Product(modules.Chain):
        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.embed(tokens)
                x = torch.bmm(x, x.transpose(1, 2)).bmm(x)
            return self.loss(x, labels)

    backward = capture(Product(blocks=0), micro_batch=2, seq_len=8, dtype="fp32").segments[0].backward
    assert {op.direction for op in backward.operations if op.kind is OpKind.MATMUL} == {"dgrad"}


def test_the_embedding_gradient_is_a_weight_gradient_over_the_whole_table(tmp_path):
    (op,) = captured(TINY, tmp_path).segments[0].backward.operations
    assert (op.kind, op.direction, op.shape) == (OpKind.EMBEDDING, "wgrad", (64, 64, 256))
    assert op.bytes == 64 * 64 * 4 + 64 * 8 + 256 * 64 * 4


def only(model, kind, name="forward"):
    return [op for segment in model.segments for op in getattr(segment, name).operations if op.kind is kind]


def test_grouped_attention_reads_keys_and_values_as_they_are():
    module = modules.Attention(kv_heads=2, is_causal=True, enable_gqa=True)
    model = capture(module, micro_batch=2, seq_len=8, dtype="bf16")
    (forward,), (backward,) = only(model, OpKind.ATTENTION), only(model, OpKind.ATTENTION, "backward")
    assert forward.shape == backward.shape == (2, 4, 2, 8, 8, 4)
    assert forward.causal
    query, key, lse = 2 * 8 * 16 * 2, 2 * 8 * 8 * 2, 2 * 4 * 8 * 4
    assert forward.bytes == query + 2 * key + query + lse
    assert backward.bytes == 3 * query + 2 * key + lse + query + 2 * key
    assert (forward.flops, backward.flops) == (2 * 2 * 2 * 4 * 64 * 4 // 2, 5 * 2 * 2 * 4 * 64 * 4 // 2)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": True}, {"dropout_p": 0.1}])
def test_attention_never_keeps_its_scores(options):
    module = modules.Attention(**options)
    model = capture(module, micro_batch=1, seq_len=512, dtype="bf16")
    (op,) = only(model, OpKind.ATTENTION)
    assert op.causal == options.get("is_causal", False)
    scores = 4 * 512 * 512 * 2
    mask = 512 * 512 * 2 if options.get("mask") else 0
    assert model.segments[0].saved_bytes - mask < scores / 2


def test_attention_on_the_unfused_path_is_refused():
    class Hidden(modules.Chain):
        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.embed(tokens).unsqueeze(1)
                x = torch.ops.aten.scaled_dot_product_attention(x, x, x).squeeze(1)
            return self.loss(x, labels)

    with pytest.raises(ModelError) as caught:
        capture(Hidden(blocks=0), micro_batch=1, seq_len=8, dtype="fp32")
    assert caught.value.field == "attention"
    assert "F.scaled_dot_product_attention" in caught.value.fix


def test_a_norm_is_one_kernel_each_way(tmp_path):
    norm = captured(TINY, tmp_path).segments[1]
    (forward,) = [op for op in norm.forward.operations if op.kind is OpKind.NORM]
    (backward,) = [op for op in norm.backward.operations if op.kind is OpKind.NORM]
    rows, bytes_of_x = 64, 64 * 64 * 4
    assert (forward.count, forward.shape, forward.dtype) == (1, (rows, 64), "fp32")
    assert forward.bytes == 2 * bytes_of_x + 64 * 4 + rows * 4
    assert backward.bytes == 3 * bytes_of_x + 2 * 64 * 4 + rows * 4


def test_the_loss_is_softmax_and_cross_entropy_over_the_vocabulary(tmp_path):
    head = captured(TINY, tmp_path, dtype="bf16").segments[-1]
    table = 64 * 256 * 4
    (softmax,) = [op for op in head.forward.operations if op.kind is OpKind.SOFTMAX]
    (loss,) = [op for op in head.forward.operations if op.kind is OpKind.CROSS_ENTROPY]
    assert (softmax.shape, softmax.dtype, softmax.bytes) == ((64, 256), "fp32", 2 * table)
    assert (loss.shape, loss.bytes) == ((64, 256), 64 * (8 + 4) + 2 * 4)
    (scatter,) = [op for op in head.backward.operations if op.kind is OpKind.CROSS_ENTROPY]
    assert scatter.bytes == table + 64 * (8 + 4)


def test_views_and_allocations_cost_nothing():
    class Views(modules.Chain):
        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.embed(tokens).transpose(0, 1).transpose(0, 1).unflatten(-1, (4, -1)).flatten(2)
                x.new_empty(x.shape)
            return self.loss(x, labels)

    forward = capture(Views(blocks=0), micro_batch=2, seq_len=8, dtype="fp32").segments[0].forward
    assert [op.name for op in forward.operations] == ["aten.embedding.default"]


def test_an_expanded_operand_is_read_once():
    class Scaled(modules.Chain):
        def __init__(self):
            super().__init__(blocks=0)
            self.scale = nn.Parameter(torch.ones(modules.HIDDEN))

        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.embed(tokens)
                x = x * self.scale.expand(x.shape)
            return self.loss(x, labels)

    product = capture(Scaled(), micro_batch=2, seq_len=8, dtype="fp32").segments[0].forward.operations[-1]
    assert product.bytes == 4 * (2 * 2 * 8 * 16 + 16)


@pytest.mark.parametrize("layer", [nn.Conv1d(16, 16, 3, padding=1)], ids=["convolution"])
def test_a_compute_kernel_without_a_rule_is_refused_by_name(layer):
    class Convolved(modules.Chain):
        def __init__(self):
            super().__init__(blocks=0)
            self.layer = layer

        def forward(self, tokens, labels):
            with annotate("PP"):
                x = self.layer(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
            return self.loss(x, labels)

    with pytest.raises(ModelError) as caught:
        capture(Convolved(), micro_batch=1, seq_len=8, dtype="fp32")
    assert caught.value.field == "operator"
    assert "convolution" in caught.value.value
    assert "nn.Linear" in caught.value.fix


class Staircase(modules.Chain):
    """Sizes (in units of one [2, 8, 16] fp32 tensor) that one can follow by hand."""

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        with annotate("PP"):
            wide = torch.cat((x, x, x, x), -1)  # 4 units, needed until the next line ends
            narrow = wide[..., :16] + wide[..., 16:32]  # 1 unit
            del wide
            x = narrow * 2.0  # 1 unit; nothing here is saved
            del narrow
        return self.loss(x, labels)


UNIT = 2 * 8 * 16 * 4


def test_forward_workspace_is_the_peak_beyond_what_is_kept():
    middle = capture(Staircase(blocks=0), micro_batch=2, seq_len=8, dtype="fp32").segments[1]
    assert middle.saved_bytes == 0
    assert middle.forward.workspace_bytes == 5 * UNIT - UNIT  # cat and sum alive; the output is kept
    assert middle.forward_no_grad.workspace_bytes == middle.forward.workspace_bytes


def test_backward_workspace_counts_parameter_gradients_and_not_what_was_saved():
    """Block with hidden 16 -> 32 -> 16: relu's result (2 units) is saved; up's result is freed in forward."""
    block = capture(modules.Chain(blocks=1), micro_batch=2, seq_len=8, dtype="fp32").segments[1]
    assert block.saved_bytes == 2 * UNIT
    # F: up's result and relu's result are alive together, then down's result beside relu's, then the sum.
    assert block.forward.workspace_bytes == (2 + 2) * UNIT - (2 + 1) * UNIT
    assert block.forward_no_grad.workspace_bytes == (2 + 2) * UNIT - UNIT
    # B, when relu's gradient is made: relu's result (2), the gradient of down's weights (2), of relu's result
    # (2) and of up's result (2); kept are relu's result at the begin (2), the gradient of x at the end (1).
    assert block.backward.workspace_bytes == (2 + 2 + 2 + 2) * UNIT - (2 + 1) * UNIT


@settings(max_examples=8, deadline=None)
@given(micro_batch=st.integers(1, 5), seq_len=st.integers(2, 40))
def test_matmuls_and_saved_bytes_grow_with_the_tokens(micro_batch, seq_len):
    one = capture(modules.Chain(blocks=2), micro_batch=1, seq_len=1, dtype="fp32")
    many = capture(modules.Chain(blocks=2), micro_batch=micro_batch, seq_len=seq_len, dtype="fp32")
    tokens = micro_batch * seq_len
    for name in ("forward", "forward_no_grad", "backward"):
        assert flops(many, name, OpKind.MATMUL) == tokens * flops(one, name, OpKind.MATMUL)
    assert [s.saved_bytes for s in many.segments[:3]] == [tokens * s.saved_bytes for s in one.segments[:3]]
