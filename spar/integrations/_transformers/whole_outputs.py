# SPDX-License-Identifier: Apache-2.0
"""This rank's part of the outputs of a module that ran whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._exchange.cut_and_join import selected
from ..._exchange.layouts import pieces
from ..._group.registry import place_of
from ...sequence_layout import SequenceLayout, numbers_of


def own_parts(path: str, layout: SequenceLayout, output: Any) -> Any:
    """Keep the own tokens of outputs, tensors or nested containers of them.

    The first tensor has to have tokens, `[B, S, ...]`. Others may, too; or be attention weights
    `[B, H, S, S]`, of which the own queries are kept. What has no tokens is the same on each rank: its
    gradient would be counted once for each, and is an error.

    Raises:
        ValueError: it is not clear what is of own tokens.
    """
    outputs = _Outputs(path, layout)
    kept = outputs.of("its output", output)
    if outputs.batch is None:
        raise outputs.error("its output", type(output).__name__, "a tensor [B, S, ...] first")
    return kept


class _Outputs:
    def __init__(self, path: str, layout: SequenceLayout) -> None:
        place = place_of(layout.group)
        self.where = f"whole {path} on rank {place.rank} of {place.world}"
        self.total, self.world = layout.total, place.world
        self.batch: int | None = None  # of the first tensor
        runs = pieces(numbers_of(layout, 0), place.world, place.rank)
        self.parts = [(run.start, run.size) for run in runs if run.size]

    def of(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(name, value)
        if isinstance(value, dict):
            entries = {key: self.of(f"{name}[{key!r}]", x) for key, x in value.items()}
            return entries if type(value) is dict else type(value)(**entries)
        if isinstance(value, (tuple, list)):
            items = [self.of(f"{name}[{i}]", x) for i, x in enumerate(value)]
            if isinstance(value, list):
                return items
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise self.error(name, f"a {type(value).__name__}", "tensors, and no cache: pass no past_key_values")

    def tensor(self, name: str, x: Tensor) -> Tensor:
        shape = list(x.shape)
        if self.batch is None:
            if x.dim() < 2 or x.size(1) != self.total:
                raise self.error(name, f"of shape {shape}", f"[B, {self.total}, ...], all tokens")
            self.batch = x.size(0)
            return selected(x, self.parts, 1).contiguous()
        if x.dim() == 4 and shape[2:] == [self.total, self.total]:
            return selected(x, self.parts, 2).contiguous()
        if x.dim() > 1 and x.size(1) == self.total and x.size(0) in (1, self.batch):
            return selected(x, self.parts, 1).contiguous()
        if {self.total, self.batch * self.total} & set(shape):
            raise self.error(
                name, f"of shape {shape}, which has all tokens", f"[B, {self.total}, ...] or no tokens"
            )
        if self.world > 1 and x.requires_grad:
            kept: Tensor = _WithoutGradient.apply(  # type: ignore[no-untyped-call]
                x, f"{self.where}: {name} of shape {shape}"
            )
            return kept
        return x

    def error(self, name: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {name} is {value}; expected {expected}")


class _WithoutGradient(torch.autograd.Function):
    """The same tensor, whose gradient is an error: each rank would add the whole one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ValueError(
            f"{ctx.name} has a gradient, and it is the same on each rank: it would be added once for each of "
            "them. Detach it, or do not run this module whole"
        )
