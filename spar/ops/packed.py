# SPDX-License-Identifier: Apache-2.0
"""Shards of packed sequences on one group, by the names of MindSpeed-MM."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._exchange.arguments import Arguments, cumulative_hint, from_cumulative
from .._exchange.layouts import WHOLE, packed
from ..sizes import share
from ..topology.resolve import Group


def packed_data_split_forward_gather_backward(
    hidden_states: torch.Tensor,
    process_group: Group,
    sequence_lengths: Sequence[int] | torch.Tensor,
    dim: int = 0,
) -> torch.Tensor:
    """Keep this rank's shard of each of several packed sequences, as MindSpeed-MM does.

    On rank r: y = concat over sequences s of x_s.split(cal_split_sizes(len(x_s), P), dim)[r]. Forward
    communicates nothing. Backward is one exchange for any number of sequences: it gathers gradients and
    divides them by P.

    Args:
        hidden_states: the packed sequences, the same on all ranks; any strided tensor.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        sequence_lengths: a list, tuple or 1-D int tensor. They sum to the size of `dim`; any may be 0.
        dim: the dim along which the sequences are packed.

    Returns:
        A new contiguous tensor; `hidden_states` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, a length is negative, or they do not sum to the size of `dim`.
        TypeError: the lengths are not ints.
    """
    name = "packed_data_split_forward_gather_backward"
    with Arguments(name, hidden_states, process_group, "hidden_states", exchanges=0) as call:
        dim = call.dim("dim", dim)
        lengths = call.lengths("sequence_lengths", sequence_lengths)
        call.check_sum("sequence_lengths", lengths, dim)
        return call.apply(WHOLE, packed(dim, len(lengths), lengths), (float(call.world), True))


def packed_data_gather_forward_split_backward(
    local_hidden_states: torch.Tensor,
    all_split_sizes: torch.Tensor | Sequence[Sequence[int]],
    process_group: Group,
    dim: int = 0,
) -> torch.Tensor:
    """Gather packed sequences on every rank, in one exchange for any number of them, as MindSpeed-MM does.

    y = concat over sequences s, over ranks p, of p's shard of s. Backward keeps this rank's shards of the
    gradient, times P. It communicates nothing, and is exact if every rank holds the same gradient of y.

    Args:
        local_hidden_states: this rank's shards, packed; any strided tensor.
        all_split_sizes: `[P, sequences]`, each rank's local size of each sequence, as
            `cal_split_sizes_multi` returns it: a tensor or a list of rows (nested lists under torch.compile).
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        dim: the dim along which the sequences are packed.

    Returns:
        A new contiguous tensor; `local_hidden_states` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, a size is negative, a row is missing, or this rank's row does not
            sum to its local size.
        TypeError: the sizes are not ints.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    name = "packed_data_gather_forward_split_backward"
    with Arguments(name, local_hidden_states, process_group, "local_hidden_states") as call:
        dim = call.dim("dim", dim)
        sequences, own, numbers = call.table("all_split_sizes", all_split_sizes)
        local = local_hidden_states.size(dim)
        if own != local:
            expected = f"{local}, the size of dim {dim} of its local_hidden_states"
            lengths = from_cumulative(numbers) if len(numbers) == sequences else ()
            if lengths and sum(share(length, call.world, call.rank) for length in lengths) == local:
                expected += cumulative_hint(lengths)
            raise call.error("all_split_sizes", f"a table whose row {call.rank} sums to {own}", expected)
        return call.apply(packed(dim, sequences, numbers), WHOLE, (float(call.world), False))
