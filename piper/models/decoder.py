"""`CausalLM`: the module of any decoder, built from its `DecoderShape`.

Parameter names are those of Hugging Face's `LlamaForCausalLM` as far as its parts go. Layers take the
position tables and slice them inside their scope, so that no operation lies outside of one.

[Note: scopes of a decoder]
"PP": units of the pipeline cut: the embedding, every layer (also "LAYER"), and norm + head + loss.
"TP": what tensor parallelism cuts: the embedding, attention from its projections to the output projection,
the feed-forward part, and head + loss; both parts of a parallel layer are one scope, whose sum is reduced
once. "CP": the attention between the tokens of a sequence, which context parallelism cuts. Norms, dropout and
residual sums lie between the "TP" scopes, so that they may be cut over tokens (sequence parallelism).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piper.annotation import annotate
from piper.errors import ModelError
from piper.models import shape as shapes
from piper.models.layer import Layer
from piper.models.loss import summed_loss
from piper.models.norms import Norm
from piper.models.positions import alibi_slopes, rope_tables
from piper.models.prediction import LOSS_WEIGHT, NO_TARGET, Prediction, ahead
from piper.models.projections import AdaptedLinear, Embedding, Linear, add_adapters


class Decoder(nn.Module):
    """Embedding and layers; the final norm is applied by the head's unit.

    Args:
        shape: of the whole model.
        positions: length of the rotary tables.
        length: of the sequences to come, see `rope_tables`.
    """

    def __init__(self, shape: shapes.DecoderShape, *, positions: int, length: int) -> None:
        super().__init__()
        self.shape = shape
        self.positions, self.length = positions, length
        self.embed_tokens = Embedding(shape.vocabulary, shape.hidden)
        if shape.embedding.positions is not None:
            self.embed_positions = Embedding(shape.embedding.positions, shape.hidden)
        if shape.embedding.norm is not None:
            self.embed_norm = Norm(shape.embedding.norm, shape.hidden)
        kinds = {layer: layer for layer in shape.layers}
        self.layers = nn.ModuleList(
            Layer(kinds[layer], shape.hidden, lengths=shape.segment_lengths) for layer in shape.layers
        )
        if shape.final_norm is not None:
            self.norm = Norm(shape.final_norm, shape.hidden)
        if shape.prediction_depth:
            self.predictions = nn.ModuleList(
                Prediction(shape, depth=depth) for depth in range(1, shape.prediction_depth + 1)
            )
        self._tables: dict[shapes.Rotary | int, tuple[str, ...]] = {}
        for layer in kinds:
            key = _positions_of(layer)
            if key is not None and key not in self._tables:
                self._tables[key] = self._register(self._new_tables(key))

    def tables(self, layer: shapes.Layer) -> tuple[Tensor, ...]:
        """Return what a layer knows of positions: cosine and sine, the slopes of its heads, or nothing."""
        key = _positions_of(layer)
        return () if key is None else tuple(self.get_buffer(name) for name in self._tables[key])

    def reset_buffers(self) -> None:
        """Fill the tables (after `to_empty`)."""
        for key, names in self._tables.items():
            for name, values in zip(names, self._new_tables(key), strict=True):
                self.get_buffer(name).copy_(values)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [microbatch, seq] to [microbatch, seq, hidden], not yet normalised."""
        x = self._embedded(tokens)
        for layer, shape in zip(self.layers, self.shape.layers, strict=True):
            x = layer(x, *self.tables(shape))
        return x

    def further(self, x: Tensor, labels: Tensor) -> list[Tensor]:
        """Return what each module for further tokens makes of the stream, not yet normalised."""
        made: list[Tensor] = []
        if not self.shape.prediction_depth:
            return made
        for module in self.predictions:
            x = module(x, labels, self.embed_tokens, self.tables(self.shape.layers[-1]))
            made.append(x)
        return made

    def _embedded(self, tokens: Tensor) -> Tensor:
        embedding = self.shape.embedding
        with annotate("PP"):
            with annotate("TP"):
                x: Tensor = self.embed_tokens(tokens)
            if embedding.scale != 1.0:
                x = x * embedding.scale
            if embedding.positions is not None:
                x = x + self._positions(tokens.shape[1])
            if embedding.norm is not None:
                x = self.embed_norm(x)
            return F.dropout(x, embedding.dropout, self.training) if embedding.dropout else x

    def _positions(self, seq_len: int) -> Tensor:
        """Return the learned positions [seq, hidden]; they start anew with each document."""
        weight = self.embed_positions.weight
        lengths = self.shape.segment_lengths
        return torch.cat([weight[:length] for length in lengths]) if lengths else weight[:seq_len]

    def _new_tables(self, key: shapes.Rotary | int) -> tuple[Tensor, ...]:
        if isinstance(key, int):
            return (alibi_slopes(key),)
        return rope_tables(key, positions=self.positions, length=self.length)

    def _register(self, tables: tuple[Tensor, ...]) -> tuple[str, ...]:
        kinds = ("cos", "sin") if len(tables) > 1 else ("slopes",)
        again = sum(1 for name in self._buffers if name.startswith(kinds[0]))
        names = tuple(f"{kind}_{again}" if again else kind for kind in kinds)
        for name, table in zip(names, tables, strict=True):
            self.register_buffer(name, table, persistent=False)
        return names


class CausalLM(nn.Module):
    """A decoder with its summed cross-entropy loss.

    Args:
        shape: what it is made of.
        seq_len: longest sequence to prepare rotary tables for; at least the model's context.

    Attributes:
        init_std: standard deviation of the published initialisation (matrices; norms start at 1).
    """

    def __init__(self, shape: shapes.DecoderShape, *, seq_len: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.init_std = shape.init_std
        self.model = Decoder(
            shape,
            positions=max(shape.context_length, seq_len or 0),
            length=seq_len or shape.context_length,
        )
        self.lm_head = Linear(shape.hidden, shape.vocabulary, bias=shape.head.bias)
        if shape.head.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        if shape.adapters is not None:
            add_adapters(self, shape.adapters)
        for name, parameter in self.named_parameters():
            if name.startswith(shape.frozen):
                parameter.requires_grad_(False)
        if not self.lm_head.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew from torch's generator."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif not name.endswith("norm.weight"):
                nn.init.normal_(parameter, std=self.init_std)
        for module in self.modules():
            if isinstance(module, Norm):
                module.reset_parameters()
            elif isinstance(module, AdaptedLinear):
                nn.init.zeros_(module.lora_B)

    def reset_buffers(self) -> None:
        """Fill the position tables (after `to_empty`)."""
        self.model.reset_buffers()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the token losses (fp32).

        Args:
            tokens, labels: [microbatch, seq], int64; labels are the tokens shifted by one.
        """
        self._require_whole_documents(tokens.shape[1])
        x = self.model(tokens)
        further = self.model.further(x, labels)
        with annotate("PP"):
            normed = self.model.norm(x) if self.shape.final_norm is not None else x
            with annotate("TP"):
                loss = summed_loss(normed, labels, projection=self.lm_head, head=self.shape.head)
            for depth, made in enumerate(further, start=1):
                normed = self.model.get_submodule(f"predictions.{depth - 1}.norm")(made)
                with annotate("TP"):
                    targets = ahead(labels, depth, fill=NO_TARGET)
                    more = summed_loss(normed, targets, projection=self.lm_head, head=self.shape.head)
                    loss = loss + more * (LOSS_WEIGHT / len(further))
            return loss

    def _require_whole_documents(self, seq_len: int) -> None:
        lengths = self.shape.segment_lengths
        if lengths and sum(lengths) != seq_len:
            raise ModelError(
                where=self.shape.family, field="segment_lengths", value=f"{sum(lengths)} tokens",
                rule=f"must fill a sequence of {seq_len} tokens",
                fix=f"give lengths that sum to {seq_len}, or set seq_len to {sum(lengths)}",
            )  # fmt: skip


def _positions_of(layer: shapes.Layer) -> shapes.Rotary | int | None:
    """Return what decides a layer's tables: its rotation, the number of heads with biases, or nothing."""
    attention = layer.attention
    if isinstance(attention, shapes.Attention) and attention.alibi:
        return attention.heads
    return attention.rotary
