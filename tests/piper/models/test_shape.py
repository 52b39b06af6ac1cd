"""Counts of decoders, against what their publishers print."""

from dataclasses import replace

from piper.models.shape import (
    Attention,
    DecoderShape,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Layer,
    Norm,
    Rotary,
    Router,
    SparseMoE,
)

RMS = Norm(kind="rms")
LAYER = Norm(kind="layer", eps=1e-5, bias=True)


def test_gpt2_has_its_published_124439808_parameters():
    layer = Layer(
        attention=Attention(heads=12, kv_heads=12, head_dim=64, qkv_bias=True, out_bias=True, fused_qkv=True),
        feed_forward=FeedForward(
            width=3072, activation="gelu_tanh", gated=False, up_bias=True, down_bias=True
        ),
        norm=LAYER,
    )
    shape = DecoderShape(
        family="gpt2", hidden=768, vocabulary=50257, layers=(layer,) * 12, final_norm=LAYER,
        embedding=Embedding(positions=1024), head=Head(tied=True), context_length=1024,
    )  # fmt: skip
    assert shape.n_parameters == shape.n_active_parameters == 124_439_808


def test_qwen3_4b_counts_its_norms_of_queries_and_keys():
    attention = Attention(heads=32, kv_heads=8, head_dim=128, qk_norm=RMS, rotary=Rotary(theta=1e6, dims=128))
    layer = Layer(attention=attention, feed_forward=FeedForward(width=9728), norm=RMS)
    shape = DecoderShape(
        family="qwen3", hidden=2560, vocabulary=151936, layers=(layer,) * 36, final_norm=RMS,
        head=Head(tied=True), context_length=40960,
    )  # fmt: skip
    assert shape.n_parameters == 4_022_468_096


def test_gemma2_2b_has_four_norms_in_each_layer():
    attention = Attention(heads=8, kv_heads=4, head_dim=256, rotary=Rotary(theta=1e4, dims=256))
    layer = Layer(attention=attention, feed_forward=FeedForward(width=9216), norm=RMS, placement="sandwich")
    shape = DecoderShape(
        family="gemma2", hidden=2304, vocabulary=256000, layers=(layer,) * 26, final_norm=RMS,
        head=Head(tied=True), context_length=8192,
    )  # fmt: skip
    assert shape.n_parameters == 2_614_341_888


def test_qwen_moe_counts_the_shared_expert_and_its_gate_as_active():
    attention = Attention(
        heads=16, kv_heads=16, head_dim=128, qkv_bias=True, rotary=Rotary(theta=1e6, dims=128)
    )
    moe = SparseMoE(
        router=Router(experts=60, top_k=4, normalised=False), expert=FeedForward(width=1408),
        shared=FeedForward(width=5632), shared_gate=True,
    )  # fmt: skip
    layer = Layer(attention=attention, feed_forward=moe, norm=RMS)
    shape = DecoderShape(
        family="qwen2_moe", hidden=2048, vocabulary=151936, layers=(layer,) * 24, final_norm=RMS,
        context_length=8192,
    )  # fmt: skip
    assert shape.n_parameters == 14_315_784_192
    assert shape.n_active_parameters == 2_689_173_504


def deepseek(*, hidden, heads, query_rank, dense_width, expert_width, experts, shared, layers, dense):
    attention = LatentAttention(
        heads=heads, query_rank=query_rank, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, norm=RMS,
        rotary=Rotary(theta=1e4, dims=64, interleaved=True),
    )  # fmt: skip
    first = Layer(attention=attention, feed_forward=FeedForward(width=dense_width), norm=RMS)
    top_k = 8 if experts == 256 else 6
    moe = SparseMoE(
        router=Router(experts=experts, top_k=top_k), expert=FeedForward(width=expert_width),
        shared=FeedForward(width=shared * expert_width),
    )  # fmt: skip
    rest = replace(first, feed_forward=moe)
    return DecoderShape(
        family="deepseek", hidden=hidden, vocabulary=129280 if experts == 256 else 102400,
        layers=(first,) * dense + (rest,) * (layers - dense), final_norm=RMS, context_length=4096,
    )  # fmt: skip


def test_deepseek_v2_lite_projects_queries_in_one_step():
    shape = deepseek(
        hidden=2048, heads=16, query_rank=None, dense_width=10944, expert_width=1408, experts=64, shared=2,
        layers=27, dense=1,
    )  # fmt: skip
    assert shape.n_parameters == 15_706_484_224


def test_deepseek_v3_counts_671_billion_and_a_prediction_module_apart():
    shape = deepseek(
        hidden=7168, heads=128, query_rank=1536, dense_width=18432, expert_width=2048, experts=256,
        shared=1, layers=61, dense=3,
    )  # fmt: skip
    assert shape.n_parameters == 671_026_404_352
    assert round(shape.n_active_parameters / 1e9, 1) == 37.6
    more = replace(shape, prediction_depth=1).n_parameters - shape.n_parameters
    assert round(more / 1e9, 1) == 11.6
