# SPDX-License-Identifier: Apache-2.0
"""Models whose blocks do what a compiled block could get wrong, and their comparison with one process."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spar
from spar._model.model import _BlockForward
from spar._model.report import Report

from .averages import gradients

D, HEADS, TOKENS = 16, 4, 21
BACKEND = "aot_eager"


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(D), nn.LayerNorm(D)])
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def attend(self, x: Tensor) -> Tensor:
        size, total, width = x.shape
        q, k, v = self.qkv(x).view(size, total, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)
        return self.out(y.transpose(1, 2).reshape(size, total, width))

    def forward(self, x: Tensor, *rest: Any) -> Any:
        x = x + self.attend(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Net(nn.Module):
    """kinds: what makes each block."""

    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(8, D)
        self.blocks = nn.ModuleList([kind() for kind in kinds])
        self.head = nn.Linear(D, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- blocks that read and branch ----


class ByLength(Block):
    """Branches on the length, and adds positions."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 19:
            x = x * 2
        return super().forward(x + torch.arange(x.shape[1]).view(1, -1, 1) / x.shape[1]) / x.shape[1]


class ByStrides(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.stride(0) == x.shape[1] * x.shape[2] and x.is_contiguous():
            x = x * 2
        return super().forward(x)


class ByItem(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * torch.tanh(x.mean()).item())


class ByValue(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if x.mean() > 0 else x)


# ---- blocks with state ----


class Counter(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Running(Block):
    """Changes one buffer in place, and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(D))
        self.register_buffer("newest", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.running.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        y = super().forward(x) + self.running + self.newest
        self.newest = x.detach().mean((0, 1))
        return y


class KeepsInput(Block):
    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return super().forward(x)


class KeepsOutput(Block):
    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept * 2


class KeepingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.blocks[0].kept + self.blocks[1].kept)


class ReadsMean(Block):
    shared: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shared.mean((0, 1))


class ReadsLength(Block):
    shared: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.shared.shape[1]


class SharingNet(Net):
    """Gives its second block a whole tensor as long as a rank's part, or a part."""

    gives_part = False

    def __init__(self, kind: Callable[[], nn.Module], local: int) -> None:
        super().__init__(Block, kind)
        self.register_buffer("table", torch.linspace(-1, 1, 2 * local * D).view(2, local, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x))
        self.blocks[1].shared = x * 1 if self.gives_part else self.table
        return self.head(self.blocks[1](x))


# ---- blocks that change arguments, or return them ----


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(self.norms[0](x * 1))
        x += y
        x.mul_(0.5)
        return x * 1 + self.mlp(self.norms[1](x * 1))


class InPlaceNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x) * 1)
        for block in self.blocks[1:]:
            y = x * 1
            x = block(y) + y
        return self.head(x)


class Returns(Block):
    def forward(self, x: Tensor) -> Any:
        return x, super().forward(x), x.transpose(1, 2)


class ReturningNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            a, y, t = block(x)
            x = a + y + t.transpose(1, 2)
        return self.head(x)


class Viewing(Block):
    def forward(self, x: Tensor) -> Any:
        return x.view(x.shape[0], -1, D), super().forward(x)


class Slicing(Block):
    def forward(self, x: Tensor) -> Any:
        return x[:, 3:5], super().forward(x)


class ViewingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x))[1]
        for block in self.blocks[1:]:
            x = x * 1
            a, y = block(x)
            a *= 2  # x is changed, too
            x = x + y
        return self.head(x)


class Two(Block):
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x.mul_(0.5)
        return super().forward(x * 1) + rest[0]


class OverlappingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x)) * 1
        return self.head(self.blocks[1](x, x.transpose(0, 1).transpose(0, 1)))


class Fills(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y[:, 2:7] = 0.5
        y[:, :, :3] += 1
        y.masked_fill_(y > 2, 0.1)
        z = torch.zeros_like(x)
        z[:, ::2] = y[:, ::2]
        return super().forward(y + z)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale / x.shape[1] + x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient * ctx.scale / x.shape[1] + gradient.flip(1).cumsum(1).flip(1), None


class Custom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Square.apply(x, 0.5))  # type: ignore[no-untyped-call]


class RunsWhole(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.cumsum(1) / x.shape[1] + x.sort(1).values


class Pieces(Block):
    def forward(self, x: Tensor) -> Tensor:
        a, b, c = x.split([5, 9, x.shape[1] - 14], 1)
        return super().forward(torch.cat([b * 2, self.norms[0](a), c.softmax(-1)], 1))


class HooksGradient(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: g / (1 + g.abs().max()))  # type: ignore[no-untyped-call]
        return y


class Dropout(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class CheckpointInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self.attend, self.norms[0](x), use_reentrant=False)
        return x + self.mlp(self.norms[1](x))


class CheckpointAround(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class ReentrantAround(CheckpointAround):
    reentrant = True


class AutocastInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).to(x.dtype)


class Joined(nn.Module):
    """Joins the results of two blocks: its third block gets one shape of many layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, D), nn.Linear(D, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.blocks[0](self.embed(x)), self.blocks[1](self.embed(y) * 2)
        return self.head(self.blocks[2](torch.cat([x, y], 1)))


# ---- comparison ----


def inputs(seed: int = 0, total: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, total, 8, generator=generator, dtype=torch.float64)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return make().double()


def of(kind: Any, net: Any = Net, **options: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of two blocks of a kind."""
    return each(*[functools.partial(kind, **options)] * 2, net=net)


def each(*kinds: Callable[[], nn.Module], net: Any = Net) -> Callable[[], nn.Module]:
    """Return what makes a model of a block of each kind."""
    return functools.partial(net, *kinds)


def compile_blocks(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend=BACKEND, fullgraph=True)


def compile_model(model: Any) -> None:
    model.compile(backend=BACKEND)


def compile_each_block(model: Any, backend: str = BACKEND) -> None:
    """Let torch.compile have each block of a parallelized model, but not the model."""
    for module, _, forward in vars(model)["_spar_view"].forwards:
        if isinstance(forward, _BlockForward):
            module.compile(backend=backend)


def graphs_of(model: nn.Module) -> int:
    """Return how many graphs were made of a parallelized model and its blocks."""
    return sum(kind.graphs for kind in vars(model)["_spar_view"].compiled.kinds.values())


class Compared:
    """A sharded model whose blocks are compiled, or that is itself, and its copy in one process."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        group: dist.ProcessGroup,
        compiled: Callable[[nn.Module], Any] = compile_blocks,
        keeps_graphs: bool = False,
        **options: Any,
    ) -> None:
        if not keeps_graphs:
            torch._dynamo.reset()
        self.group, self.model = group, made(make)
        self.whole = copy.deepcopy(self.model)
        self.report: Report = spar.parallelize(self.model, group, **options)
        call = compiled(self.model)
        self.call: Any = self.model if call is None else call

    @property
    def graphs(self) -> int:
        return graphs_of(self.model)

    @property
    def reasons(self) -> str:
        return "; ".join(map(str, self.report.eager))

    def apply(self, change: Callable[[Any], Any]) -> None:
        for model in (self.whole, self.model):
            change(model)

    def step(self, *given: Tensor, limit: float = 1e-9) -> None:
        """Compare a training step."""
        outs = []
        for model, call in ((self.whole, self.whole), (self.model, self.call)):
            model.zero_grad()
            torch.manual_seed(3)
            outs.append(call(*given))
            outs[-1].square().mean().backward()
        expected, found = gradients(self.whole), gradients(self.model, self.group)
        self._compare([outs[0], *expected], [outs[1], *found], limit)

    def infer(self, *given: Tensor, limit: float = 1e-9) -> None:
        with torch.no_grad():
            self._compare([self.whole(*given)], [self.call(*given)], limit)

    def _compare(self, expected: Sequence[Tensor], found: Sequence[Tensor], limit: float) -> None:
        expected = [*expected, *self.whole.buffers()]
        for a, b in zip(expected, [*found, *self.model.buffers()], strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            error = float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) if a.numel() else 0.0
            assert error < limit, (error, self.reasons)
