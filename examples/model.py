"""A byte-level transformer whose sequence is spread over the ranks of a group with spar.

The model is written once: in a group of one spar's operations return their input itself, so that the same
code is the one-process model. A layout says how the sequence is spread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import spar

VOCABULARY = 256


@dataclass(frozen=True)
class Plain:
    """Each rank holds one run of the sequence; inside attention, some heads of all of it (Ulysses)."""

    group: dist.ProcessGroup | None  # None is WORLD
    seq: int
    heads: int
    split_scale: str | None = "down"  # these two are the defaults of spar
    gather_scale: str | None = "up"

    @property
    def sizes(self) -> list[int]:
        """How many tokens each rank holds. They may differ, so a gather has to be told."""
        return spar.cal_split_sizes(self.seq, dist.get_world_size(self.group))

    def split(self, x: Tensor, dim: int) -> Tensor:
        return spar.split_forward_gather_backward(x, self.group, dim, self.sizes, self.split_scale)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return spar.gather_forward_split_backward(x, self.group, dim, self.sizes, self.gather_scale)

    def to_heads(self, qkv: Tensor) -> Tensor:
        """[batch, own tokens, 3, heads, width] to [batch, tokens, 3, own heads, width], in one exchange."""
        return spar.all_to_all(qkv, self.group, scatter_dim=3, gather_dim=1, gather_size=self.seq)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[batch, tokens, own heads, width] to [batch, own tokens, heads, width]."""
        return spar.all_to_all(x, self.group, scatter_dim=1, gather_dim=2, gather_size=self.heads)


LAYOUTS = {"plain": Plain}


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
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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
        nn.init.normal_(self.head.weight, std=0.02)  # begin with all bytes about equally likely

    def forward(self, tokens: Tensor, labels: Tensor, layout: Plain) -> Tensor:
        """The mean loss over the whole sequence, the same number on every rank."""
        # The table of positions is itself split, so its gradient comes from the split's backward.
        x = self.embedding(layout.split(tokens, 1)) + layout.split(self.positions, 0)
        for block in self.blocks:
            x = block(x, layout)
        own = layout.split(labels, 1)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), own.flatten(), reduction="none")
        return layout.gather(loss.view_as(own), 1).mean()
