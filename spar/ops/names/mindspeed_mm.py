# SPDX-License-Identifier: Apache-2.0
"""From MindSpeed-MM: a function that communicates nothing, for code that calls it."""

from __future__ import annotations

import torch

from ...sizes import as_named_int
from ...topology.resolve import Group


def reorder_output(
    output: torch.Tensor, cp_rank: int, cp_size: int, cp_group: Group, dim: int = 0
) -> torch.Tensor:
    """Reorder zigzag chunks (0, 2P-1, 1, 2P-2, ...) into natural order, as MindSpeed-MM does.

    This is the order of `load_balanced_split_forward_gather_backward`'s shards, concatenated by rank. Nothing
    is communicated; MindSpeed-MM's callers pass cp_rank and cp_group.

    Args:
        output: any strided tensor. Its size along `dim` is a multiple of 2 * cp_size.
        cp_rank: ignored.
        cp_size: P, the number of ranks.
        cp_group: ignored.
        dim: the dim of the chunks.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError: cp_size is below 1, the size is not a multiple of 2 * cp_size, or dim is out of range.
    """
    cp_size, dim = as_named_int("reorder_output: cp_size", cp_size), as_named_int("reorder_output: dim", dim)
    if cp_size < 1:
        raise ValueError(f"reorder_output: cp_size is {cp_size}; expected at least 1")
    if not -output.dim() <= dim < output.dim():
        raise ValueError(
            f"reorder_output: dim is {dim}; expected {-output.dim()} to {output.dim() - 1} "
            f"for an input of shape {list(output.shape)}"
        )
    total = output.size(dim)
    if total % (2 * cp_size):
        raise ValueError(
            f"reorder_output: output has {total} in dim {dim}; expected a multiple of {2 * cp_size}, "
            f"two chunks for each of {cp_size} ranks"
        )
    chunks = output.unflatten(dim, (2 * cp_size, total // (2 * cp_size)))
    dim %= output.dim()
    halves = chunks.unflatten(dim, (cp_size, 2)).unbind(dim + 1)
    return torch.cat((halves[0], halves[1].flip(dim)), dim).flatten(dim, dim + 1)
