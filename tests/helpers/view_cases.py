# SPDX-License-Identifier: Apache-2.0
"""Expressions of torch, and random programs of them, run on whole tensors and on parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spar._group.registry import place_of
from spar._model import rules  # noqa: F401 - registers them
from spar._model.part import Part, Parts, Uneven
from spar._model.patches import intercepted
from spar._model.view import View

B, N, D = 2, 12, 6

# Parts of [B, N, D]: the dim, the lengths of its sequences, and what is around the tokens in it.
PARTS: dict[str, tuple[int, tuple[int, ...], int, int] | None] = {
    "tokens": (1, (12,), 1, 1),
    "joint": (1, (5, 7), 1, 1),
    "three": (1, (4, 1, 7), 1, 1),
    "samples": (0, (2,), 1, 1),
    "features": (2, (6,), 1, 1),
    "frames": (1, (4,), 3, 1),
    "inner": (1, (6,), 1, 2),
    "uneven": (1, (12,), 1, 1),  # on other numbers of tokens than the layout's
    "whole": None,
}
PAIRS = [
    ("tokens", "tokens"),
    ("tokens", "whole"),
    ("joint", "joint"),
    ("joint", "tokens"),
    ("whole", "three"),
    ("samples", "tokens"),
    ("frames", "frames"),
    ("inner", "whole"),
    ("features", "tokens"),
    ("uneven", "tokens"),
    ("tokens", "features"),
]
UNEVEN = {1: (12,), 2: (9, 3), 3: (0, 5, 7), 4: (0, 1, 11, 0)}  # by the number of ranks


class Inputs:
    """x, y [B, N, D], w [D, D], b [D], ids [B, N], mask [B, N] and index [3]: the same on all ranks."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.x, self.y, self.w, self.b = draw(B, N, D), draw(B, N, D), draw(D, D), draw(D)
        self.ids = torch.randint(D, (B, N), generator=generator)
        self.mask = torch.rand(B, N, generator=generator) > 0.3
        self.mask[:, 0] = True

    def leaves(self) -> list[Tensor]:
        return [t.clone().requires_grad_() for t in (self.x, self.y, self.w, self.b)]


Function = Callable[..., Any]


def compare(
    group: dist.ProcessGroup,
    function: Function,
    pair: tuple[str, str],
    inputs: Inputs,
    limit: float = 1e-10,
    parts: Parts | None = None,
    view: View | None = None,
) -> str | None:
    """Run a function of (x, y, w, b, ids, mask) on whole tensors and on parts; return what differs.

    parts: by default of even sequences. view: one that ran before; by default a new one.
    """
    whole = inputs.leaves()
    _seed()
    expected = _tensors(function(*[_fresh(t) for t in whole[:2]], *whole[2:], inputs.ids, inputs.mask))
    place = place_of(group)
    view = view or View(parts or Parts(group, place.world, place.rank))
    mine = inputs.leaves()
    _seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_pair = [_part(view.parts, name) for name in pair]
        inner = [_fresh(t) for t in mine[:2]]
        shards = [t if p is None else view.shard(t, p) for t, p in zip(inner, of_pair, strict=True)]
        ids, mask = inputs.ids, inputs.mask
        if of_pair[0] is not None and of_pair[0].dim < 2:
            ids, mask = (view.shard(t, of_pair[0]) for t in (ids, mask))
        with intercepted(view), view.forward():
            found = _tensors(view.output(function(*shards, *mine[2:], ids, mask)))
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i} is {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}"
        of_dtype = limit if b.dtype == torch.float64 else 1e-5
        if not torch.allclose(a.double(), b.double(), of_dtype, of_dtype, equal_nan=True):
            return f"result {i} differs by {(a.double() - b.double()).abs().max()}"
    return _gradients(group, found, expected, mine, whole, limit)


def _seed() -> None:
    torch.default_generator.manual_seed(1)  # torch.manual_seed keeps a stack of each call for devices to come


def _gradients(
    group: dist.ProcessGroup,
    found: list[Tensor],
    expected: list[Tensor],
    mine: list[Tensor],
    whole: list[Tensor],
    limit: float,
) -> str | None:
    both = [(a, b) for a, b in zip(found, expected, strict=True) if b.requires_grad]
    if not both:
        return None
    generator = torch.Generator().manual_seed(5)
    uppers = [torch.randn(b.shape, generator=generator, dtype=b.dtype) for _, b in both]
    right = torch.autograd.grad(
        [b for _, b in both], whole, uppers, allow_unused=True, materialize_grads=True
    )
    if not all(a.requires_grad for a, _ in both):
        return "a result has lost its gradient"
    own = torch.autograd.grad([a for a, _ in both], mine, uppers, allow_unused=True, materialize_grads=True)
    sums = torch.cat([a.flatten() for a in own])  # of each rank: one call for all
    dist.all_reduce(sums, group=group)
    for name, total, b in zip("xywb", sums.split([b.numel() for b in right]), right, strict=True):
        a = total.view_as(b) / group.size()
        single = any(t.dtype == torch.float32 for t in expected)
        if not torch.allclose(a, b, 1e-6 if single else limit, 1e-6 if single else limit, equal_nan=True):
            return f"the gradient of {name} differs by {(a - b).abs().max()}"
    return None


def viewed(group: dist.ProcessGroup, run: Callable[[View, Tensor], Any], strict: bool = False) -> Any:
    """Run a function of a view and a part of [2, 12, 6]."""
    place = place_of(group)
    view = View(Parts(group, place.world, place.rank), strict)
    x = view.shard(Inputs(1).x, view.parts.part(1, (12,)))
    with intercepted(view), view.forward():
        return run(view, x)


def _fresh(x: Tensor) -> Tensor:
    return x * 1


def _part(parts: Parts, name: str) -> Part | None:
    values = PARTS[name]
    if name == "uneven" and parts.state is None:  # a ring has none
        return parts.part(1, (Uneven(UNEVEN[parts.world]),))
    return None if values is None else parts.part(*values)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [torch.tensor(float(value), dtype=torch.float64)]


class Double(torch.autograd.Function):
    """A Function whose backward depends on the number of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.count = x.size(1)
        return x * 2 / x.size(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2 / grad.size(1)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    out: Tensor = (x - x.mean(1, keepdim=True)) * x.size(1)
    return out


def H(x: Tensor) -> Tensor:
    return x.unflatten(-1, (3, 2)).transpose(1, 2)


def functions() -> dict[str, Function]:
    """Return those of view_expressions.txt; one with several statements assigns its result to out."""
    lines = Path(__file__).with_name("view_expressions.txt").read_text().splitlines()
    return {line: compiled(line) for line in lines}


def compiled(line: str) -> Function:
    code = compile(line if "out =" in line else f"out = {line}", line, "exec")

    def run(x: Tensor, y: Tensor, w: Tensor, b: Tensor, ids: Tensor, mask: Tensor) -> Any:
        scope = {"x": x, "y": y, "w": w, "b": b, "ids": ids, "mask": mask, "torch": torch, "F": F, "H": H}
        scope |= {"Double": Double, "scripted": scripted}
        exec(code, scope)
        return scope["out"]

    return run
