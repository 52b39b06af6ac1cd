"""What nearly every family states under the same keys: widths, heads, context; and the shape put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from piper.models.fields import Fields
from piper.models.shape import Activation, DecoderShape, Embedding, Head, Layer, Norm, Placement

MOST_LAYERS = 10_000
MOST_EXPERTS = 10_000
MOST_PARAMETERS = 2**50
"""Far beyond any model; sizes in bytes stay within 64 bits, and a slip of the keyboard is told at once."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "squared_relu": "relu2",
}
"""`hidden_act` -> ours."""

HARMLESS = frozenset(
    {
        "_commit_hash", "_name_or_path", "architectures", "attn_implementation", "_attn_implementation",
        "attention_softmax_in_fp32", "auto_map", "cache_implementation", "chunk_size_feed_forward",
        "classifier_dropout", "dtype", "emb_init_std", "gradient_checkpointing", "id2label", "init_config",
        "init_device", "is_decoder", "is_encoder_decoder", "label2id", "max_length", "model_type",
        "mrope_section", "n_ctx", "name", "output_attentions", "output_hidden_states", "pretraining_tp",
        "problem_type", "reorder_and_upcast_attn", "return_dict", "scale_attention_softmax_in_fp32",
        "task_specific_params", "tokenizer_class", "tokenizer_name", "torch_dtype", "torchscript",
        "transformers_version", "unsloth_version", "use_cache", "use_return_dict", "verbose",
    }
)  # fmt: skip
"""Keys that say nothing about what is trained, or at what cost."""

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """Sizes of a decoder.

    Args:
        hidden: features of the residual stream.
        layers: how many.
        heads, kv_heads, head_dim: of queries; of keys and values; features of each.
        vocabulary: rows of the embedding.
        context: longest sequence that the model was made for.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Under which keys a family states its sizes.

    None: under none. `kv_heads`: as many as heads; `head_dim`: hidden / heads, or, where heads have
    `several_widths` (latent attention), 0.
    """

    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str | None = "num_key_value_heads"
    head_dim: str | None = "head_dim"
    context: str = "max_position_embeddings"
    several_widths: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a family takes for sizes that a file leaves out; None: the file must state it.

    Args:
        context: of `max_position_embeddings`.
        kv_heads: None: as many as heads.
        head_dim: None: hidden / heads.
        hidden, layers, heads, vocabulary: for parts of larger configs, whose files leave out all that equals
            the default.
    """

    context: int
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    vocabulary: int | None = None


def read_trunk(read: Fields, sizes: Sizes, *, names: Names | None = None) -> Trunk:
    """Return the sizes; raises ModelError where they are missing or contradict each other."""
    names = names or Names()
    hidden = read.count(names.hidden, default=sizes.hidden)
    layers = read.count(names.layers, default=sizes.layers)
    read.require(layers <= MOST_LAYERS, names.layers, value=layers, rule=f"must be at most {MOST_LAYERS}")
    heads = read.count(names.heads, default=sizes.heads)
    kv_heads = heads
    if names.kv_heads is not None:
        kv_heads = read.count(names.kv_heads, default=sizes.kv_heads or heads, null=heads)
        given = "" if read.has(names.kv_heads) else " (the file leaves it out: the family's default)"
        rule = f"must divide {heads} heads{given}"
        read.require(heads % kv_heads == 0, names.kv_heads, value=kv_heads, rule=rule)
    return Trunk(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(read, hidden, heads=heads, names=names, default=sizes.head_dim),
        vocabulary=read.count("vocab_size", default=sizes.vocabulary),
        context=read.count(names.context, default=sizes.context),
    )


def _head_dim(read: Fields, hidden: int, *, heads: int, names: Names, default: int | None) -> int:
    if names.several_widths:
        return 0
    stated = names.head_dim is not None and (
        read.has(names.head_dim) or (default is not None and not read.is_null(names.head_dim))
    )
    if not stated:
        read.require(
            hidden % heads == 0, names.heads, value=heads, rule=f"must divide {hidden} ({names.hidden})"
        )
    if names.head_dim is None:
        return hidden // heads
    return read.count(names.head_dim, default=default or hidden // heads, null=hidden // heads)


def read_windows(
    read: Fields, layers: int, *, window: int | None, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Return each layer's window (None: it sees all) from `layer_types`, or from the family's own pattern.

    Args:
        read: the config.
        layers: how many.
        window: of the layers that slide; None: none does.
        slides: the family's pattern, by number of the layer from 0.
    """
    kinds = read.texts("layer_types", (SLIDING, FULL), length=layers)
    if window is None:
        read.require(
            kinds is None or SLIDING not in kinds, "sliding_window", value=None,
            rule="is needed: layer_types has sliding_attention",
        )  # fmt: skip
        return (None,) * layers
    if kinds is None:
        return tuple(window if slides(number) else None for number in range(layers))
    return tuple(window if kind == SLIDING else None for kind in kinds)


def repeated(layers: int, make: Callable[[int], Layer]) -> tuple[Layer, ...]:
    """Return `make(0)`, `make(1)`, ...; equal layers are one object."""
    known: dict[Layer, Layer] = {}
    return tuple(known.setdefault(layer, layer) for layer in map(make, range(layers)))


def assemble(
    read: Fields, trunk: Trunk, *, family: str, layers: Sequence[Layer], norm: Norm | None,
    tied: bool, embedding: Embedding | None = None, head: Head | None = None,
    init_std: str = "initializer_range", default_std: float = 0.02, prediction_depth: int = 0,
) -> DecoderShape:  # fmt: skip
    """Return the shape, with what was assumed; raises ModelError for impossible totals.

    Args:
        read: the config.
        trunk, family, layers, prediction_depth: of the shape.
        norm: after the last layer.
        tied: what the family takes for `tie_word_embeddings`.
        embedding, head: before and after the layers; the head's `tied` is read here.
        init_std, default_std: key of the initialisation, and what the family takes for it.
    """
    head = head or Head()
    tied = read.flag("tie_word_embeddings", default=tied)
    std = read.number(init_std, default=default_std)
    found = DecoderShape(
        family=family, hidden=trunk.hidden, vocabulary=trunk.vocabulary, layers=tuple(layers),
        embedding=embedding or Embedding(), final_norm=norm,
        head=Head(tied=tied, bias=head.bias, softcap=head.softcap, scale=head.scale),
        context_length=trunk.context, prediction_depth=prediction_depth, init_std=std,
        assumed=tuple(read.assumed), notices=(*read.notices, *_unread(read)),
    )  # fmt: skip
    total = found.n_parameters
    if total > MOST_PARAMETERS:
        raise read.error(
            "number of parameters", total, rule="is more than 2^50", fix="correct the sizes in the config"
        )
    return found


def _unread(read: Fields) -> list[str]:
    names = [name for name in read.unread() if not _harmless(name.rpartition(".")[2])]
    if not names:
        return []
    return [f"config keys that the planned model does not follow: {', '.join(names)}"]


def _harmless(name: str) -> bool:
    return name in HARMLESS or name.endswith(("_token_id", "_token_index")) or name.startswith("summary_")


def read_placement(*, parallel: bool, shared: bool) -> Placement:
    """Return where norms stand in a layer whose two parts may stand side by side."""
    if not parallel:
        return "pre"
    return "parallel_shared" if shared else "parallel"
