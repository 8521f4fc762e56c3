# SPDX-License-Identifier: Apache-2.0
"""What a trace has of a tensor: which call read or returned it, and what it then was."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._model.part import Part, part_of
from ..sequence_layout import SequenceLayout
from .sketches import tolerance

MAKER = -1  # `times` of what stands for a function of autograd's graph


class Spot(NamedTuple):
    """One call of a function. Both runs have the same.

    module: the name of the innermost module, None outside of the model. times: how often this was called
    at the same place before.
    """

    function: str
    file: str
    line: int
    module: str | None
    kind: str
    times: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class Key(NamedTuple):
    """A tensor of a call."""

    spot: Spot
    verb: str  # "takes" of a model's forward, "reads", "returns", or "leaves" of one that returns nothing
    at: int


class Entry:
    """A tensor as it was when a call read or returned it.

    Attributes:
        part, shape: of this rank's tensor in the sharded run.
        value: its sketch, in the run of one process that of the same part. None: it is not compared.
        few: of the whole tensor, in the run of one process.
        floor: what is below may be what rounding left.
        gradient: its sketch; None if there was none.
        readers: the calls that read it.
        maker: the function of autograd that made it, if no call did.
    """

    def __init__(self, x: Tensor, floor: float) -> None:
        self.part, self.shape = part_of(x), x.shape
        self.version = -1 if x.is_inference() else x._version
        self.tolerance, self.floor = tolerance(x.dtype), floor
        self.value: Tensor | None = None
        self.few: Tensor | None = None
        self.gradient: Tensor | None = None
        self.readers: list[Spot] = []
        self.maker = ""
        self.is_input = self.is_followed = self.is_part = False


Local = Callable[[Tensor, Part | None, torch.Size], Tensor | None]


def local_of_view(x: Tensor, part: Part | None, shape: torch.Size) -> Tensor | None:
    """Return the part that this rank had of a whole tensor; None if it had a tensor of another shape."""
    if part is None:
        return x if x.shape == shape else None
    fits = part.dim < x.dim() and x.size(part.dim) == part.whole
    local = part.parts.shard(x, part) if fits else None
    return local if local is not None and local.shape == shape else None


def local_of_layout(layout: SequenceLayout) -> Local:
    """Return the same for a layout, of floats with a dim of all tokens; None of other tensors."""

    def local(x: Tensor, part: Part | None, shape: torch.Size) -> Tensor | None:
        dims = [dim for dim in range(x.dim()) if len(shape) == x.dim() and x.size(dim) != shape[dim]]
        if len(dims) != 1 or x.size(dims[0]) != layout.total or not x.is_floating_point():
            return None
        own = layout.shard(x, dims[0], grad_scale=None)
        return own if own.shape == shape else None

    return local
