"""The public operations on one group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._runtime.call import Call, cumulative_hint, from_cumulative
from ._runtime.exchange import ONE
from .sizes import as_named_int, share, totals_of_share
from .topology.resolve import Group


def all_to_all(
    input_: torch.Tensor,
    process_group: Group,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    gather_size: int | None = None,
) -> torch.Tensor:
    """Scatters one dim over the group and gathers another. Source: seed 003, `all_to_all`.

    y on rank r = concat over p of x_p.split(sizes, scatter_dim)[r] along gather_dim, where the scatter dim is
    shared by the size rule (`cal_split_sizes`). The gradient is the same operation with the dims exchanged.

    Args:
        input_: any strided tensor of at least two dims, of any dtype; read through its strides.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None (docs/topology.md).
        scatter_dim: the dim to scatter; each rank holds all of it, and keeps its share.
        gather_dim: the dim to gather; each rank holds its own part of it.
        gather_size: total extent of the gather dim, of which each rank must hold the size rule's share. By
            default every rank is taken to hold as much as this one.

    Returns:
        A new contiguous tensor; in a group of one `input_` itself.

    Raises:
        ValueError: equal dims, a dim out of range, a gather_size of which this rank holds another share.
        MismatchError: the ranks make different calls; on all ranks, nothing was exchanged.
    """
    call = Call("all_to_all", input_, process_group)
    try:
        scatter = call.dim("scatter_dim", scatter_dim)
        gather = call.dim("gather_dim", gather_dim)
        if scatter == gather:
            raise call.error(
                "scatter_dim",
                f"{scatter_dim} and gather_dim is {gather_dim}",
                f"two different dims of an input with {input_.dim()}",
            )
        local = input_.shape[gather]
        if gather_size is None:
            gather_size = local * call.world
        else:
            gather_size = call.integer("gather_size", gather_size, "an int or None")
            if gather_size < 0 or share(gather_size, call.world, call.rank) != local:
                fitting = totals_of_share(local, call.world, call.rank)
                raise call.wrong_total("gather_size", gather_size, gather, fitting)
        return call.apply("all_to_all", (scatter, gather, gather_size), ONE)
    except BaseException as error:
        call.fail(error)
        raise


def split_forward_gather_backward(
    input_: torch.Tensor,
    process_group: Group,
    dim: int,
    split_sizes: Sequence[int] | torch.Tensor | None = None,
    grad_scale: str | float | None = "down",
) -> torch.Tensor:
    """Keeps this rank's part of a tensor that all ranks hold; gradients are gathered. Source: seed 003.

    y on rank r = x.split(sizes, dim)[r]. Forward communicates nothing.

    Args:
        input_: any strided tensor, the same on all ranks.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None (docs/topology.md).
        dim: the dim to split.
        split_sizes: one size for each rank that sum to the dim's extent, a list, tuple or 1-D int tensor; by
            default the size rule's.
        grad_scale: the gathered gradient is multiplied ("up") or divided ("down") by the group's size, left
            as it is (None), or multiplied by a float.

    Returns:
        A view of `input_` where the part is contiguous as it lies, else a contiguous copy; in a group of one
        `input_` itself.

    Raises:
        ValueError: a dim out of range, sizes that do not sum to the extent, an unknown grad_scale.
        TypeError: sizes that are not ints, a gradient is recorded that its dtype cannot scale.
    """
    call = Call("split_forward_gather_backward", input_, process_group, exchanges=0)
    dim = call.dim("dim", dim)
    sizes = call.sizes("split_sizes", split_sizes)
    if sizes and sum(sizes) != input_.size(dim):
        raise call.error(
            "split_sizes", list(sizes), f"sizes that sum to {input_.size(dim)}, the extent of dim {dim}"
        )
    return call.apply("split", (dim, *sizes), call.grad_scale(grad_scale))


def gather_forward_split_backward(
    input_: torch.Tensor,
    process_group: Group,
    dim: int,
    gather_sizes: Sequence[int] | torch.Tensor | None = None,
    grad_scale: str | float | None = "up",
) -> torch.Tensor:
    """Concatenates all ranks' parts on every rank; each keeps its part of the gradient. Source: seed 003.

    y = concat over p of x_p along dim. Backward communicates nothing: it is right where every rank holds the
    same gradient of y, as when all compute the same loss from it.

    Args:
        input_: this rank's part, any strided tensor.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None (docs/topology.md).
        dim: the dim to concatenate.
        gather_sizes: one size for each rank, a list, tuple or 1-D int tensor; by default all ranks must hold
            as much as this one.
        grad_scale: this rank's part of the gradient is multiplied ("up") or divided ("down") by the group's
            size, left as it is (None), or multiplied by a float.

    Returns:
        A new contiguous tensor; in a group of one `input_` itself.

    Raises:
        ValueError: a dim out of range, gather_sizes[rank] other than the input's size, an unknown
            grad_scale.
        TypeError: sizes that are not ints, a gradient is recorded that its dtype cannot scale.
        MismatchError: the ranks make different calls; on all ranks, nothing was exchanged.
    """
    call = Call("gather_forward_split_backward", input_, process_group)
    try:
        dim = call.dim("dim", dim)
        sizes = call.sizes("gather_sizes", gather_sizes)
        if sizes and sizes[call.rank] != input_.size(dim):
            raise call.error(
                "gather_sizes",
                list(sizes),
                f"{input_.size(dim)} at index {call.rank}, as rank {call.rank} holds that much of dim {dim}"
                + (". Did you split the local size?" if sum(sizes) == input_.size(dim) else ""),
            )
        return call.apply("gather", (dim, *sizes), call.grad_scale(grad_scale))
    except BaseException as error:
        call.fail(error)
        raise


def load_balanced_split_forward_gather_backward(
    input_: torch.Tensor, process_group: Group, dim: int = 0
) -> torch.Tensor:
    """Keeps two chunks of a sequence: with a causal mask all ranks have the same work. Source: seed 003.

    y on rank r = chunks r and 2P-1-r of x.chunk(2P, dim), for P ranks. Forward communicates nothing. Backward
    is one exchange: gradients are gathered into natural order and divided by P.

    Args:
        input_: any strided tensor, the same on all ranks; its extent in dim is a multiple of 2P.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None (docs/topology.md).
        dim: the dim to split.

    Returns:
        A new contiguous tensor; in a group of one `input_` itself.

    Raises:
        ValueError: a dim out of range, an extent that is no multiple of 2P.
    """
    call = Call("load_balanced_split_forward_gather_backward", input_, process_group, exchanges=0)
    dim = call.dim("dim", dim)
    total = call.zigzag("input_", input_.size(dim), call.world)
    return call.apply("zigzag_split", (dim, 1, total), (float(call.world), True))


def load_balanced_gather_forward_split_backward(
    input_: torch.Tensor, process_group: Group, dim: int = 0
) -> torch.Tensor:
    """Undoes `load_balanced_split_forward_gather_backward`, in one exchange. Source: seed 003.

    Backward keeps this rank's two chunks of the gradient, multiplied by the P ranks; it communicates nothing,
    and is right where every rank holds the same gradient of y.

    Args:
        input_: this rank's two chunks, any strided tensor; all ranks hold as much.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None (docs/topology.md).
        dim: the dim that was split.

    Returns:
        A new contiguous tensor; in a group of one `input_` itself.

    Raises:
        ValueError: a dim out of range, an odd extent.
        MismatchError: the ranks make different calls; on all ranks, nothing was exchanged.
    """
    call = Call("load_balanced_gather_forward_split_backward", input_, process_group)
    try:
        dim = call.dim("dim", dim)
        total = call.zigzag("input_", input_.size(dim) * call.world, call.world)
        return call.apply("zigzag_gather", (dim, 1, total), (float(call.world), False))
    except BaseException as error:
        call.fail(error)
        raise


def packed_data_split_forward_gather_backward(
    hidden_states: torch.Tensor,
    process_group: Group,
    sequence_lengths: Sequence[int] | torch.Tensor,
    dim: int = 0,
) -> torch.Tensor:
    """Keeps this rank's part of each of several sequences that lie one behind the other. Source: seed 003.

    y on rank r = concat over sequences s of x_s.split(cal_split_sizes(len(x_s), P), dim)[r]. Forward
    communicates nothing. Backward is one exchange, however many sequences there are: gradients are gathered
    and divided by P.

    Args:
        hidden_states: the packed sequences, the same on all ranks; any strided tensor.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None (docs/topology.md).
        sequence_lengths: a list, tuple or 1-D int tensor; they sum to the extent of dim. Any may be 0.
        dim: the dim in which they lie.

    Returns:
        A new contiguous tensor; in a group of one `hidden_states` itself.

    Raises:
        ValueError: a dim out of range, a length below 0, lengths that do not sum to the extent.
        TypeError: lengths that are not ints.
    """
    name = "packed_data_split_forward_gather_backward"
    call = Call(name, hidden_states, process_group, "hidden_states", exchanges=0)
    dim = call.dim("dim", dim)
    lengths = call.lengths("sequence_lengths", sequence_lengths)
    call.check_sum("sequence_lengths", lengths, dim)
    return call.apply("packed_split", (dim, 1, len(lengths), *lengths), (float(call.world), True))


def packed_data_gather_forward_split_backward(
    local_hidden_states: torch.Tensor,
    all_split_sizes: torch.Tensor | Sequence[Sequence[int]],
    process_group: Group,
    dim: int = 0,
) -> torch.Tensor:
    """Puts packed sequences together again: one exchange, however many there are. Source: seed 003.

    y = concat over sequences s, over ranks p, of p's part of s. Backward keeps this rank's parts of the
    gradient, multiplied by the P ranks; it communicates nothing, and is right where every rank holds the same
    gradient of y.

    Args:
        local_hidden_states: this rank's parts, one behind the other; any strided tensor.
        all_split_sizes: [P, sequences] what each rank holds of each sequence, as
            `cal_split_sizes_multi` gives it; a tensor or a list of rows. Under torch.compile nested lists.
        process_group: a ProcessGroup, 1-D DeviceMesh, (mesh, dim), group name, or None (docs/topology.md).
        dim: the dim in which they lie.

    Returns:
        A new contiguous tensor; in a group of one `local_hidden_states` itself.

    Raises:
        ValueError: a dim out of range, sizes below 0, not a row for each rank, a row that is not this rank's.
        TypeError: sizes that are not ints.
        MismatchError: the ranks make different calls; on all ranks, nothing was exchanged.
    """
    name = "packed_data_gather_forward_split_backward"
    call = Call(name, local_hidden_states, process_group, "local_hidden_states")
    try:
        dim = call.dim("dim", dim)
        sequences, own, numbers = call.table("all_split_sizes", all_split_sizes)
        local = local_hidden_states.size(dim)
        if own != local:
            expected = f"{local}, the size of dim {dim} of its local_hidden_states"
            lengths = from_cumulative(numbers) if len(numbers) == sequences else ()
            if lengths and sum(share(length, call.world, call.rank) for length in lengths) == local:
                expected += cumulative_hint(lengths)
            raise call.error("all_split_sizes", f"a table whose row {call.rank} sums to {own}", expected)
        return call.apply("packed_gather", (dim, 1, sequences, *numbers), (float(call.world), False))
    except BaseException as error:
        call.fail(error)
        raise


def reorder_output(
    output: torch.Tensor, cp_rank: int, cp_size: int, cp_group: Group, dim: int = 0
) -> torch.Tensor:
    """Puts chunks that lie in the order 0, 2P-1, 1, 2P-2, ... into natural order. Source: seed 003.

    So lie the parts of `load_balanced_split_forward_gather_backward` when they are gathered rank by rank. The
    order is arithmetic: nothing is communicated, cp_rank and cp_group are there for callers that pass them.

    Args:
        output: any strided tensor; its extent in dim is a multiple of 2 * cp_size.
        cp_rank: not used.
        cp_size: P, the number of ranks.
        cp_group: not used.
        dim: the dim in which the chunks lie.

    Returns:
        A new tensor of the same shape.

    Raises:
        ValueError: cp_size below 1, an extent that is no multiple of 2 * cp_size, a dim out of range.
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
