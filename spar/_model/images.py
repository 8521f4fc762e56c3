# SPDX-License-Identifier: Apache-2.0
"""The rows of images and videos as a sequence, or their columns: of which each rank has its part."""

from __future__ import annotations

from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from .part import Part, Parts, evenest, part_of
from .view import View

_CONVOLUTIONS = (torch.nn.Conv2d, torch.nn.Conv3d)
_OF_LINES = (torch.nn.Conv1d, torch.nn.MaxPool1d, torch.nn.AvgPool1d)
_OF_IMAGES = (*_CONVOLUTIONS, torch.nn.MaxPool2d, torch.nn.MaxPool3d, torch.nn.AvgPool2d, torch.nn.AvgPool3d)


def shard_rows(view: View, model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Shard the rows of the largest of a model's images, and of those that are as high; None without images.

    Its columns, where these lie more evenly on the ranks; the length of lines [N, C, L]. Called outside of
    the view. Lists of tensors stay, as models keep in them what the next call needs.
    """
    channels = _channels_of_lines(model)
    images = [x for x in (*args, *kwargs.values()) if _is_image(x, channels)]
    if not images:
        return None
    main = max(images, key=Tensor.numel)
    part = _part_of_image(view.parts, main, model)
    if part is None:
        return args, kwargs
    behind = main.dim() - part.dim

    def sharded(x: Any) -> Any:
        if not _is_image(x, channels) or x.size(-behind) != part.whole:
            return x
        return view.shard(x, part.at(x.dim() - behind))

    return tuple([sharded(x) for x in args]), {name: sharded(x) for name, x in kwargs.items()}


def _is_image(x: Any, channels: int | None) -> bool:
    """Whether x is a whole image or video, or a line of so many channels; [B, S, channels] is a sequence."""
    if not isinstance(x, Tensor) or part_of(x) is not None or not x.is_floating_point():
        return False
    return x.dim() in (4, 5) or (x.dim() == 3 and x.size(1) == channels != x.size(2))


def _channels_of_lines(model: torch.nn.Module) -> int | None:
    """Return the channels of the first convolution of a model of lines; None of other models."""
    lines = [m for m in model.modules() if isinstance(m, torch.nn.Conv1d)]
    return lines[0].in_channels if lines and not has_convolutions(model) else None


def _part_of_image(parts: Parts, x: Tensor, model: torch.nn.Module) -> Part | None:
    """Return the part of rows of images [N, C, H, W] or videos [N, C, T, H, W]; None if they are too few.

    It is of columns where rows are few: what a model's strides leave of them would lie too unevenly. Rows of
    which strides make one lie on one rank, as far as the ranks' parts are no more uneven by that.
    """
    kinds = _OF_LINES if x.dim() == 3 else _OF_IMAGES
    dims = range(max(x.dim() - 2, 2), x.dim())
    strides = {dim: _stride(model, kinds, dim - x.dim()) for dim in dims}
    coarsest = [
        parts.part(dim, (max(x.size(dim) // stride, 1),))
        for dim, stride in strides.items()
        if x.size(dim) >= parts.world
    ]
    chosen = evenest(coarsest)
    if chosen is None:
        return None
    dim = chosen.dim
    size, most = x.size(dim), gcd(strides[dim], x.size(dim))
    units = [n for n in range(most, 0, -1) if most % n == 0]
    return min([parts.part(dim, (size // n,), 1, n) for n in units], key=lambda part: max(part.sizes))


def _stride(model: torch.nn.Module, kinds: tuple[type[Any], ...], axis: int) -> int:
    """Return how many rows of a model's input become one, if its modules run one after the other."""
    strides = [m.stride for m in model.modules() if isinstance(m, kinds)]
    return prod([int(each if isinstance(each, int) else each[axis]) for each in strides])


def has_convolutions(model: torch.nn.Module) -> bool:
    """Whether a model convolves images or videos."""
    return any(isinstance(m, _CONVOLUTIONS) for m in model.modules())
