# SPDX-License-Identifier: Apache-2.0
"""The samples of a batch `[B, S]`: the documents of each row of a packed layout, else the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .._exchange.arguments import Arguments
from .._exchange.layouts import extent
from .._group.registry import place_of
from ..sequence_layout import SequenceLayout, numbers_of


def check_shard(call: Arguments, name: str, x: Tensor, layout: SequenceLayout) -> None:
    """Check that dim 1 has this rank's tokens."""
    place = place_of(layout.group)
    size = extent(numbers_of(layout, 0), place.world, place.rank)
    if x.dim() < 2 or x.size(1) != size:
        expected = f"{size} in dim 1, rank {place.rank}'s shard in {layout}"
        raise call.error(name, f"of shape {list(x.shape)}", expected)


def sample_of_token(layout: SequenceLayout, rows: int, device: torch.device) -> Tensor:
    """Return the sample of each token of this rank: int64 `[B, S/P]`; samples count row by row."""
    count, ends = len(layout.lengths), layout.cu_seqlens().to(torch.int64)
    document = torch.searchsorted(ends, layout.index(), right=True) - 1
    first = torch.arange(rows, device="cpu")[:, None] * count
    return (first + document).to(device)


def split_samples(whole: Tensor, layout: SequenceLayout) -> list[Tensor]:
    """Split `[B, S, ...]` in natural order into its samples, `[length, ...]` each."""
    return [sample for row in whole.unbind() for sample in row.split(layout.lengths)]
