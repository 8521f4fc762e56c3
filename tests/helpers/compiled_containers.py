# SPDX-License-Identifier: Apache-2.0
"""Blocks whose arguments and results are in dataclasses, lists and objects."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compiled_blocks import Block, Net


@dataclass
class Stream:
    x: Tensor
    more: dict[str, Any]


class OfDataclasses(Block):
    def forward(self, x: Tensor, *rest: Any) -> Any:
        (stream,) = rest
        y = super().forward(x + stream.more["a"][0])
        return Stream(y, {"a": [y * 2, stream.more["n"] + 1], "n": stream.more["n"] + 1})


class DataclassNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        stream = Stream(self.embed(x), {"n": 0, "a": [torch.ones(())]})
        for block in self.blocks:
            stream = block(stream.x, stream)
        out: Tensor = self.head(stream.x + stream.more["a"][0]) * stream.more["n"]
        return out


class Appends(Block):
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        y: Tensor = super().forward(x)
        rest[0].append(y * 0.5)
        return y


class AppendingNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, skips)
        return self.head(x + torch.stack(skips).sum(0))


class Pair(NamedTuple):
    items: list[Tensor]
    again: list[Tensor]


@dataclass
class State:
    pair: Pair
    named: OrderedDict[str, Tensor]
    x: Tensor


class ChangesState(Block):
    """Changes containers that others refer to, keeps one and returns another."""

    kept: Any = None

    def forward(self, x: Tensor, *rest: Any) -> Any:
        (state,) = rest
        y: Tensor = super().forward(x + state.x)
        state.pair.items.append(y * 0.5)
        state.pair.again[0] = state.pair.again[0] + y
        state.named["y"] = y + len(state.pair.items)
        state.x = state.x * 2
        self.kept = state.pair.again
        return y, state.pair.items


class StateNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        items = [x * 0.1]
        state = State(Pair(items, items), OrderedDict(x=x), x * 0.3)
        for block in self.blocks:
            x, returned = block(x, state)
            assert returned is items is block.kept is state.pair.again
        assert list(state.named) == ["x", "y"]
        return self.head(x + torch.stack(items).sum(0) + state.named["y"] + state.x)


class Tagged(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(x, "gain", 1.0)


class TaggedNet(Net):
    """Its blocks get a whole tensor, and a part, that have an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x.gain = 2.0  # type: ignore[attr-defined]
            x = block(x)
        return self.head(x)
