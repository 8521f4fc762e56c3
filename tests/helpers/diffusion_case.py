# SPDX-License-Identifier: Apache-2.0
"""What the tiny models of diffusers' transformer classes have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Inputs = dict[str, Any]


class Draw:
    """Draws a model's inputs; the same on each rank."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def ids(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self._generator)

    def image(self, channels: int = 4, height: int = 10, width: int = 18, batch: int = 2) -> Inputs:
        """With patches of 2: 5 x 9 tokens."""
        return {"hidden_states": self(batch, channels, height, width), "timestep": steps(batch)}

    def video(
        self, channels: int = 4, frames: int = 3, height: int = 6, width: int = 10, batch: int = 2
    ) -> Inputs:
        """With patches of 1 x 2 x 2: 3 x 3 x 5 tokens."""
        return {"hidden_states": self(batch, channels, frames, height, width), "timestep": steps(batch)}

    def tokens(self, channels: int = 4, count: int = 45, batch: int = 2) -> Inputs:
        return {"hidden_states": self(batch, count, channels), "timestep": (steps(batch) / 1000).double()}

    def text(self, width: int = 8, length: int = 7, batch: int = 2) -> Inputs:
        return {"encoder_hidden_states": self(batch, length, width)}

    def flux(self, axes: int = 3, **others: Any) -> Inputs:
        """An image of 5 x 9 tokens, 7 of text, and the places of both."""
        places = {"img_ids": grid(5, 9, axes), "txt_ids": torch.zeros(7, axes, dtype=torch.float64)}
        return self.tokens() | self.text() | places | others


def steps(batch: int = 2) -> Tensor:
    return torch.arange(batch) * 100 + 50


def grid(height: int, width: int, axes: int = 3) -> Tensor:
    """Return the rows and columns of an image's tokens, in axes 1 and 2 of their places."""
    at = torch.arange(height * width)
    places = torch.zeros(height * width, axes, dtype=torch.float64)
    places[:, 1], places[:, 2] = at // width, at % width
    return places


def mask(*valid: int, length: int = 7) -> Tensor:
    """Return the mask of samples with so many tokens, of the same padded length."""
    return torch.arange(length) < torch.tensor(valid)[:, None]


class Case(NamedTuple):
    """A class's tiny model.

    Attributes:
        config: the arguments of its constructor.
        inputs: returns the arguments of its forward.
        share: the multiply-adds inside blocks that a rank of two does at most, of one process's.
        dtype: of weights and inputs.
        in_double: whether conversions to fewer bits are to float64; some classes have other float32 tensors.
        has_backward: on a CPU.
    """

    config: dict[str, Any]
    inputs: Callable[[Draw], Inputs]
    share: float = 0.6
    dtype: torch.dtype = torch.float64
    in_double: bool = True
    has_backward: bool = True


HEADS = {"num_attention_heads": 3, "attention_head_dim": 12}
CHANNELS = {"in_channels": 4, "out_channels": 4}
SD = {"num_attention_heads": 3, "attention_head_dim": 8, "num_layers": 2, "norm_num_groups": 1}
ROTARY = {"axes_dims_rope": (4, 4, 4)}
