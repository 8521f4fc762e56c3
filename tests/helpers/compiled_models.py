# SPDX-License-Identifier: Apache-2.0
"""Models that do around their blocks what a graph of the whole model could get wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .compiled_blocks import Block, Net


class Twice(Block):
    """Sees whether two arguments are one tensor, as nn.MultiheadAttention does."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        out: Tensor = super().forward(x * 2 if rest[0] is x else x + rest[0])
        return out


class TwiceNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.blocks[0](x, x)
        return self.head(self.blocks[1](x, x * 1))


class TupleNet(Net):
    """Gives each block the same tables, in a tuple, and reads them outside."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        tables = x.cos(), x.sin()
        for block in self.blocks:
            x = block(x, tables)
        return self.head(x * tables[0].mean(1, keepdim=True))


class AddsTables(Block):
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        cos, sin = rest[0]
        out: Tensor = super().forward(x * cos + x.flip(-1) * sin)
        return out


class LossNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x)
        labels = logits.detach().argmax(-1).roll(1, 1)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Teacher(Net):
    """Calls a block without gradients, and goes on with its argument."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        with torch.no_grad():
            target = self.blocks[0](x)
        return self.head(self.blocks[1](x * 2 + target))


class Limited(torch.autograd.Function):
    """Its backward is not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (1e-3 + gradient.abs().max())


class LimitsWhole(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = Limited.apply(self.embed(x))  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LimitsWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return F.linear(out, Limited.apply(self.out.weight))  # type: ignore[no-untyped-call]


class HooksWhole(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if x.requires_grad:
            x.register_hook(lambda g: g / (1 + g.abs().max()))  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InferenceInside(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            shift = self.embed(x).mean()
        x = self.embed(x) + float(shift)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Noise(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x + 0.1 * torch.randn_like(x))
        return out + 0.1 * torch.empty_like(out).uniform_()


class Mixes(Block):
    """Mixes tokens by what has a derivative in forward mode, unlike torch's attention."""

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.mlp(self.norms[0](x)).mean(1, keepdim=True)
        return x + x * mean


class KeepsWhole(Net):
    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class InPlaceOfInput(Net):
    """Its first block changes an argument of the model."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.embed(self.blocks[0](x))))


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


class CountsOnOneRank(Net):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            self.count += 1
        return super().forward(x) * (1 + 0 * self.count)
