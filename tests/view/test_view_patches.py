# SPDX-License-Identifier: Apache-2.0
"""What is no torch function, in a view: it runs on whole tensors, and what it writes is in the parts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from helpers.view_cases import Inputs, compare
from torch import Tensor

import spar

pytestmark = pytest.mark.one_transport

PAIRS = [
    ("tokens", "tokens"),
    ("tokens", "whole"),
    ("features", "tokens"),
    ("inner", "frames"),
    ("uneven", "tokens"),
]


class Double(torch.autograd.Function):
    """Changes its argument, as backward knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient.clamp(-1, 1)


class Accumulate(torch.autograd.Function):
    """Changes an argument without a word, in a way that torch counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.cumsum(1))
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Uncounted(torch.autograd.Function):
    """Changes an argument as a kernel does: torch does not count it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        x.data.sub_(x.mean(1, keepdim=True))
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *[None for _ in ctx.needs_input_grad[1:]]  # type: ignore[return-value]


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Grow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.unsqueeze_(0).sum()


class Held(torch.autograd.Function):
    """Reads a tensor of an object."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: SimpleNamespace) -> Tensor:
        total: Tensor = x + holder.tensor
        return total


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x.mul_(2).cumsum(1)


@torch.jit.script
def first_of(values: list[Tensor]) -> Tensor:
    values[0].add_(values[1].mean())
    return values[1] * 2


def accumulated(x: Tensor, y: Tensor, *_: Any) -> Tensor:
    total = torch.zeros_like(x)
    out: Tensor = Accumulate.apply(x, total) + Accumulate.apply(x * 2, total)  # type: ignore[no-untyped-call]
    return out + total * y


def uncounted(x: Tensor, y: Tensor, *_: Any) -> Tensor:
    z = x.detach().cumsum(1)
    aside = z[:1] * 1
    Uncounted.apply(z, z[:1], aside)  # type: ignore[no-untyped-call]
    return z * x + y


def of_entry(x: Tensor, y: Tensor, *_: Any) -> Tensor:
    z = x * 2
    out: Tensor = first_of([z, y * 1])
    return out.sum() + z


def inferred(x: Tensor, *_: Any) -> Tensor:
    with torch.inference_mode():
        z = x.detach() * 2
        Accumulate.apply(z[:, :, :1] * 1, z)  # type: ignore[no-untyped-call]
        out = scripted(z) + z
    return out.clone() * x


def changed(change: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    def run(x: Tensor, y: Tensor, *_: Any) -> Tensor:
        z = x * 2
        out = change(z)
        return z * y + (out if isinstance(out, Tensor) else 0)

    return run


CASES: dict[str, Callable[..., Tensor]] = {
    "mark_dirty": changed(Double.apply),
    "mark_dirty of a view": changed(lambda z: Double.apply(z[:1]).sum()),  # type: ignore[no-untyped-call]
    "an argument": accumulated,
    "what torch does not count": uncounted,
    "TorchScript": changed(scripted),
    "an entry of a list": of_entry,
    "inference mode": inferred,
}


def check_writes(rank: int, world: int, group: dist.ProcessGroup) -> None:
    for name, function in CASES.items():
        for pair in PAIRS:
            assert compare(group, function, pair, Inputs(3)) is None, (name, pair)
    refused: dict[str, Callable[[Tensor], Any]] = {
        "that was changed in place through another one": lambda z: Same.apply(z.detach()).add_(1),  # type: ignore[no-untyped-call]
        "tensors that share memory, of shapes": lambda z: Accumulate.apply(z, z.detach()),  # type: ignore[no-untyped-call]
        "_foreach_mul_ at .* changes one of two tensors": lambda z: torch._foreach_mul_(
            [z.detach(), z.detach()], 2
        ),
        "Held at .* has a sharded tensor otherwise than by an argument": (
            lambda z: Held.apply(z, SimpleNamespace(tensor=z * 1))  # type: ignore[no-untyped-call]
        ),
        "Grow at .* changes the shape of a sharded tensor in place": lambda z: Grow.apply(z.detach()),  # type: ignore[no-untyped-call]
    }
    for message, change in refused.items():
        with pytest.raises(RuntimeError, match=message):
            compare(group, changed(change), ("tokens", "tokens"), Inputs(3))


@pytest.mark.parametrize("world", [2, 3])
def test_what_code_outside_of_torch_writes_is_in_the_parts(ranks: Ranks, world: int) -> None:
    ranks(world, check_writes)


def check_composable(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """It imports the generator of checkpoints by its name."""
    from torch.distributed._composable import checkpoint

    def gradients(*groups: dist.ProcessGroup) -> list[Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
        for block in model.layers:
            checkpoint(block)
        for own in groups:
            spar.parallelize(model, own)
        model(
            torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1)).double()
        ).sin().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for found, expected in zip(gradients(group), gradients(), strict=True):
        dist.all_reduce(found, group=group)
        torch.testing.assert_close(found / world, expected)


def test_composable_checkpoints_recompute_in_the_view(ranks: Ranks) -> None:
    ranks(2, check_composable)


class Seeded(torch.nn.Module):
    """Takes a seed of its own, as models do that run a layer again with the same dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Dropout(0.5)])

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        seed = torch.seed()
        out = self.blocks[0](x)
        torch.manual_seed(seed)
        return out - self.blocks[0](x), seed


def check_seeds(rank: int, world: int, group: dist.ProcessGroup) -> None:
    model = Seeded()
    spar.parallelize(model, group, blocks=["blocks.0"])
    torch.manual_seed(5)
    seeds = []
    for _ in range(2):
        out, seed = model(torch.ones(2, 12, 6))
        assert not out.any()
        seeds.append(seed)
    assert seeds[0] != seeds[1]
    found = [None] * world
    dist.all_gather_object(found, seeds, group=group)
    assert found == [seeds] * world
    assert torch.seed is not None and torch.random.seed is torch.seed


def test_ranks_take_the_same_seed(ranks: Ranks) -> None:
    ranks(2, check_seeds)


def check_failed_patches(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """What a library's patch raises leaves nothing replaced."""
    model = Seeded()
    spar.parallelize(model, group, blocks=["blocks.0"])
    view = vars(model)["_spar_view"].view
    own = torch.seed, torch.autograd.Function.apply
    library, view.library = view.library, view.library._replace(around=failing)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 12, 6))
    assert (torch.seed, torch.autograd.Function.apply) == own
    view.library = library
    torch.manual_seed(5)
    model(torch.ones(2, 12, 6))


def failing() -> Any:
    return 1 / 0


def test_patches_that_fail_are_undone(ranks: Ranks) -> None:
    ranks(2, check_failed_patches)
