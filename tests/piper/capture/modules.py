"""Small annotated modules: each shows one thing that capture must get right."""

import torch
import torch.nn.functional as F
from torch import nn

from piper import annotate

HIDDEN, VOCABULARY = 16, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        with annotate("PP"), annotate("LAYER"):
            return x + self.down(F.relu(self.up(x)))


class Chain(nn.Module):
    """Embedding, equal blocks, head."""

    def __init__(self, block=Block, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, labels)

    def loss(self, x, labels):
        with annotate("PP"):
            return F.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten(), reduction="sum")


class Skip(Chain):
    """The embedding is added again before the head, over all segments between."""

    def forward(self, tokens, labels):
        with annotate("PP"):
            embedded = self.embed(tokens)
        x = embedded
        for block in self.blocks:
            x = block(x)
        with annotate("PP"):
            x = x * embedded
        return self.loss(x, labels)


class Anchored(Chain):
    """Every block takes the embedding too: its gradient is a sum over blocks."""

    def __init__(self, blocks=3):
        super().__init__(AnchoredBlock, blocks)

    def forward(self, tokens, labels):
        with annotate("PP"):
            embedded = self.embed(tokens)
        with annotate("PP"):
            x = F.relu(embedded)
        for block in self.blocks:
            x = block(x, anchor=embedded)
        return self.loss(x, labels)


class AnchoredBlock(Block):
    def forward(self, x, *, anchor):
        with annotate("PP"), annotate("LAYER"):
            return self.down(F.relu(self.up(x))) * anchor


class PairBlock(Block):
    """Two tensors in, two out, and two segments inside."""

    def forward(self, pair):
        x, gate = pair
        with annotate("PP"):
            inner = F.relu(self.up(x))
            gate = torch.sigmoid(gate)
        with annotate("PP"):
            return self.down(inner) * gate, gate


class Pairs(Chain):
    def __init__(self, blocks=3):
        super().__init__(PairBlock, blocks)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
            gate = torch.tanh(x)
        for block in self.blocks:
            x, gate = block((x, gate))
        with annotate("PP"):
            x = x + gate
        return self.loss(x, labels)


class NumberedBlock(Block):
    """Its index decides what it computes, so that it has no equal sibling."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        with annotate("PP", self.number + 1), annotate("LAYER", self.number):
            return x + self.down(F.relu(self.up(x)) * float(self.number + 1))


class Numbered(Chain):
    def __init__(self, blocks=3):
        super().__init__(blocks=0)
        self.blocks = nn.ModuleList(NumberedBlock(i) for i in range(blocks))


class NestedBlock(Block):
    def forward(self, x):
        with annotate("PP"):
            h = self.up(x)
            with annotate("ACT"):
                h = F.relu(h)
            with annotate("FIXED", 7):
                h = h * 2.0
            return self.down(h)


class Unscoped(Block):
    """The scope is opened by the caller: the block alone is no whole number of segments."""

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class OneSegment(Chain):
    """All blocks in one segment."""

    def __init__(self, blocks=3):
        super().__init__(Unscoped, blocks)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        with annotate("PP"):
            for block in self.blocks:
                x = block(x)
        return self.loss(x, labels)


class SharedBlock(Chain):
    """One block called three times: its parameters are in three segments."""

    def __init__(self):
        super().__init__(blocks=2)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0], self.blocks[0]):
            x = block(x)
        return self.loss(x, labels)


class HalfUsed(Chain):
    """The last block's second output is thrown away, so its backward differs from the others'."""

    def __init__(self, blocks=3):
        super().__init__(TwoHeads, blocks)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        side = x
        for block in self.blocks:
            x, side = block(x, side)
        return self.loss(x, labels)


class TwoHeads(Block):
    def forward(self, x, side):
        with annotate("PP"):
            return self.down(F.relu(self.up(x))), side * x


class Tied(Chain):
    def __init__(self, blocks=2):
        super().__init__(blocks=blocks)
        self.head.weight = self.embed.weight


class Buffered(Chain):
    """Blocks share a table that is a buffer, handed down as an argument."""

    def __init__(self, blocks=3):
        super().__init__(BufferedBlock, blocks)
        self.register_buffer("table", torch.ones(64, HIDDEN), persistent=False)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        return self.loss(x, labels)


class BufferedBlock(Block):
    def forward(self, x, table):
        with annotate("PP"), annotate("LAYER"):
            return x + self.down(F.relu(self.up(x * table[: x.shape[1]])))


class Chunked(Chain):
    """Two views of one tensor cross."""

    def forward(self, tokens, labels):
        with annotate("PP"):
            first, second = self.embed(tokens).chunk(2, dim=-1)
        with annotate("PP"):
            x = torch.cat((F.relu(first), first), -1)
        with annotate("PP"):
            x = x + torch.cat((second, second), -1)
        return self.loss(x, labels)


class InPlace(Chain):
    """The middle segment changes the embedding in place: the head takes the changed tensor."""

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
        with annotate("PP"):
            x.mul_(2.0)
        return self.loss(x, labels)


class BatchSecond(Chain):
    """Sequence first, microbatch second."""

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens.t())
        for block in self.blocks:
            x = block(x)
        with annotate("PP"):
            x = x.transpose(0, 1).contiguous()
        return self.loss(x, labels)


class Attention(nn.Module):
    """One attention layer; the options of `F.scaled_dot_product_attention` are given."""

    def __init__(self, kv_heads=4, **options):
        super().__init__()
        self.kv_heads = kv_heads
        self.options = options
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = nn.Linear(HIDDEN, kv_heads * 4, bias=False)
        self.value = nn.Linear(HIDDEN, kv_heads * 4, bias=False)

    def forward(self, tokens, labels):
        with annotate("PP"):
            x = self.embed(tokens)
            q, k, v = (
                p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.query, self.key, self.value)
            )
            options = dict(self.options)
            if options.pop("mask", False):
                options["attn_mask"] = torch.ones(
                    x.shape[1], x.shape[1], dtype=torch.bool, device=x.device
                ).tril()
            y = F.scaled_dot_product_attention(q, k, v, **options)
            return y.float().square().sum()
