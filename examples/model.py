# SPDX-License-Identifier: Apache-2.0
"""A byte-level transformer whose sequence is sharded over the ranks of a group with spar.

The model is written once: in a group of one, spar's operations return their input, so that the same code is
the one-process model. A spar.SequenceLayout defines how the sequence is sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import spar
from spar import SequenceLayout
from spar.parallel_state import ParallelState, init_parallel_state

VOCABULARY = 256


def plain(seq: int) -> SequenceLayout:
    """Each rank holds one run of the sequence; inside attention, some heads of all tokens (Ulysses)."""
    return SequenceLayout.even(seq)


@functools.cache  # a process has one parallel state
def ring_state() -> ParallelState:
    ring = 2
    return init_parallel_state(
        ring_attention_size=ring, ulysses_parallel_size=max(1, dist.get_world_size() // ring)
    )


def hybrid(seq: int) -> SequenceLayout:
    """Ring x ulysses, 2 x the rest: each rank holds runs from both ends of the sequence (zigzag).

    Inside attention keys and values go round the ring, so that all ranks have equal work under the causal
    mask; the ranks of a ulysses group share the heads.
    """
    return SequenceLayout.hybrid(seq, ring_state())


def packed(seq: int) -> SequenceLayout:
    """Documents of very different lengths are packed; each rank holds a part of each.

    A token attends to its own document only, without a mask.
    """
    lengths = [3 * seq // 8, seq // 16, 5 * seq // 16]
    return SequenceLayout.packed([*lengths, seq - sum(lengths)])


LAYOUTS: dict[str, Callable[[int], SequenceLayout]] = {"plain": plain, "hybrid": hybrid, "packed": packed}


def alone(layout: SequenceLayout, group: dist.ProcessGroup | None) -> SequenceLayout:
    """Return the layout of the same sequence in one process, a group of one."""
    if layout.kind == "packed":
        return SequenceLayout.packed(layout.cu_seqlens().diff(), group)
    return SequenceLayout.even(layout.total, group)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, layout: SequenceLayout) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        x = x + self.out(spar.attention(q, k, v, layout, causal=True).flatten(2))
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

    def forward(self, tokens: Tensor, labels: Tensor, layout: SequenceLayout) -> Tensor:
        """Return the losses of this rank's tokens, [batch, own tokens]."""
        own_tokens, own_labels = layout.shard([tokens, labels], 1)
        # Backward gathers the table's gradient on every rank: "down" divides it, so that ranks may be summed.
        x = self.embedding(own_tokens) + layout.shard(self.positions, 0, grad_scale="down")
        for block in self.blocks:
            x = block(x, layout)
        logits = self.head(self.norm(x))
        losses = F.cross_entropy(logits.flatten(0, 1), own_labels.flatten(), reduction="none")
        return losses.view_as(own_labels)
