"""A byte-level transformer whose sequence is split over the ranks of a group with spar.

The model is written once: in a group of one, spar's operations return their input, so that the same code is
the one-process model. A layout defines how the sequence is split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import spar
from spar.parallel_state import init_parallel_state

VOCABULARY = 256


@dataclass(frozen=True)
class Plain:
    """Each rank holds one run of the sequence; inside attention, some heads of all tokens (Ulysses)."""

    group: dist.ProcessGroup | None  # None is WORLD
    seq: int
    heads: int
    split_scale: str | None = "down"  # spar's defaults, as is gather_scale's
    gather_scale: str | None = "up"

    SEQ: ClassVar[int] = 510  # tokens in a sequence, by default
    SCALES: ClassVar[bool] = True  # whether the layout supports other scales

    @classmethod
    def make(cls, seq: int, heads: int) -> Plain:
        return cls(None, seq, heads)

    def alone(self, group: dist.ProcessGroup | None) -> Plain:
        """Return the layout of the same model in one process."""
        return replace(self, group=group)

    @property
    def sizes(self) -> list[int]:
        """The number of tokens on each rank. They may differ, so a gather needs them."""
        return spar.cal_split_sizes(self.seq, dist.get_world_size(self.group))

    def split(self, x: Tensor, dim: int) -> Tensor:
        return spar.split_forward_gather_backward(x, self.group, dim, self.sizes, self.split_scale)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return spar.gather_forward_split_backward(x, self.group, dim, self.sizes, self.gather_scale)

    def to_heads(self, qkv: Tensor) -> Tensor:
        """Exchange [batch, own tokens, 3, heads, width] for [batch, tokens, 3, own heads, width]."""
        return spar.all_to_all(qkv, self.group, scatter_dim=3, gather_dim=1, gather_size=self.seq)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange [batch, tokens, own heads, width] for [batch, own tokens, heads, width]."""
        return spar.all_to_all(x, self.group, scatter_dim=1, gather_dim=2, gather_size=self.heads)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend causally; q, k and v are [batch, own heads, tokens, width], in natural order."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@dataclass(frozen=True)
class Hybrid(Plain):
    """Ring x ulysses, 2 x the rest: each rank holds runs from both ends of the sequence (zigzag).

    With ring attention, all ranks would have equal work under a causal mask. This example uses Ulysses over
    all ranks instead. Its tokens are in rank order, so the mask compares their positions in the sequence.
    """

    SEQ: ClassVar[int] = 508  # a multiple of twice the ring
    SCALES: ClassVar[bool] = False
    RING: ClassVar[int] = 2

    @classmethod
    def make(cls, seq: int, heads: int) -> Plain:
        world = dist.get_world_size()
        state = init_parallel_state(
            ring_attention_size=cls.RING, ulysses_parallel_size=max(1, world // cls.RING)
        )
        return cls(state.get_cp_group(), seq, heads)

    def alone(self, group: dist.ProcessGroup | None) -> Plain:
        return Plain(group, self.seq, self.heads)

    @property
    def sizes(self) -> list[int]:
        shares = spar.cal_split_sizes(self.seq // self.RING, dist.get_world_size(self.group) // self.RING)
        return [share for share in shares for _ in range(self.RING)]

    def split(self, x: Tensor, dim: int) -> Tensor:
        return spar.split_forward_gather_backward_with_cp(x, dim)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return spar.gather_forward_split_backward_with_cp(x, dim, self.seq)

    @cached_property
    def mask(self) -> Tensor:
        """[tokens, tokens], in rank order: whether the first may attend to the second."""
        positions = spar.gather_forward_split_backward(
            self.split(torch.arange(self.seq), 0), self.group, 0, self.sizes
        )
        return positions[:, None] >= positions

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


@dataclass(frozen=True)
class Packed(Plain):
    """Documents of several lengths are concatenated; each rank holds a part of each.

    A token attends to its own document only. Pad every document to a multiple of the number of ranks, so that
    all ranks hold equally many tokens.
    """

    SEQ: ClassVar[int] = 512
    SCALES: ClassVar[bool] = False

    @cached_property
    def lengths(self) -> list[int]:
        """The documents' lengths, very different ones: 3/8, 1/16, 5/16 and 1/4 of the tokens."""
        quantum = self.seq // 16
        return [6 * quantum, quantum, 5 * quantum, self.seq - 12 * quantum]

    @property
    def sizes(self) -> list[int]:
        return spar.cal_split_sizes_multi(self.lengths, dist.get_world_size(self.group)).sum(1).tolist()

    def split(self, x: Tensor, dim: int) -> Tensor:
        return spar.packed_data_split_forward_gather_backward(x, self.group, self.lengths, dim)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        table = spar.cal_split_sizes_multi(self.lengths, dist.get_world_size(self.group))
        return spar.packed_data_gather_forward_split_backward(x, table, self.group, dim)

    @cached_property
    def mask(self) -> Tensor:
        """[tokens, tokens]: whether both are in one document, and the second not later."""
        lengths = torch.tensor(self.lengths)
        documents = torch.arange(len(lengths)).repeat_interleave(lengths)
        where = torch.stack((torch.arange(self.seq), documents), 1)
        where = spar.gather_forward_split_backward(self.split(where, 0), self.group, 0, self.sizes)
        positions, documents = where.unbind(1)
        return (positions[:, None] >= positions) & (documents[:, None] == documents)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


LAYOUTS = {"plain": Plain, "hybrid": Hybrid, "packed": Packed}


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, layout: Plain) -> Tensor:
        qkv = layout.to_heads(self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)))
        q, k, v = qkv.transpose(1, 3).unbind(2)  # each [batch, own heads, tokens, width]
        attended = layout.attend(q, k, v)
        x = x + self.out(layout.to_tokens(attended.transpose(1, 2)).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return x


class ByteModel(nn.Module):
    def __init__(self, seq: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(0.1 * torch.randn(seq, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)  # at first all bytes are about equally likely

    def forward(self, tokens: Tensor, labels: Tensor, layout: Plain) -> Tensor:
        """Return the losses of this rank's tokens, [batch, own tokens]."""
        # The table of positions is split too: its gradient comes from the split's backward.
        x = self.embedding(layout.split(tokens, 1)) + layout.split(self.positions, 0)
        for block in self.blocks:
            x = block(x, layout)
        own = layout.split(labels, 1)
        losses = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), own.flatten(), reduction="none")
        return losses.view_as(own)
