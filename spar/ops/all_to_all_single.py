# SPDX-License-Identifier: Apache-2.0
"""`all_to_all_single`: free counts for each pair of ranks, as the tokens of experts need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._exchange.arguments import Arguments, Sizes, apply_together
from .._exchange.layouts import by_receiver
from ..topology.resolve import Group


def all_to_all_single(
    input_: torch.Tensor,
    split_sizes: Sequence[Sizes] | torch.Tensor,
    group: Group = None,
    dim: int = 0,
) -> torch.Tensor:
    """Send each rank a slice of this rank's input, by counts that are free for each pair of ranks.

    As torch.distributed.all_to_all_single, for which rank r's input_split_sizes are `split_sizes[r]`, and its
    output_split_sizes `[row[r] for row in split_sizes]`. Here all ranks pass the counts of all ranks, which
    one `spar.all_gather(counts[None], group)` of each rank's own gives, and compare them.

    y on rank r = concat over p of x_p.split(split_sizes[p], dim)[r] along dim. The gradient goes back the
    same way.

    Args:
        input_: any strided tensor, of any dtype.
        split_sizes: `[P, P]`, how many items of dim each rank (row) sends to each (column): an int tensor, or
            a list of rows. Row r sums to rank r's size of dim. The same on all ranks.
        group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current topology's
            sequence group (WORLD if there is none).
        dim: the dim to split.

    Returns:
        A new contiguous tensor; `input_` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, a size is negative, a row or an entry is missing, or this rank's row
            does not sum to its size of dim.
        TypeError: the sizes are not ints.
        MismatchError: calls differ between ranks, also in one size. Every rank raises; nothing was exchanged.
    """
    with Arguments("all_to_all_single", input_, group) as call:
        dim, world = call.dim("dim", dim), call.world
        if not isinstance(split_sizes, (list, tuple, torch.Tensor)) or len(split_sizes) != world:
            what = f"{split_sizes!r:.200}"
            raise call.error("split_sizes", what, f"{world} rows, of what each rank sends to each")
        rows = [
            call.sizes(f"split_sizes[{p}]", () if row is None else row) for p, row in enumerate(split_sizes)
        ]
        sent, own = sum(rows[call.rank]), input_.size(dim)
        if sent != own:
            value = f"a table whose row {call.rank} sums to {sent}"
            raise call.error("split_sizes", value, f"{own}, the size of dim {dim} of its input_")
        # In the order of the senders, each rank's part of what each of them sends.
        received = [row[rank] for rank in range(world) for row in rows]
        return apply_together((call,), (by_receiver(dim, world, received),))[0]
