# SPDX-License-Identifier: Apache-2.0
"""The splits and gathers on one group, also of packed sequences, by the names of MindSpeed-MM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from .._exchange.arguments import Arguments, cumulative_hint, from_cumulative
from .._exchange.layouts import WHOLE, even, packed, zigzag
from .._exchange.repeated import repeat, scale_key
from ..sizes import share
from ..topology.resolve import Group


def split_forward_gather_backward(
    input_: torch.Tensor,
    process_group: Group,
    dim: int,
    split_sizes: Sequence[int] | torch.Tensor | None = None,
    grad_scale: str | float | None = "down",
) -> torch.Tensor:
    """Keep this rank's shard of a tensor that all ranks hold; gather gradients, as MindSpeed-MM does.

    On rank r: y = x.split(sizes, dim)[r]. Forward communicates nothing.

    Args:
        input_: any strided tensor, the same on all ranks.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        dim: the dim to split.
        split_sizes: one local size per rank, as a list, tuple or 1-D int tensor. They sum to the size of
            `dim`. By default those of `cal_split_sizes`.
        grad_scale: what the gathered gradient is multiplied by: the world size ("up"), its reciprocal
            ("down"), a float, or nothing (None).

    Returns:
        A view of `input_` if the shard is contiguous, else a contiguous copy; `input_` itself in a group of
        one rank.

    Raises:
        ValueError: dim is out of range, the sizes do not sum to its size, or grad_scale is unknown.
        TypeError: the sizes are not ints, or the dtype of a recorded gradient cannot be scaled.
    """
    with Arguments("split_forward_gather_backward", input_, process_group, exchanges=0) as call:
        dim = call.dim("dim", dim)
        shards = call.parts("split_sizes", dim, split_sizes)
        return call.apply(WHOLE, shards, call.grad_scale(grad_scale))


def gather_forward_split_backward(
    input_: torch.Tensor,
    process_group: Group,
    dim: int,
    gather_sizes: Sequence[int] | torch.Tensor | None = None,
    grad_scale: str | float | None = "up",
) -> torch.Tensor:
    """Concatenate the shards of all ranks on every rank; keep this rank's shard of the gradient.

    As MindSpeed-MM does. y = concat over p of x_p along dim. Backward communicates nothing. It is exact if
    every rank holds the same gradient of y, as when all ranks compute the same loss from y.

    Args:
        input_: this rank's shard, any strided tensor.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        dim: the dim to concatenate.
        gather_sizes: one local size per rank, as a list, tuple or 1-D int tensor. By default all ranks must
            have the same size along `dim`.
        grad_scale: what this rank's shard of the gradient is multiplied by: the world size ("up"), its
            reciprocal ("down"), a float, or nothing (None).

    Returns:
        A new contiguous tensor; `input_` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, gather_sizes[rank] is not the local size, or grad_scale is unknown.
        TypeError: the sizes are not ints, or the dtype of a recorded gradient cannot be scaled.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    name, arguments = "gather_forward_split_backward", None
    if gather_sizes is None and type(dim) is int and (scale := scale_key(grad_scale)) is not None:
        arguments = dim, scale
    output, key = repeat(name, input_, process_group, arguments)
    if output is not None:
        return cast(torch.Tensor, output)
    with Arguments(name, input_, process_group) as call:
        dim = call.dim("dim", dim)
        shards = call.shards("gather_sizes", dim, gather_sizes) or even(dim, call.gathered_size(dim))
        return call.apply(shards, WHOLE, call.grad_scale(grad_scale), key)


def load_balanced_split_forward_gather_backward(
    input_: torch.Tensor, process_group: Group, dim: int = 0
) -> torch.Tensor:
    """Keep two chunks of a sequence, which balances the work under a causal mask, as MindSpeed-MM does.

    On rank r of P: y = chunks r and 2P-1-r of x.chunk(2P, dim) (zigzag order). Forward communicates nothing.
    Backward is one exchange: it gathers gradients into natural order and divides them by P.

    Args:
        input_: any strided tensor, the same on all ranks. Its size along `dim` is a multiple of 2P.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        dim: the dim to split.

    Returns:
        A new contiguous tensor; `input_` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, or its size is not a multiple of 2P.
    """
    with Arguments("load_balanced_split_forward_gather_backward", input_, process_group, exchanges=0) as call:
        dim = call.dim("dim", dim)
        total = call.zigzag("input_", input_.size(dim), call.world)
        return call.apply(WHOLE, zigzag(dim, total), (float(call.world), True))


def load_balanced_gather_forward_split_backward(
    input_: torch.Tensor, process_group: Group, dim: int = 0
) -> torch.Tensor:
    """Undo `load_balanced_split_forward_gather_backward` in one exchange, as MindSpeed-MM does.

    Backward keeps this rank's two chunks of the gradient, times P. It communicates nothing, and is exact if
    every rank holds the same gradient of y.

    Args:
        input_: this rank's two chunks, any strided tensor. All ranks must have the same size along `dim`.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None for the current
            topology's sequence group (WORLD if there is none).
        dim: the dim that was split.

    Returns:
        A new contiguous tensor; `input_` itself in a group of one rank.

    Raises:
        ValueError: dim is out of range, or its size is odd.
        MismatchError: calls differ between ranks. Every rank raises; nothing was exchanged.
    """
    with Arguments("load_balanced_gather_forward_split_backward", input_, process_group) as call:
        dim = call.dim("dim", dim)
        total = call.zigzag("input_", input_.size(dim) * call.world, call.world)
        return call.apply(zigzag(dim, total), WHOLE, (float(call.world), False))


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
        sequences, row_sum, numbers = call.table("all_split_sizes", all_split_sizes)
        local = local_hidden_states.size(dim)
        if row_sum != local:
            expected = f"{local}, the size of dim {dim} of its local_hidden_states"
            lengths = from_cumulative(numbers) if len(numbers) == sequences else ()
            if lengths and sum(share(length, call.world, call.rank) for length in lengths) == local:
                expected += cumulative_hint(lengths)
            raise call.error("all_split_sizes", f"a table whose row {call.rank} sums to {row_sum}", expected)
        return call.apply(packed(dim, sequences, numbers), WHOLE, (float(call.world), False))
