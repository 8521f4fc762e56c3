# SPDX-License-Identifier: Apache-2.0
"""Arguments of a forward that are this rank's part of a sequence, as its data loader read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.gather import all_gather
from .nested import changed
from .part import Part, Parts, mark, part_of, whole_shape
from .places import forward_on

_DIM = 1  # [B, S_local, ...]


class GivenParts:
    """Which arguments of a forward are parts.

    names: of these arguments. positional: those of all that may be given by position.
    """

    def __init__(self, names: Sequence[str], positional: Sequence[str]) -> None:
        self.names, self.positional = frozenset(names), positional

    def mark(self, parts: Parts, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments, with those marked that are parts: fewer tokens than ranks become whole.

        Collective, unless the layout is given.

        Raises:
            ValueError: an argument is no tensor `[B, S_local, ...]`, or the ranks' numbers of tokens are not
                those of the layout.
        """
        if not self.names:
            return args, kwargs
        named = dict(zip(self.positional, args, strict=False)) | kwargs
        given = {name: named[name] for name in self.names if named.get(name) is not None}
        sizes = {name: x.size(_DIM) for name, x in given.items() if isinstance(x, Tensor) and x.dim() > _DIM}
        if len(sizes) < len(given) or len(set(sizes.values())) != 1:
            told = ", ".join(f"{name}: {_told(x)}" for name, x in sorted(given.items())) or "none of them"
            raise ValueError(
                f"{forward_on(parts)}: the arguments of inputs= are {told}; expected tensors "
                "[B, S_local, ...] of one S_local"
            )
        part = _part(parts, next(iter(sizes.values())))

        def marked(name: str, x: Any) -> Any:
            if name not in given:
                return x
            return _marked(x, part) if part.tokens >= parts.world else parts.gather(_marked(x, part))

        # Arguments of *args behind the named ones stay.
        names = [*self.positional, *[""] * len(args)]
        return (
            tuple([marked(name, x) for name, x in zip(names, args, strict=False)]),
            {name: marked(name, x) for name, x in kwargs.items()},
        )

    def gather(self, parts: Parts, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the arguments as one process has them. Collective."""
        return changed(parts.gather, self.mark(parts, args, kwargs)) if self.names else (args, kwargs)


def compared(named: dict[str, Any]) -> dict[str, Any]:
    """Return what ranks compare of a forward's arguments: of parts the whole shape, not the values."""
    return {name: x if part_of(x) is None else whole_shape(x) for name, x in named.items()}


def _marked(x: Tensor, part: Part) -> Tensor:
    # The caller's tensor stays what it is. Models may view a whole tensor, which has no gaps.
    own = x.view_as(x) if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    if own.requires_grad:  # gradients of parts are those of the sum of all ranks' losses
        own.register_hook(_share_of(part.parts.world))
    return mark(own, part)


def _share_of(world: int) -> Callable[[Tensor | None], Tensor | None]:
    return lambda gradient: None if gradient is None else gradient / world


def _part(parts: Parts, size: int) -> Part:
    if parts.given is None:
        sizes = all_gather(torch.tensor([size], device=parts.device), parts.group).tolist()
        total = sum(sizes)
        expected = parts.layout((total,)).sizes
    else:
        total, expected = parts.given.total, parts.given.sizes
        sizes = [*expected]
        sizes[parts.rank] = size
    if tuple(sizes) != expected:
        raise ValueError(
            f"{forward_on(parts)}: the ranks have {sizes} tokens; expected {[*expected]}, as the layout "
            f"shards {total} tokens"
        )
    return parts.part(_DIM, (total,))


def _told(x: Any) -> str:
    return f"{[*x.shape]}" if isinstance(x, Tensor) else type(x).__name__
