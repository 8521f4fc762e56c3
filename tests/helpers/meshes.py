# SPDX-License-Identifier: Apache-2.0
"""A small decoder, its plans of tensor parallelism, and its gradients in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, WIDTH, HEAD = 28, 16, 2


class Attention(nn.Module):
    """8 heads of queries, 4 of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Decoder(nn.Module):
    """Returns logits, or the loss of labels. Its stages in a pipeline lack what the others have."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: Any = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm: Any = nn.LayerNorm(WIDTH)
        self.head: Any = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.layers:
            x = block(x)
        if self.head is not None:
            x = self.head(self.norm(x))
        return x if labels is None else loss_of(x, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().double()


def batch(length: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Return ids and labels."""
    ids = torch.randint(VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(length))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# ---- tensor parallelism ----


def layer_plan(sequence: bool) -> dict[str, Any]:
    """Return how a block is divided: activations are plain tensors between its parts, or DTensors."""
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        last = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        to_whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"n1": SequenceParallel(), "n2": SequenceParallel(), "attention": to_whole}
        plan |= {"attention.o": last, "down": last, "up": ColwiseParallel(input_layouts=Shard(1))}
    return plan


def vocabulary_plan(kind: str) -> dict[str, Any]:
    """Return how the embedding and the head are divided by the vocabulary."""
    embedding = RowwiseParallel(input_layouts=Replicate())
    if kind == "DTensor logits":
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        return {"embedding": embedding, "head": head}
    if kind == "sequence":
        first = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        return {"embedding": first, "norm": SequenceParallel(), "head": head}
    return {"embedding": embedding, "head": ColwiseParallel(output_layouts=Replicate())}


def divide(model: Decoder, tp: DeviceMesh, kind: str = "layers") -> None:
    """Divide a model over tp: "layers", "vocabulary" also, "DTensor logits", or "sequence"."""
    for block in model.layers:
        parallelize_module(block, tp, layer_plan(kind == "sequence"))
    if kind != "layers":
        parallelize_module(model, tp, vocabulary_plan(kind))


# ---- gradients ----


def full(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def of_one_process(ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model = decoder()
    loss = model(ids, labels)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def mean(x: Tensor, groups: Sequence[Any]) -> Tensor:
    """Return the mean over the ranks of each group in turn."""
    x = x.detach().clone()
    for group in groups:
        dist.all_reduce(x, group=group)
        x /= group.size()
    return x


def same(what: Any, found: Tensor, expected: Tensor) -> None:
    assert torch.allclose(found, expected, 1e-8, 1e-10), (what, (found - expected).abs().max())


def check_gradients(model: nn.Module, expected: dict[str, Tensor], groups: Sequence[Any], what: Any) -> None:
    """Compare gradients that are yet to be averaged over groups, of all parameters of a model or stage."""
    for name, p in model.named_parameters():
        same((what, name), mean(full(p.grad), groups), expected[name])
