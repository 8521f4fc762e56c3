# SPDX-License-Identifier: Apache-2.0
"""The rows of images and videos as a sequence: of which rows each rank has its part."""

from __future__ import annotations

from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from .part import Part, Parts, part_of
from .view import View

_CONVOLUTIONS = (torch.nn.Conv2d, torch.nn.Conv3d)


def shard_rows(view: View, model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Shard the rows of the largest of a model's images, and of those that are as high; None without images.

    Called outside of the view. Lists of tensors stay, as models keep in them what the next call needs.
    """
    images = [x for x in (*args, *kwargs.values()) if _is_image(x)]
    if not images:
        return None
    main = max(images, key=Tensor.numel)
    part = _rows_of(view.parts, main, model)
    if part is None:
        return args, kwargs

    def sharded(x: Any) -> Any:
        if not _is_image(x) or x.size(-2) != main.size(-2):
            return x
        return view.shard(x, part.at(x.dim() - 2))

    return tuple([sharded(x) for x in args]), {name: sharded(x) for name, x in kwargs.items()}


def _is_image(x: Any) -> bool:
    is_whole = isinstance(x, Tensor) and part_of(x) is None
    return is_whole and x.dim() in (4, 5) and x.is_floating_point()


def _rows_of(parts: Parts, x: Tensor, model: torch.nn.Module) -> Part | None:
    """Return the part of rows of images [N, C, H, W] or videos [N, C, T, H, W]; None if they are too few.

    Rows of which a model's convolutions make one lie on one rank, as far as each rank has some.
    """
    dim, height = x.dim() - 2, x.size(-2)
    if height < parts.world:
        return None
    inner = gcd(_stride(model), height)
    while height // inner < parts.world:
        inner = max([n for n in range(1, inner) if inner % n == 0])
    return parts.part(dim, (height // inner,), 1, inner)


def _stride(model: torch.nn.Module) -> int:
    """Return how many rows of a model's input become one, if its convolutions run one after the other."""
    return prod([int(m.stride[-2]) for m in model.modules() if isinstance(m, _CONVOLUTIONS)])


def has_convolutions(model: torch.nn.Module) -> bool:
    """Whether a model convolves images or videos."""
    return any(isinstance(m, _CONVOLUTIONS) for m in model.modules())
