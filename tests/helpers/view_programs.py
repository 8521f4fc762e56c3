# SPDX-License-Identifier: Apache-2.0
"""Random programs of torch functions: each step depends on shapes alone, and so is the same for parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from helpers.view_cases import PAIRS, Inputs, compare, functions

Step = Callable[[random.Random, Tensor, Tensor], Tensor]
_LARGEST = 4_000  # elements of a tensor that a program keeps


def _dim(rng: random.Random, x: Tensor) -> int:
    return rng.randrange(-x.dim(), x.dim())


def _split(rng: random.Random, size: int) -> list[int]:
    """Return a size as a product of two."""
    first = rng.choice([n for n in range(1, size + 1) if size % n == 0])
    return [first, size // first]


def _reshape(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    shape = list(x.shape)
    for _ in range(rng.randrange(1, 3)):
        if len(shape) > 1 and rng.random() < 0.5:
            at = rng.randrange(len(shape) - 1)
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        elif len(shape) < 5:
            at = rng.randrange(len(shape))
            shape[at : at + 1] = _split(rng, shape[at])
    return x.reshape(shape)


def _index(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    entries: list[Any] = []
    for size in x.shape[: rng.randrange(1, x.dim() + 1)]:
        start = rng.randrange(size)
        stop = rng.randrange(start + 1, size + 1)
        entries += rng.choice(
            [[slice(None)], [slice(start, stop)], [slice(0, stop)], [slice(None, None, 2)], [None, start]]
        )
    return x[tuple(entries)]


def _set(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    x = x * 1
    at, stop = rng.randrange(x.dim()), rng.randrange(1, 6)
    index = (slice(None),) * at + (slice(0, stop),)
    x[index] = rng.choice([0.5, x[index] * 2, x[index].mean()])
    return x


def _like(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    """A tensor that broadcasts with x: y if it fits, else of x."""
    if y.dim() <= x.dim() and all(b in (1, a) for a, b in zip(x.shape[::-1], y.shape[::-1], strict=False)):
        return y
    return rng.choice([x.mean(_dim(rng, x), keepdim=True), x.detach().cos(), x.sum().reshape(())])


def _binary(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    function = rng.choice([torch.add, torch.sub, torch.mul, torch.maximum])
    other = _like(rng, x, y)
    return function(x, other) if rng.random() < 0.7 else function(other, x)


def _cat(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    dim = rng.randrange(x.dim())
    fits = y.dim() == x.dim() and all(
        a == b for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if i != dim
    )
    pieces = [x, y if fits else x.narrow(dim, 0, rng.randrange(1, x.size(dim) + 1))]
    return torch.cat(pieces if rng.random() < 0.5 else pieces[::-1], dim)


def _matmul(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    if x.dim() < 2:
        return x * 2
    other = y if y.dim() == x.dim() and y.shape[:-2] == x.shape[:-2] and y.size(-1) == x.size(-1) else x
    if rng.random() < 0.3:
        return x.transpose(-1, -2) @ x
    out = x @ other.transpose(-1, -2)
    return out.softmax(-1) @ other if rng.random() < 0.5 else out


def _attention(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    if not 3 <= x.dim() <= 4:
        return x.tanh()
    fits = y.dim() == x.dim() and y.shape[:-2] == x.shape[:-2] and y.size(-1) == x.size(-1)
    keys = rng.choice([x, y]) if fits else x
    causal = rng.random() < 0.3 and keys.size(-2) >= x.size(-2)
    return F.scaled_dot_product_attention(x, keys, keys, is_causal=causal)


def _in_place(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    x = x * 1
    return rng.choice([x.mul_(2), x.sin_() if rng.random() < 0.5 else x.add_(_like(rng, x, y).detach())])


def _move(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    dims = list(range(x.dim()))
    rng.shuffle(dims)
    return rng.choice([x.permute(dims), x.movedim(dims[0], dims[-1]), x.transpose(dims[0], dims[-1])])


def _pieces(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    dim = rng.randrange(x.dim())
    size = rng.randrange(1, x.size(dim) + 1)
    pieces = rng.choice([x.split(size, dim), x.chunk(min(3, x.size(dim)), dim), [x.narrow(dim, 0, size)]])
    return rng.choice(pieces) if rng.random() < 0.5 else torch.cat(list(pieces)[::-1], dim)


def _reduce(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    dim, keep = _dim(rng, x), rng.random() < 0.5
    return rng.choice(
        [
            lambda: x.sum(dim, keep),
            lambda: x.mean(dim, keep),
            lambda: x.amax(dim, keep),
            lambda: x.max(dim, keep)[0],
            lambda: x.softmax(dim),
            lambda: x.cumsum(dim),
            lambda: x.var(dim, unbiased=False, keepdim=keep),
            lambda: F.normalize(x, dim=dim),
            lambda: x.logsumexp(dim, keep),
        ]
    )()


def _convolve(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    """Convolve the last dim of each channel, with padding of its own or in front of it."""
    if x.dim() != 3 or x.size(-1) < 4:
        return x.cos()
    channels, span = x.size(1), rng.choice([1, 2, 3, 5])
    weight = torch.linspace(-1, 1, channels * span, dtype=x.dtype).view(channels, 1, span)
    if rng.random() < 0.3:
        side, stride = rng.randrange(span), rng.randrange(1, 4)
        if rng.random() < 0.5:
            return F.conv_transpose1d(x, weight, stride=stride, padding=side, groups=channels)
        return F.conv1d(x, weight, padding=side, stride=stride, groups=channels)
    if rng.random() < 0.5:
        return F.conv1d(x, weight, padding=span // 2, stride=rng.choice([1, 1, 2]), groups=channels)
    if rng.random() < 0.5:
        causal = F.conv1d(x, weight, padding=span - 1, groups=channels)
        return causal[..., : x.size(-1)] if rng.random() < 0.7 else causal
    mode = rng.choice(["constant", "replicate", "reflect"])
    return F.conv1d(F.pad(x, (span // 2, (span - 1) // 2), mode=mode), weight, groups=channels)


def _resample(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    if x.dim() != 3 or x.size(-1) < 2:
        return x.sigmoid()
    return rng.choice(
        [
            lambda: F.interpolate(x, scale_factor=2.0, mode=rng.choice(["nearest", "nearest-exact"])),
            lambda: F.avg_pool1d(x, 2),
            lambda: F.max_pool1d(x, 2, rng.randrange(1, 4), rng.randrange(2)),
            lambda: F.adaptive_avg_pool1d(x, rng.randrange(1, 9)),
            lambda: F.interpolate(x, size=rng.randrange(1, 20), mode=rng.choice(["linear", "nearest"])),
            lambda: F.group_norm(x, 1) if x[0].numel() > 1 else x,
            lambda: F.instance_norm(x),
        ]
    )()


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.tanh()


def _hooked(rng: random.Random, x: Tensor, y: Tensor) -> Tensor:
    """Change the gradient in ways that are not linear, or mix tokens."""
    if not x.requires_grad or rng.random() < 0.3:
        return _Bounded.apply(x)  # type: ignore[no-untyped-call, no-any-return]
    out, dim = x * 1, _dim(rng, x) if x.dim() else 0
    out.register_hook(rng.choice([torch.tanh, lambda g: g.softmax(dim), lambda g: g - g.mean() / 2]))
    return out


STEPS: list[Step] = [
    _reshape,
    _reshape,
    _index,
    _set,
    _binary,
    _binary,
    _cat,
    _matmul,
    _attention,
    _in_place,
    _move,
    _pieces,
    _reduce,
    lambda rng, x, y: rng.choice([F.silu, torch.sin, F.gelu, torch.tanh])(x),
    lambda rng, x, y: x.unsqueeze(_dim(rng, x)) if x.dim() < 5 else x,
    lambda rng, x, y: x.squeeze(),
    lambda rng, x, y: F.layer_norm(x, x.shape[-1:]),
    lambda rng, x, y: x.flip(_dim(rng, x)),
    lambda rng, x, y: torch.stack([x, x * 2], _dim(rng, x)) if x.dim() < 5 else x,
    lambda rng, x, y: x.repeat_interleave(2, _dim(rng, x)),
    lambda rng, x, y: x * torch.linspace(0, 1, x.size(-1), dtype=x.dtype),
    lambda rng, x, y: torch.where(x > 0, x, x * 0.1),
    lambda rng, x, y: F.pad(x, (1, 0)),
    lambda rng, x, y: F.dropout(x, 0.3),
    _convolve,
    _resample,
    _hooked,
]


def program(seed: int, steps: int, others: Sequence[Step] = ()) -> Callable[..., Any]:
    """Return a function of (x, y, w, b, ids, mask) that runs random steps, and returns its last tensors.

    others: steps of which three in ten are drawn, beside those of torch functions.
    """

    def run(x: Tensor, y: Tensor, w: Tensor, b: Tensor, ids: Tensor, mask: Tensor) -> list[Tensor]:
        rng = random.Random(seed)
        kept = [x, y, F.linear(x, w, b), x * mask[..., None]]
        for _ in range(steps):
            x, y = rng.choice(kept), rng.choice(kept)
            if x.dim() == 0:
                continue
            is_other = others and rng.random() < 0.3
            out = rng.choice(others if is_other else STEPS)(rng, x, y)
            if 0 < out.numel() <= _LARGEST and out.dim() <= 5:
                kept[rng.randrange(len(kept))] = out
        return kept

    return run


def failures(rng: random.Random, group: dist.ProcessGroup) -> list[str]:
    """Run a random program, or one of the expressions; return what is wrong with it."""
    seed, pair = rng.randrange(1 << 30), rng.choice(PAIRS)
    name, function = f"program {seed}", program(seed, 14)
    if rng.random() < 0.5:
        name, function = rng.choice([*functions().items()])
    try:
        problem = compare(group, function, pair, Inputs(seed), 1e-7)
    except RuntimeError as error:
        problem = None if "changed in place through another one" in str(error) else repr(error)
    return [f"{name} of {pair}: {problem}"] if problem else []
