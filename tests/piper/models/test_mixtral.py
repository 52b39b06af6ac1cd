"""The Mixtral module against plain loops over experts, its parameters, and its experts when captured."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cost_models.ops import OpKind, cut
from piper.capture import capture
from piper.errors import ModelError
from piper.models import build_module, find_model
from piper.models.experts import SparseMoE
from piper.models.families import mixtral
from piper.models.find import from_config
from piper.predict import Job, compile_job
from piper.strategy import load_strategy

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "vocab_size": 19,
    "max_position_embeddings": 12,
    "rope_theta": 100.0,
    "rms_norm_eps": 1e-6,
}
TOP_K, EXPERTS = 2, 5


def build(**changes):
    source = from_config(CONFIG | changes, name="test", kind="config", where="test")
    module = build_module(source, dtype="fp32")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def sparse_part(**changes):
    return SparseMoE(mixtral.read(CONFIG | changes, where="t").layers[0].feed_forward, 16)


def routed(x, weights, *, top_k=TOP_K):
    """What the sparse part makes of tokens [tokens, hidden]: one token and one expert after the other."""
    gate, w1, w2, w3 = weights
    rows = []
    for token in x:
        scores = torch.softmax(gate @ token, 0)
        best = sorted(range(len(scores)), key=lambda e: -scores[e].item())[:top_k]
        total = sum(scores[e] for e in best)
        rows.append(
            sum(scores[e] / total * (w2[e] @ (F.silu(w1[e] @ token) * (w3[e] @ token))) for e in best)
        )
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_experts_make_what_a_loop_over_tokens_makes(top_k):
    torch.manual_seed(1)
    moe = sparse_part(num_experts_per_tok=top_k)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.5)
    x = torch.randn(2, 7, 16, requires_grad=True)
    names = ("gate.weight", "experts.w1", "experts.w2", "experts.w3")
    plain = [moe.get_parameter(name).detach().double().requires_grad_() for name in names]
    x_plain = x.detach().double().flatten(0, 1).requires_grad_()
    expected = routed(x_plain, plain, top_k=top_k)
    found = moe(x)
    torch.testing.assert_close(found.flatten(0, 1).double(), expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn(2, 7, 16)
    (found * weight).sum().backward()
    (expected * weight.flatten(0, 1).double()).sum().backward()
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), x_plain.grad, rtol=1e-4, atol=1e-5)
    for name, other in zip(names, plain, strict=True):
        torch.testing.assert_close(
            moe.get_parameter(name).grad.double(), other.grad, rtol=1e-4, atol=1e-5, msg=name
        )


def test_an_expert_that_no_token_chooses_gets_no_gradient():
    moe = sparse_part()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.5)
        moe.gate.weight[3] = -torch.ones(16) * 100
    moe(torch.rand(1, 6, 16) + 0.1).sum().backward()
    assert moe.experts.w1.grad[3].abs().max() == 0
    assert moe.experts.w1.grad.abs().sum() > 0


def test_the_loss_of_the_whole_model_is_that_of_the_same_model_with_the_loop(monkeypatch):
    module = build()
    data = torch.randint(0, 19, (2, 9))
    tokens, labels = data[:, :-1], data[:, 1:]
    loss = module(tokens, labels)

    def plain(self, x):
        weights = (self.gate.weight, self.experts.w1, self.experts.w2, self.experts.w3)
        return routed(x.flatten(0, 1), weights).view(x.shape)

    monkeypatch.setattr(SparseMoE, "forward", plain)
    torch.testing.assert_close(loss, module(tokens, labels), rtol=1e-5, atol=0)


def test_parameter_names_are_those_of_hugging_face_with_stacked_experts():
    names = {name: tuple(p.shape) for name, p in build(num_hidden_layers=1).named_parameters()}
    layer = {name.removeprefix("model.layers.0."): shape for name, shape in names.items() if "layers" in name}
    assert layer == {
        "self_attn.q_proj.weight": (16, 16),
        "self_attn.k_proj.weight": (8, 16),
        "self_attn.v_proj.weight": (8, 16),
        "self_attn.o_proj.weight": (16, 16),
        "block_sparse_moe.gate.weight": (5, 16),
        "block_sparse_moe.experts.w1": (5, 24, 16),
        "block_sparse_moe.experts.w2": (5, 16, 24),
        "block_sparse_moe.experts.w3": (5, 24, 16),
        "input_layernorm.weight": (16,),
        "post_attention_layernorm.weight": (16,),
    }


def test_published_parameter_counts_are_exact():
    """46.7 B, of which 12.9 B for each token (arXiv 2401.04088, section 2.1)."""
    source = find_model("mixtral-8x7b")
    assert source.n_parameters == source.facts.n_parameters == 46_702_792_704
    assert source.facts.n_active_parameters == 12_879_925_248


def test_active_parameters_are_those_that_one_token_meets():
    source = from_config(CONFIG, name="t", kind="config", where="t")
    idle = 2 * (EXPERTS - TOP_K) * 3 * 16 * 24
    assert source.facts.n_active_parameters == source.n_parameters - idle
    assert sum(p.numel() for p in build().parameters()) == source.n_parameters


def captured(tmp_path, **changes):
    sizes = {"micro_batch": 2, "seq_len": 8, "dtype": "bf16"} | changes
    return capture(from_config(CONFIG, name="t", kind="config", where="t"), cache_dir=tmp_path, **sizes)


def experts_of(model):
    return [segment for segment in model.segments if "EP" in dict(segment.tags)]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_experts_are_a_scope_of_their_own_that_takes_every_token_top_k_times(tmp_path, dtype):
    model = captured(tmp_path, dtype=dtype)
    regions = experts_of(model)
    assert [dict(region.tags)["EP"] for region in regions] == [0, 1]
    for region in regions:
        rows, ends = (model.segments[producer].outputs[output] for producer, output in region.inputs)
        assert (rows.shape, rows.batch_dim, rows.requires_grad) == ((2 * 8 * TOP_K, 16), 0, True)
        assert (ends.shape, ends.batch_dim, ends.requires_grad) == ((EXPERTS,), None, False)
        (output,) = region.outputs
        assert (output.shape, output.batch_dim) == (rows.shape, 0)


def test_weights_of_experts_number_the_experts_first_and_say_which_features_are_cut(tmp_path):
    model = captured(tmp_path)
    region = experts_of(model)[1]
    shapes = {parameter.name: parameter.shape for parameter in model.parameters}
    assert {shapes[name][0] for name in region.parameters} == {EXPERTS}
    prefix = "model.layers.1.block_sparse_moe.experts."
    assert dict(region.tensor_layout) == {f"{prefix}w1": 1, f"{prefix}w3": 1, f"{prefix}w2": 2}
    assert region.tensor_refused == ()


def test_grouped_products_have_the_flops_of_the_routed_rows_in_each_direction(tmp_path):
    region = experts_of(captured(tmp_path))[0]
    rows = 2 * 8 * TOP_K
    products = {
        name: [op for op in getattr(region, name).operations if op.kind is OpKind.GROUPED_MATMUL]
        for name in ("forward", "backward_inputs", "backward_weights")
    }
    for ops in products.values():
        assert sum(op.flops * op.count for op in ops) == 3 * 2 * rows * 16 * 24
        for op in ops:
            assert op.shape[0] == EXPERTS
            assert op.shape[1] == rows
            assert op.token_dim == 1
            assert op.shape[op.tensor_dim] == 24
    assert {op.shape for op in products["backward_weights"]} == {
        (EXPERTS, rows, 16, 24),
        (EXPERTS, rows, 24, 16),
    }
    assert {op.direction for op in products["backward_inputs"]} == {"dgrad"}
    assert {op.direction for op in products["backward_weights"]} == {"wgrad"}
    (up,) = [op for op in products["forward"] if op.shape[2] == 24]
    assert (up.shape, up.count) == ((EXPERTS, rows, 24, 16), 2)
    weights, ends = EXPERTS * 24 * 16 * 2, EXPERTS * 4
    assert up.bytes == weights + rows * (16 + 24) * 2 + ends
    assert cut(up, 0, EXPERTS).shape == (1, rows, 24, 16)


@pytest.mark.parametrize("axes", ["dp=4,ep=2", "dp=4,ep=4", "dp=2,tp=2,ep=4", "dp=2,tp=2,ep=2,etp=2"])
def test_however_experts_are_spread_all_devices_together_do_the_work_of_one(axes):
    job = Job(
        model="tiny-moe",
        strategy=load_strategy(f"{axes},micro_batch=1"),
        gpus=4,
        global_batch=8,
        dtype="bf16",
    )
    assert experts_flops(compile_job(job).plan) == experts_flops(
        compile_job(replace(job, strategy=load_strategy("dp=1,micro_batch=1"), gpus=1)).plan
    )


def experts_flops(plan):
    """FLOPs of grouped products of one step on all devices."""
    per_device = sum(
        op.flops * op.count
        for work in plan.device_plans[0].tasks.work
        if work >= 0
        for op in plan.works[work].operations
        if op.kind is OpKind.GROUPED_MATMUL
    )
    return per_device * plan.replicas


def test_matmul_flops_of_the_whole_model_follow_its_active_parameters(tmp_path):
    model = captured(tmp_path)
    norms = sum(p.numel for p in model.parameters if len(p.shape) == 1)
    per_token = model.facts.n_active_parameters - norms - 19 * 16
    for name, times in (("forward", 1), ("backward", 2)):
        flops = sum(
            op.flops * op.count
            for segment in model.segments
            for op in getattr(segment, name).operations
            if op.kind in {OpKind.MATMUL, OpKind.GROUPED_MATMUL}
        )
        # The router multiplies with the rows of all experts, not only of those that it chooses.
        assert flops == times * 2 * per_token * 16


def test_experts_keep_their_rows_both_products_and_what_lies_between(tmp_path):
    region = experts_of(captured(tmp_path))[0]
    assert region.saved_bytes == 2 * 8 * TOP_K * 4 * 24 * 2  # gate, up, silu(gate), their product
    assert (region.inputs_saved, region.outputs_saved) == ((True, True), (False,))


@pytest.mark.parametrize(
    ("changes", "field", "rule"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok", "is more than 5 experts"),
        ({"num_local_experts": 0}, "num_local_experts", "whole number"),
        ({"sliding_window": 0}, "sliding_window", "whole number"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise", "is not supported"),
        ({"output_router_logits": 1}, "output_router_logits", "must be true or false"),
        ({"hidden_act": "tanh"}, "hidden_act", "must be one of silu"),
    ],
)
def test_a_bad_config_is_refused_by_field(changes, field, rule):
    with pytest.raises(ModelError, match=rule) as caught:
        mixtral.read(CONFIG | changes, where="config.json")
    assert caught.value.field == field
    assert caught.value.fix


def test_left_out_keys_take_the_familys_own_defaults():
    config = {key: CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 8}
    found = mixtral.read(config, where="t")
    (layer,) = set(found.layers)
    router = layer.feed_forward.router
    assert (router.experts, router.top_k, layer.attention.kv_heads) == (8, 2, 8)
    assert (found.context_length, layer.attention.rotary.theta) == (131072, 1e6)
    for text in (
        "num_local_experts = 8",
        "num_experts_per_tok = 2",
        "num_key_value_heads = 8",
        "rope_theta = 1000000.0",
    ):
        assert text in found.assumed


def test_the_tiny_model_uses_every_expert_in_every_layer_and_starts_from_guessing():
    torch.manual_seed(0)
    module = build_module(find_model("tiny-moe"), dtype="fp32")
    used = []

    def watch(moe, args, _):
        scores = torch.softmax(moe.gate(args[0].flatten(0, 1)), -1)
        used.append(set(scores.topk(2, -1).indices.flatten().tolist()))

    for layer in module.model.layers:
        layer.block_sparse_moe.register_forward_hook(watch)
    data = torch.randint(0, 256, (4, 65))
    loss = module(data[:, :-1], data[:, 1:]).item() / (4 * 64)
    assert loss == pytest.approx(math.log(256), rel=0.02)
    assert used == [set(range(8))] * 8
